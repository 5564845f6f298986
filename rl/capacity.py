"""What one engine can take: slots, and room for keys and values.

Invariants: `reserved` is the sum over `running`; a request fits where a slot is free and its tokens have room, and
alone it fits everywhere, so that none is too large to ever run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rl.placement import HardwareClass


@dataclass(slots=True)
class EngineLoad:
    """One engine with what runs on it."""

    name: str
    hardware: HardwareClass
    slots: int
    capacity: int
    """Tokens whose keys and values have room."""
    revision: int
    life: dict[str, int]
    """By tenant: a number that changes whenever the prefixes kept for it become void."""
    born: int
    running: dict[str, int] = field(default_factory=dict)
    """Tokens reserved, by request; a prefill elsewhere counts there too."""
    reserved: int = 0

    def fits(self, tokens: int) -> bool:
        return not self.running or (len(self.running) < self.slots and self.reserved + tokens <= self.capacity)

    @property
    def full(self) -> bool:
        return len(self.running) >= self.slots

    @property
    def load(self) -> tuple[float, str]:
        return max(self.reserved / self.capacity, len(self.running) / self.slots), self.name

    def take(self, request: str, tokens: int) -> None:
        self.running[request] = tokens
        self.reserved += tokens

    def drop(self, request: str) -> None:
        self.reserved -= self.running.pop(request, 0)
