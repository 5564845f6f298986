"""The policies of `rl/` alone, under a clock of their own: engines and environments without limit, one trainer.

So what they cost or gain is told apart from what a machine is short of.

Invariants: the decisions are those of `rl.selection`, `rl.staleness`, `rl.redundancy` and `rl.modes`, on a real ledger;
equal arguments give equal runs.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from rl.ledger import Ledger
from rl.modes import MODES, ModeName
from rl.records import Drop, Reason, StateRef, Step
from rl.redundancy import Mode, RedundancyPolicy
from rl.selection import Candidate, DropPolicy, admissible, doomed, select
from rl.staleness import StalenessPolicy
from rl.trajectory import Uid

TRAIN_S = 0.3
_STATE = StateRef(prefix="state/", manifest_sha256="0", full=False)

Late = Literal["wait", "draw_again"]
Lengths = Callable[[Uid, int, int], float]
"""Of one try: (attempt at a problem, member, how often it was tried) -> seconds."""


def by_chance(deviation: float, seed: str = "") -> Lengths:
    """Lognormal about 1 s; whether a try is long is chance."""
    return lambda uid, member, retry: random.Random(f"{seed}{uid}/{member}/{retry}").lognormvariate(0.0, deviation)


def of_the_problem(uid: Uid, member: int, retry: int) -> float:
    """Lognormal about 1 s with a deviation of 1; a long problem is long at every attempt."""
    return random.Random(f"{uid.ordinal}").lognormvariate(0.0, 1.0)


@dataclass
class PolicyClock:
    """One run of `steps` steps, once."""

    mode: ModeName
    alpha: int
    redundancy: RedundancyPolicy
    lengths: Lengths
    late: Late = "wait"
    size: int = 4
    """Members of a group."""
    fails: float = 0.08
    """Share of the tries of a member that fail, and are made again."""
    steps: int = 60
    groups: int = 6
    """Of a step."""

    def __post_init__(self) -> None:
        mode, examined = MODES[self.mode], self.redundancy.examined(self.groups, self.groups)
        self.policy = StalenessPolicy(mode.bound(self.alpha), self.groups, examined, self.steps, admission=self.alpha)
        forgets = self.redundancy.mode is Mode.FIRST_FINISHED
        self.drops, self.at_commit = DropPolicy(forgets=forgets), mode.eager or mode.alternates
        self.waits = mode.waits and not forgets and self.late == "wait"
        self.ledger, self.serving, self.now = Ledger(), 0, 0.0
        self.events: list[tuple[float, int, Uid | None]] = []
        self.order = count()
        self.flying: dict[Uid, tuple[int, list[float]]] = {}
        self.sealed: dict[Uid, Candidate] = {}
        self.kept: dict[Uid, list[float]] = {}
        self.training: list[Candidate] | None = None
        self.in_hand: list[Drop] = []

    def run(self) -> tuple[list[float], list[float]]:
        """The lengths of what was trained, and of what was submitted: a first try of every member asked for."""
        self._commit([], [])
        trained: list[float] = []
        while (self.ledger.head or 0) < self.steps:
            self._admit()
            self._train()
            self.now, _, uid = heapq.heappop(self.events)
            if uid is None:
                assert self.training is not None
                trained += [n for c in self.training for n in self.kept[c.uid]]
                self._commit(self.training, self.in_hand)
                self.training = None
            elif uid in self.flying:
                version, self.kept[uid] = self.flying.pop(uid)
                self.sealed[uid] = Candidate(uid, version, informative=True)
        last = max(uid.ordinal for uid in self.kept)
        return trained, [self.lengths(Uid(o, 0), m, 0) for o in range(last + 1) for m in range(self.size)]

    def _admit(self) -> None:
        for uid in admissible(
            self.ledger, self.serving, self.sealed.values(), self.flying.keys(), self.policy, self.drops
        ):
            end, lengths = self._group(uid)
            self.flying[uid] = self.serving, lengths
            heapq.heappush(self.events, (self.now + end, next(self.order), uid))

    def _group(self, uid: Uid) -> tuple[float, list[float]]:
        """When it is complete, and the lengths of its members."""
        dice = random.Random(f"fails/{uid}")
        tries = [(self.lengths(uid, m, 0), m, 0) for m in range(self.size + self.redundancy.extra_members)]
        heapq.heapify(tries)
        finished: dict[int, float] = {}
        failed: set[int] = set()
        while True:
            end, member, retry = heapq.heappop(tries)
            if dice.random() >= self.fails:
                finished[member] = self.lengths(uid, member, retry)
            elif self.redundancy.hopeless({*failed, member}):
                heapq.heappush(tries, (end + self.lengths(uid, member, retry + 1), member, retry + 1))
            else:
                failed.add(member)
            if (chosen := self.redundancy.chosen(self.size, list(finished), failed)) is not None:
                return end, [finished[m] for m in chosen]

    def _train(self) -> None:
        if self.training is not None:
            return
        flying = {uid: version for uid, (version, _) in self.flying.items()} if self.waits else None
        chosen = select(self.ledger, self.sealed.values(), self.policy, self.drops, in_flight=flying)
        if chosen.batch:
            taken = {*(c.uid for c in chosen.batch), *(Uid.parse(d.uid) for d in chosen.dropped)}
            late = doomed(self.ledger, self.sealed.values(), taken, self.policy, self.drops)
            self.training, self.in_hand = chosen.batch, chosen.dropped + late
            heapq.heappush(self.events, (self.now + TRAIN_S, next(self.order), None))
            if not self.at_commit:
                self.serving = self.ledger.head or 0

    def _commit(self, batch: Sequence[Candidate], dropped: Sequence[Drop]) -> None:
        """A version; what it makes too old in flight ends, as the proxy ends it."""
        ledger = self.ledger
        closed = {uid for uid, (v, _) in self.flying.items() if not self.policy.viable(self._lag(v) + bool(batch))}
        self.flying = {uid: one for uid, one in self.flying.items() if uid not in closed}
        drops = [*dropped, *(self.drops.drop(ledger, uid, Reason.STALE) for uid in sorted(closed))]
        ledger.apply(
            Step(
                lsn=ledger.lsn + 1,
                nonce="",
                writer="",
                time=0.0,
                version=ledger.next_version,
                base=ledger.head,
                state=_STATE,
                weights_sha256="",
                alpha=self.policy.alpha,
                trained=tuple(str(c.uid) for c in batch),
                dropped=tuple(drops),
            )
        )
        assert ledger.head is not None
        self.sealed = {uid: c for uid, c in self.sealed.items() if ledger.is_open(uid)}
        if self.at_commit or ledger.head == 0:
            self.serving = ledger.head

    def _lag(self, version: int) -> int:
        return (self.ledger.lag(version) or 0) if self.ledger.head is not None else 0


def gap(a: Sequence[float], b: Sequence[float]) -> float:
    """The Kolmogorov-Smirnov statistic of two samples, over what it exceeds by chance in one case of a thousand."""
    left, right = sorted(a), sorted(b)
    most = max(abs(bisect_right(left, x) / len(left) - bisect_right(right, x) / len(right)) for x in [*left, *right])
    return most / (1.95 * ((len(left) + len(right)) / (len(left) * len(right))) ** 0.5)
