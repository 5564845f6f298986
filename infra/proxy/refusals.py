"""A request that is denied under a name of its own."""

from __future__ import annotations

from rl.errors import RollmillError


class Denied(RollmillError):
    """Carries the name and the HTTP status that the client is told."""

    def __init__(self, name: str, status: int, detail: str):
        super().__init__(name, status, detail)
        self.name, self.status, self.detail = name, status, detail

    def __str__(self) -> str:
        return self.detail
