"""An honest rollout side and an honest trainer always reach the last step: no choice of alpha, batch, unit,
failure rate or crash deadlocks them. The world is a clock-free round-robin of the two sides, driven by one seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.ledger import Ledger
from rl.protocol import Phase, StepProtocol, phases
from rl.records import Fence, Reason, Rollback, Settle, decode
from rl.rollback import rolled_back
from rl.selection import Candidate, DropPolicy, Selection, admissible, doomed, select
from rl.staleness import StalenessPolicy
from rl.trajectory import Uid
from tests.rl.bookkeeping import World

STEPS = 6
MEMBERS = 3


@dataclass
class Rates:
    """Probabilities: of a group's fate when it starts, of a crash or a rollback per turn."""

    fails: float = 0.0
    equal: float = 0.0
    slow: float = 0.0
    rollout_dies: float = 0.0
    trainer_dies: float = 0.0
    rolls_back: float = 0.0
    unit: str = "group"


class Rollout:
    """Admits, advances members, seals; aborts what has grown too old, as the proxy does."""

    def __init__(self, world: World, drops: DropPolicy, dice: random.Random, rates: Rates) -> None:
        self.world, self.drops, self.dice, self.rates = world, drops, dice, rates
        self.ledger = Ledger()
        self.in_flight: dict[Uid, list[int]] = {}
        """Start version, then the turns that each member still needs."""

    def turn(self) -> None:
        world = self.world
        world.follow(self.ledger)
        visible = world.visible(self.ledger)
        for uid in admissible(self.ledger, world.serving, visible, self.in_flight.keys(), world.policy, self.drops):
            slow = random.Random(uid.ordinal).random() < self.rates.slow  # a long problem is long at every attempt
            self.in_flight[uid] = [world.serving, *(1 + slow * self.dice.randrange(30) for _ in range(MEMBERS))]
        protected = len(self.drops.protected_attempts(self.ledger))
        assert world.unsettled(self.in_flight) <= world.policy.buffer_groups + protected
        for uid, (start, *turns) in list(self.in_flight.items()):
            if not self.ledger.is_open(uid):
                del self.in_flight[uid]
            elif not world.policy.viable(self.ledger.lag(start)):
                self._give_up(uid, Reason.STALE)
            elif max(turns) > 0:
                moved = turns.index(max(turns)) if self.rates.unit == "trajectory" else None
                turns = [n - (moved is None or at == moved) for at, n in enumerate(turns)]
                self.in_flight[uid] = [start, *turns]
            elif self.dice.random() < self.rates.fails:
                self._give_up(uid, Reason.ENVIRONMENT_ERROR)
            else:
                self._seal(Candidate(uid, start, self.dice.random() >= self.rates.equal, newest=world.serving))

    def _give_up(self, uid: Uid, reason: Reason) -> None:
        assert self.ledger.head is not None
        self._seal(Candidate(uid, self.ledger.head, False, tombstone=reason.value))

    def _seal(self, sealed: Candidate) -> None:
        self.world.sealed.append(sealed)
        del self.in_flight[sealed.uid]


class Trainer:
    """Fences, brings the engines to the head, then steps by the protocol; one phase per turn."""

    def __init__(self, world: World, drops: DropPolicy) -> None:
        self.world, self.drops = world, drops
        self.ledger = world.fold(world.starts()[-1])
        world.append(self.ledger, Fence)
        if self.ledger.head is None:
            world.step(self.ledger, [], [])
        assert self.ledger.head is not None
        world.serving = self.ledger.head
        self.protocol = StepProtocol(world.policy.alpha)
        self.order = cycle(phases(world.policy.alpha))
        self.next = next(self.order)
        self.chosen = Selection()

    def turn(self) -> None:
        if self.next is Phase.GET_BATCH and not self._get_batch():
            return
        if self.next is Phase.UPDATE:
            assert self.ledger.head is not None
            self.world.serving = self.ledger.head
        if self.next is Phase.COMMIT:
            self._commit()
        self.protocol.enter(self.next)
        self.next = next(self.order)

    def _get_batch(self) -> bool:
        visible = self.world.visible(self.ledger)
        self.chosen = select(self.ledger, visible, self.world.policy, self.drops)
        for c in self.chosen.batch:
            self.world.policy.check(self.ledger, c.uid, c.version)
        if not self.chosen.batch and self.chosen.dropped:
            self.world.append(self.ledger, Settle, dropped=tuple(self.chosen.dropped))
        return bool(self.chosen.batch)

    def _commit(self) -> None:
        taken = {c.uid for c in self.chosen.batch} | {Uid.parse(d.uid) for d in self.chosen.dropped}
        late = doomed(self.ledger, self.world.visible(self.ledger), taken, self.world.policy, self.drops)
        self.world.step(self.ledger, self.chosen.batch, self.chosen.dropped + late)


def live(policy: StalenessPolicy, drops: DropPolicy, rates: Rates, seed: int) -> World:
    """Run to the last step; fails when that takes absurdly many turns."""
    dice = random.Random(seed)
    world = World(policy, snapshot_every=4)
    trainer, rollout = Trainer(world, drops), Rollout(world, drops, dice, rates)
    rollbacks = 0
    for _ in range(4000):
        if world.account.head is not None and world.account.head >= STEPS:
            return world
        rollout.turn()
        trainer.turn()
        if dice.random() < rates.rollout_dies:
            rollout = Rollout(world, drops, dice, rates)
        if dice.random() < rates.trainer_dies:
            trainer = Trainer(world, drops)
        if dice.random() < rates.rolls_back and rollbacks < 2:
            rollbacks += 1
            records = [decode(body) for body in world.log]
            to = dice.choice(trainer.ledger.line)
            world.append(trainer.ledger, Rollback, to=to, snapshot=rolled_back(records, to))
            trainer = Trainer(world, drops)
    raise AssertionError(
        f"no version {STEPS} after 4000 turns: {trainer.next}, head {trainer.ledger.head}, "
        f"serving {world.serving}, in flight {rollout.in_flight}"
    )


@pytest.mark.parametrize("unit", ["group", "trajectory"])
@pytest.mark.parametrize("alpha", [0, 1, 2, 3])
@given(
    groups=st.integers(1, 4),
    factor=st.sampled_from([1.0, 1.5, 2.0]),
    budget=st.integers(1, 3),
    fails=st.sampled_from([0.0, 0.1, 0.4]),
    equal=st.sampled_from([0.0, 0.3, 0.8]),
    slow=st.sampled_from([0.0, 0.2, 1.0]),
    dies=st.sampled_from([0.0, 0.05]),
    rolls_back=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=100)
def test_an_honest_run_reaches_its_last_step(
    alpha: int, unit: str, groups: int, factor: float, budget: int, fails: float, equal: float, slow: float,
    dies: float, rolls_back: float, seed: int,
) -> None:  # fmt: skip
    policy = StalenessPolicy(alpha, groups, math.ceil(groups * factor), steps=STEPS)
    rates = Rates(fails, equal, slow, dies, dies, rolls_back, unit)
    world = live(policy, DropPolicy(budget, budget), rates, seed)
    assert rolls_back or len(world.account.line(world.account.head)) == STEPS + 1
    holes = [o for o in range(max(world.account.trained)) if not world.account.settled(o)]
    # those in flight or sealed, and those that the last step dropped and granted anew
    assert len(holes) <= 2 * policy.buffer_groups, "problems are left behind"
    if not (dies or rolls_back):
        assert Reason.TOO_LONG.value not in world.account.abandoned.values(), "a long problem was starved"


@pytest.mark.parametrize("alpha", [0, 1, 2, 3])
def test_without_trouble_nothing_is_dropped_and_problems_are_trained_in_order(alpha: int) -> None:
    policy = StalenessPolicy(alpha, 3, 3, steps=STEPS)
    world = live(policy, DropPolicy(), Rates(), seed=0)
    assert not [fate for fate in world.account.fates.values() if fate != "trained"]
    assert sorted(world.account.trained) == list(range(3 * STEPS))
