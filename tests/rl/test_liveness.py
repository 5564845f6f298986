"""An honest rollout side and an honest trainer always reach the last step: no choice of mode, alpha, batch, unit,
failure rate or crash deadlocks them. The world is a clock-free round-robin of the two sides, driven by one seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.ledger import Ledger
from rl.modes import MODES, Mode
from rl.protocol import Phase, StepProtocol
from rl.records import Drop, Fence, Reason, Rollback, Settle, Step, decode
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
        self.told = False
        """Whether it said that what an earlier one had in flight is gone."""
        self.in_flight: dict[Uid, list[int]] = {}
        """Start version, then the turns that each member still needs."""

    def turn(self) -> None:
        world = self.world
        world.follow(self.ledger)
        if not self.told:
            self.told, world.flying = True, {}
        visible = world.visible(self.ledger)
        admitted = admissible(self.ledger, world.serving, visible, self.in_flight.keys(), world.policy, self.drops)
        for uid in admitted:
            slow = random.Random(uid.ordinal).random() < self.rates.slow  # a long problem is long at every attempt
            self.in_flight[uid] = [world.serving, *(1 + slow * self.dice.randrange(30) for _ in range(MEMBERS))]
            world.flying = {uid: start for uid, (start, *_) in self.in_flight.items()}
        protected = self.drops.protected_attempts(self.ledger)
        # a rollback forgets who was protected, but they are in flight: then nothing fresh may start above the bound
        if not self.rates.rolls_back or set(admitted) - set(protected):
            assert world.unsettled(self.in_flight) <= world.policy.buffer_groups + len(protected)
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
    """Fences, brings the engines to the head, then steps by the protocol: at every turn some phase that is due, as
    the trainer and its publisher may, in whatever order their threads happen to run."""

    def __init__(self, world: World, drops: DropPolicy, dice: random.Random, mode: Mode) -> None:
        self.world, self.drops, self.dice, self.mode = world, drops, dice, mode
        self.ledger = world.fold(world.starts()[-1])
        world.append(self.ledger, Fence)
        if self.ledger.head is None:
            world.step(self.ledger, [], [])
        assert self.ledger.head is not None
        world.serving = self.ledger.head
        self.protocol = StepProtocol(world.policy.alpha, mode.eager)
        self.last: Phase | None = None
        self.awaits = False
        self.in_hand = Selection()
        self.trained: list[Selection] = []
        """Batches whose version is not on its way yet."""
        self.on_its_way: tuple[list[Candidate], list[Drop]] | None = None

    def turn(self) -> None:
        for phase in self.dice.sample(list(Phase), len(Phase)):
            if self._enter(phase):
                self.last = phase
                break
        if self.awaits:
            self._get_batch()

    def _enter(self, phase: Phase) -> bool:
        """Whether it was this phase's turn."""
        ready = not (phase is Phase.TRAIN and self.awaits) and not (phase is Phase.COMMIT and self.on_its_way is None)
        if not ready or not self.protocol.may(phase):
            return False
        self.protocol.enter(phase)
        match phase:
            case Phase.GET_BATCH:
                self.awaits = True
            case Phase.UPDATE:
                assert self.ledger.head is not None
                self.world.serving = self.ledger.head
            case Phase.TRAIN:
                self.trained.append(self.in_hand)
                self._submit()
            case Phase.COMMIT:
                assert self.on_its_way is not None
                self.world.step(self.ledger, *self.on_its_way)
                self.on_its_way = None
                self._submit()
        return True

    def _get_batch(self) -> None:
        """Select by the log as it will be when what is on its way is committed."""
        ledger = self.ledger
        if self.on_its_way is not None:
            ledger = Ledger.from_snapshot(ledger.lsn, ledger.snapshot())
            fields = self.world.step_fields(ledger, *self.on_its_way)
            ledger.apply(Step(lsn=ledger.lsn + 1, nonce="", writer="t", time=0.0, **fields))
        flying = self.world.flying if self.mode.waits else None
        chosen = select(ledger, self.world.visible(ledger), self.world.policy, self.drops, in_flight=flying)
        for c in chosen.batch:
            self.world.policy.check(ledger, c.uid, c.version)
        if chosen.batch:
            self.in_hand, self.awaits = chosen, False
        elif chosen.dropped and self.on_its_way is None:
            self.world.append(self.ledger, Settle, dropped=tuple(chosen.dropped))

    def _submit(self) -> None:
        """One version is on its way at a time: the oldest that is trained."""
        if self.on_its_way is not None or not self.trained:
            return
        chosen = self.trained.pop(0)
        taken = {c.uid for c in chosen.batch} | {Uid.parse(d.uid) for d in chosen.dropped}
        late = doomed(self.ledger, self.world.visible(self.ledger), taken, self.world.policy, self.drops)
        self.on_its_way = chosen.batch, chosen.dropped + late


def live(mode: Mode, policy: StalenessPolicy, drops: DropPolicy, rates: Rates, seed: int) -> World:
    """Run to the last step; fails when that takes absurdly many turns."""
    dice = random.Random(seed)
    world = World(policy, snapshot_every=4)
    trainer, rollout = Trainer(world, drops, dice, mode), Rollout(world, drops, dice, rates)
    rollbacks = 0
    for _ in range(4000):
        if world.account.head is not None and world.account.head >= STEPS:
            return world
        rollout.turn()
        trainer.turn()
        if dice.random() < rates.rollout_dies:
            rollout = Rollout(world, drops, dice, rates)
        if dice.random() < rates.trainer_dies:
            trainer = Trainer(world, drops, dice, mode)
        if dice.random() < rates.rolls_back and rollbacks < 2:
            rollbacks += 1
            records = [decode(body) for body in world.log]
            to = dice.choice(trainer.ledger.line)
            world.append(trainer.ledger, Rollback, to=to, snapshot=rolled_back(records, to))
            trainer = Trainer(world, drops, dice, mode)
    raise AssertionError(
        f"no version {STEPS} after 4000 turns: last {trainer.last}, head {trainer.ledger.head}, "
        f"serving {world.serving}, in flight {rollout.in_flight}"
    )


def policy_of(mode: Mode, alpha: int, groups: int, examined: int) -> StalenessPolicy:
    return StalenessPolicy(mode.bound(alpha), groups, examined, STEPS, admission=alpha)


MODES_AND_ALPHAS = [
    ("sync_plus", 0), ("six_steps", 1), ("six_steps", 2), ("rollart", 1), ("rollart", 2), ("rollart", 3), ("areal", 1),
]  # fmt: skip
"""`sync` and `one_off` drive the same policies as `sync_plus` and `six_steps` with alpha 1."""


@pytest.mark.parametrize("unit", ["group", "trajectory"])
@pytest.mark.parametrize(("mode", "alpha"), MODES_AND_ALPHAS)
@given(
    groups=st.integers(1, 4),
    factor=st.sampled_from([1.0, 1.5, 2.0]),
    budget=st.integers(1, 3),
    fails=st.sampled_from([0.0, 0.1, 0.4]),
    equal=st.sampled_from([0.0, 0.3, 0.8]),
    slow=st.sampled_from([0.0, 0.2, 1.0]),
    dies=st.sampled_from([0.0, 0.01]),  # of some hundred turns: else no long group would ever come to its end
    rolls_back=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=12)
def test_an_honest_run_reaches_its_last_step(
    mode: str, alpha: int, unit: str, groups: int, factor: float, budget: int, fails: float, equal: float, slow: float,
    dies: float, rolls_back: float, seed: int,
) -> None:  # fmt: skip
    policy = policy_of(MODES[mode], alpha, groups, math.ceil(groups * factor))
    rates = Rates(fails, equal, slow, dies, dies, rolls_back, unit)
    world = live(MODES[mode], policy, DropPolicy(budget, budget), rates, seed)
    assert rolls_back or len(world.account.line) == STEPS + 1
    holes = [o for o in range(max(world.account.trained)) if not world.account.settled(o)]
    # those in flight or sealed, and those that the last step dropped and granted anew
    assert len(holes) <= 2 * policy.buffer_groups, "problems are left behind"
    if not (dies or rolls_back):
        assert Reason.TOO_LONG.value not in world.account.abandoned.values(), "a long problem was starved"


@pytest.mark.parametrize(("mode", "alpha"), MODES_AND_ALPHAS)
def test_without_trouble_nothing_is_dropped_and_problems_are_trained_in_order(mode: str, alpha: int) -> None:
    world = live(MODES[mode], policy_of(MODES[mode], alpha, 3, 3), DropPolicy(), Rates(), seed=0)
    assert not [fate for fate in world.account.fates.values() if fate != "trained"]
    assert sorted(world.account.trained) == list(range(3 * STEPS))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("mode", "alpha"), MODES_AND_ALPHAS)
def test_no_step_outruns_what_it_could_have_waited_for(mode: str, alpha: int, seed: int) -> None:
    world = live(MODES[mode], policy_of(MODES[mode], alpha, 4, 4), DropPolicy(), Rates(slow=0.3), seed)
    assert not [fate for fate in world.account.fates.values() if fate != "trained"]


def test_a_bound_on_the_start_alone_is_left_behind() -> None:
    """The lag of `areal` goes beyond alpha, and is still trained."""
    mode, lags = MODES["areal"], []
    for seed in range(20):
        world = live(mode, policy_of(mode, 1, 2, 2), DropPolicy(), Rates(slow=0.3), seed)
        start = {c.uid: c.version for c in world.sealed}
        lags += [version - 1 - start[uid] for uid, version in world.account.trained.values()]
    assert max(lags) > 1
