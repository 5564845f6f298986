"""Requests that are refused: by the proxy's state, or under a name of their own."""

from __future__ import annotations

from typing import Literal

from rl.errors import RollmillError

Reason = Literal["stale", "cancelled", "unavailable"]


class Refused(RollmillError):
    """A generation that was refused or ended, for a reason that the client is told."""

    def __init__(self, reason: Reason, detail: str):
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return self.detail


class Denied(RollmillError):
    """Carries the name and the HTTP status that the client is told."""

    def __init__(self, name: str, status: int, detail: str):
        super().__init__(name, status, detail)
        self.name, self.status, self.detail = name, status, detail

    def __str__(self) -> str:
        return self.detail
