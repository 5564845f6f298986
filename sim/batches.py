"""What a step may be made of, and what it settles: what the trainer of a run asks of its samples and its stream.

Invariant: pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice
from typing import Literal

from rl.ledger import Ledger
from rl.selection import Candidate, Selection
from rl.stream import ProblemStream
from rl.trajectory import Uid


def ready(
    offered: Mapping[Uid, Candidate], ledger: Ledger, count: int, batches: Literal["free", "blocks"]
) -> Collection[Candidate]:
    """Of these the next batch of `count` groups may be made: see `Scenario.batches`."""
    if batches == "free":
        return offered.values()
    block = set(islice(ledger.outstanding(), count))
    return [candidate for uid, candidate in offered.items() if uid in block]


def mix(stream: ProblemStream, ledger: Ledger, count: int) -> Mapping[str, int]:
    """Groups of each domain among the `count` that the next step looks at."""
    return stream.mix(max(0, ledger.next_version - 1) * count, count)


def settled(chosen: Selection) -> set[Uid]:
    """By the batch and what is dropped with it."""
    return {c.uid for c in chosen.batch} | {Uid.parse(d.uid) for d in chosen.dropped}
