"""How long an engine may take for a call, and which field of the configuration says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rl.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class Deadline:
    seconds: float
    field: str

    def __str__(self) -> str:
        return f"{self.seconds:g} s ({self.field})"

    @asynccontextmanager
    async def over(self, what: str) -> AsyncIterator[None]:
        """For the block. Raises DeadlineExceeded, which says what to raise; a deadline of somebody else's stays it."""
        scope = asyncio.timeout(self.seconds)
        try:
            async with scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise DeadlineExceeded(f"{what} was not done within {self}; raise that if it is just slow") from error


def control(seconds: float) -> Deadline:
    """For a call that changes what is served, or asks for it."""
    return Deadline(seconds, "deadlines.control")


def load(seconds: float) -> Deadline:
    """For reading a policy, while generation goes on."""
    return Deadline(seconds, "deadlines.load")
