"""What the next turns of trajectories ask of their engines.

Invariant: with one turn at once the numbers are exact; with more they are the sums over those turns, each of which
finds, on average, what the ones before it left.
"""

from __future__ import annotations

import numpy as np

from sim.slots import Slots
from sim.workload import Workload

Array = np.ndarray


def next_turns(s: Slots, work: Workload, slots: Array, at_once: int) -> tuple[Array, Array]:
    """Write down what each has when its next turn, or as many as are taken `at_once`, is read, and what is to be
    answered then; the tokens to read, and those that the engine knows before them."""
    domain, had = s.domain[slots], s.context[slots]
    new = np.where(s.turn[slots] == 0, work.prompt[domain], work.observation[domain])
    missed = work.missed[domain]
    known = np.where(s.cold[slots], 0.0, had * (1.0 - missed))
    read = had + new - known
    turns: Array = np.ones(len(slots), np.int64)
    if at_once > 1:
        growth = work.observation[domain] + s.length[slots]
        turns = np.minimum(at_once, s.turns[slots] - s.turn[slots])
        turns = np.clip(np.ceil((work.longest[domain] - had) / growth), 1, turns).astype(np.int64)
        later = turns - 1
        before = later * growth / 2
        new = new + later * work.observation[domain]
        read = read + later * (work.observation[domain] + missed * (had + before))
        known = known + before
    s.context[slots], s.ahead[slots] = had + new - unread(s, work, slots, turns), turns
    s.left[slots] = work.responses(domain, s.length[slots], turns)
    return read, known


def unread(s: Slots, work: Workload, slots: Array, turns: Array) -> Array:
    """Tokens that are not in the cache, on average, while so many turns are answered as one: half of what the later
    ones find new."""
    return (turns - 1) * work.observation[s.domain[slots]] / 2
