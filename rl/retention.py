"""The retention policy: which versions stay, hence how far the gc floor may rise.

    versions   0 ... 39 | 40 ......... 59 (head)        newest 20
                        floor
    samples    go       | stay
    states     go, but for pinned ones and every n-th

Invariants
- The floor never falls, and never rises above what the run needs to go on (`Ledger.oldest_needed`).
- What the policy keeps by count or age, or for somebody who is still to load it, is at or above its floor, with its
  samples; every n-th and what is pinned keeps its state alone below it.
- A pure function of the ledger and of which states are there, how old: the collector acts on it, and people are told
  the same reasons.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from rl.ledger import Ledger
from rl.records import StateRef


class Why(StrEnum):
    """Why the state of a version stays."""

    HEAD = "the head"
    NEEDED = "needed to go on"
    NEWEST = "among the newest"
    YOUNG = "young"
    EVERY = "every n-th"
    PINNED = "pinned"
    AWAITED = "to be evaluated"


_WITH_SAMPLES = {Why.HEAD, Why.NEEDED, Why.NEWEST, Why.YOUNG, Why.AWAITED}
"""What an engine may still load lies at or above the floor (`loadable`)."""


@dataclass(frozen=True)
class Retention:
    """Keeps the `newest` live versions, those younger than `younger_than` seconds, and every `every`-th."""

    newest: int
    younger_than: float = 0.0
    every: int | None = None

    def floor(self, ledger: Ledger, ages: Mapping[int, float], awaited: Collection[int] = ()) -> int:
        """What the gc floor should be. `ages` has the versions whose state is there, with the seconds since it was
        written; `awaited` as below."""
        kept = [version for version, why in self.reasons(ledger, ages, awaited).items() if why & _WITH_SAMPLES]
        return max(ledger.gc_floor, min([ledger.oldest_needed, *kept]))

    def reasons(self, ledger: Ledger, ages: Mapping[int, float], awaited: Collection[int] = ()) -> dict[int, set[Why]]:
        """Why each of these versions stays; empty for one that may go. `awaited`: those that somebody is still to
        load."""
        there = [v for v in sorted(ages) if v not in ledger.deleted]
        live = [v for v in there if ledger.head is not None and ledger.lag(v) is not None]
        found: dict[int, set[Why]] = {version: set() for version in sorted(ages)}
        for version in live[-self.newest :]:
            found[version].add(Why.NEWEST)
        for version in live:
            if ages[version] < self.younger_than:
                found[version].add(Why.YOUNG)
            if self.every is not None and version % self.every == 0:
                found[version].add(Why.EVERY)
        for version in there:
            if version == ledger.head:
                found[version].add(Why.HEAD)
            if ledger.needed(version):
                found[version].add(Why.NEEDED)
            if version in ledger.pins:
                found[version].add(Why.PINNED)
            if version in awaited:
                found[version].add(Why.AWAITED)
        return found


def loadable(ledger: Ledger) -> dict[int, StateRef]:
    """The versions whose state is there for sure, among those that the ledger knows. Of any other an object may be
    missing: that says that the log was not read anew, not that the store is corrupt."""
    return {v: state for v, state in ledger.states.items() if v >= ledger.gc_floor} | ledger.pins
