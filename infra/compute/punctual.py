"""What Dask starts somewhere, and would wait for without end.

Invariant: it is started within `start_s`, or failed by a name that says what was late.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rl.errors import DeadlineExceeded


class Punctual:
    """Goes before one of Dask's own classes for workers."""

    def __init__(self, *args: Any, start_s: float, **options: Any):
        super().__init__(*args, **options)
        self._start_s = start_s

    async def start(self) -> Any:
        try:
            async with asyncio.timeout(self._start_s):
                return await super().start()  # type: ignore[misc]
        except TimeoutError as error:
            raise DeadlineExceeded(await self._late()) from error

    async def _late(self) -> str:
        """End what was begun; what is told."""
        raise NotImplementedError
