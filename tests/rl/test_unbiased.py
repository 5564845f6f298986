"""Nothing that is started in excess, and no bound on staleness, prefers short trajectories: what is trained has the
lengths of what was submitted. A mode that ends the slow ones and forgets them does not, and is told apart here.

The policies run under a clock of their own: engines without limit, one trainer, lengths with a heavy tail."""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import pytest

from rl.ledger import Ledger
from rl.modes import MODES
from rl.records import Drop, Reason, StateRef, Step
from rl.redundancy import Mode as Redundancy
from rl.redundancy import RedundancyPolicy, spares_worth
from rl.selection import Candidate, DropPolicy, admissible, doomed, select
from rl.staleness import StalenessPolicy
from rl.trajectory import Uid

STEPS, GROUPS, SIZE = 60, 6, 4
TRAIN_S = 0.3
FAILS = 0.08
STATE = StateRef(prefix="state/", manifest_sha256="0", full=False)
Lengths = Callable[[Uid, int, int], float]
"""Of one try: (attempt at a problem, member, how often it was tried) -> seconds."""


def of_the_problem(uid: Uid, member: int, retry: int) -> float:
    """A long problem is long at every attempt."""
    return random.Random(f"{uid.ordinal}").lognormvariate(0.0, 1.0)


def of_the_attempt(uid: Uid, member: int, retry: int) -> float:
    """Whether a try is long is chance."""
    return random.Random(f"{uid}/{member}/{retry}").lognormvariate(0.0, 1.0)


@dataclass
class Cluster:
    """`run` gives the lengths of what was trained, and of what was submitted: a first try of every member asked for."""

    mode: str
    alpha: int
    redundancy: RedundancyPolicy
    lengths: Lengths
    late: str = "wait"

    def __post_init__(self) -> None:
        mode, examined = MODES[self.mode], self.redundancy.examined(GROUPS, GROUPS)
        self.policy = StalenessPolicy(mode.bound(self.alpha), GROUPS, examined, STEPS, admission=self.alpha)
        forgets = self.redundancy.mode is Redundancy.FIRST_FINISHED
        self.drops, self.eager = DropPolicy(forgets=forgets), mode.eager
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
        self._commit([], [])
        trained: list[float] = []
        while (self.ledger.head or 0) < STEPS:
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
        return trained, [self.lengths(Uid(o, 0), m, 0) for o in range(last + 1) for m in range(SIZE)]

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
        tries = [(self.lengths(uid, m, 0), m, 0) for m in range(SIZE + self.redundancy.extra_members)]
        heapq.heapify(tries)
        finished: dict[int, float] = {}
        failed: set[int] = set()
        while True:
            end, member, retry = heapq.heappop(tries)
            if dice.random() >= FAILS:
                finished[member] = self.lengths(uid, member, retry)
            elif self.redundancy.hopeless({*failed, member}):
                heapq.heappush(tries, (end + self.lengths(uid, member, retry + 1), member, retry + 1))
            else:
                failed.add(member)
            if (chosen := self.redundancy.chosen(SIZE, list(finished), failed)) is not None:
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
            if not self.eager:
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
                state=STATE,
                weights_sha256="",
                alpha=self.policy.alpha,
                trained=tuple(str(c.uid) for c in batch),
                dropped=tuple(drops),
            )
        )
        assert ledger.head is not None
        self.sealed = {uid: c for uid, c in self.sealed.items() if ledger.is_open(uid)}
        if self.eager or ledger.head == 0:
            self.serving = ledger.head

    def _lag(self, version: int) -> int:
        return (self.ledger.lag(version) or 0) if self.ledger.head is not None else 0


def gap(a: Sequence[float], b: Sequence[float]) -> float:
    """The Kolmogorov-Smirnov statistic of two samples, over what it exceeds by chance in one case of a thousand."""
    left, right = sorted(a), sorted(b)
    most = max(abs(bisect_right(left, x) / len(left) - bisect_right(right, x) / len(right)) for x in [*left, *right])
    return most / (1.95 * ((len(left) + len(right)) / (len(left) * len(right))) ** 0.5)


SPARE = RedundancyPolicy(extra_members=1)
FIRST = RedundancyPolicy(Redundancy.FIRST_FINISHED, extra_members=2, extra_groups=3)
KINDS = pytest.mark.parametrize("lengths", [of_the_problem, of_the_attempt])


@KINDS
@pytest.mark.parametrize(
    ("mode", "alpha"), [("one_off", 1), ("six_steps", 3), ("rollart", 1), ("rollart", 3), ("areal", 1)]
)
def test_what_is_trained_is_as_long_as_what_was_submitted(mode: str, alpha: int, lengths: Lengths) -> None:
    trained, submitted = Cluster(mode, alpha, SPARE, lengths).run()
    assert len(trained) == STEPS * GROUPS * SIZE
    assert gap(trained, submitted) < 1


def test_what_is_drawn_again_until_it_is_waited_for_starves_no_long_problem() -> None:
    waits, again = (Cluster("rollart", 1, SPARE, of_the_problem, late) for late in ("wait", "draw_again"))
    waits.run()
    assert gap(*again.run()) < 1
    assert again.ledger.dropped_groups["stale"] and again.now < 0.9 * waits.now


@pytest.mark.parametrize("deviation", [0.1, 1.0])
def test_the_spares_that_are_chosen_are_about_the_best_when_played(deviation: float) -> None:
    """At a short tail a second try holds up the step, at a long one it does not."""

    price = 0.5

    def lengths(uid: Uid, member: int, retry: int) -> float:
        return random.Random(f"{uid}/{member}/{retry}").lognormvariate(0.0, deviation)

    def worth(spares: int) -> float:
        cluster = Cluster("rollart", 1, RedundancyPolicy(extra_members=spares), lengths)
        cluster.run()
        return cluster.now * (1 + spares / SIZE) ** price

    seen = [lengths(Uid(at, 0), 0, 0) for at in range(64)]
    chosen = spares_worth(seen, SIZE, FAILS, GROUPS, price)
    played = [worth(spares) for spares in range(3)]
    assert (chosen > 0) == (deviation < 1)
    assert played[chosen] < 1.1 * min(played)


@KINDS
def test_what_discards_and_forgets_is_told_apart(lengths: Lengths) -> None:
    trained, submitted = Cluster("rollart", 1, FIRST, lengths).run()
    assert gap(trained, submitted) > 1


@pytest.mark.parametrize("alpha", [1, 2])
def test_the_eager_order_hides_the_slowest_better_than_the_six_steps(alpha: int) -> None:
    """By about L / alpha over (L + T) / (alpha + 1), with L the slowest group and T training."""

    def time(mode: str) -> float:
        cluster = Cluster(mode, alpha, SPARE, of_the_attempt)
        cluster.run()
        return cluster.now

    assert time("rollart") < 0.85 * time("six_steps")
