"""The whole store protocol as a state machine: real log, buffer, selection, checkpoints and audit over an S3 server in
memory; several producers, two trainers, operators and rollbacks. At any object operation any of them may die before or
after it, lose the answer, be refused, be cut off, or find that somebody acted in between. Without a clock."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from infra.store import log as store_log
from rl.records import Mark
from rl.retention import Retention
from rl.selection import DropPolicy
from rl.staleness import StalenessPolicy
from tests.store.memory_s3 import Fate
from tests.store.world import GRACE_S, Plan, World, play_all, play_some, seal, seal_twice, start

OTHERS = ("takeover", "train", "settle", "roll back", "seal", "collect", "retain")
SALT = st.integers(0, 99)
ANY = st.builds(Plan, st.integers(0, 30), st.sampled_from(Fate), st.sampled_from(OTHERS), SALT)
CREATE = st.builds(
    Plan,
    st.integers(0, 1),
    st.sampled_from([Fate.MEANWHILE, Fate.MEANWHILE, *Fate]),
    st.sampled_from(OTHERS),
    SALT,
    st.just(True),
)
PLAN = st.none() | ANY | CREATE


class Protocol(RuleBasedStateMachine):
    @initialize(
        alpha=st.integers(0, 2),
        groups=st.integers(1, 2),
        more=st.integers(0, 1),
        budget=st.integers(1, 3),
        every=st.integers(1, 3),
        snapshots=st.integers(1, 4),
        newest=st.integers(1, 4),
        plan=PLAN,
    )
    def begin(
        self,
        alpha: int,
        groups: int,
        more: int,
        budget: int,
        every: int,
        snapshots: int,
        newest: int,
        plan: Plan | None,
    ) -> None:
        self.usual, store_log.SNAPSHOT_EVERY = store_log.SNAPSHOT_EVERY, snapshots
        self.work = Path(tempfile.mkdtemp(prefix="protocol-"))
        policy = StalenessPolicy(alpha, groups, groups + more)
        self.world = World(policy, DropPolicy(budget, budget), Retention(newest), every, self.work)
        self.world.new_trainer(plan)
        self.world.new_producer()

    # -- rollout -------------------------------------------------------------------------------------

    @rule()
    def a_producer_starts(self) -> None:
        self.world.new_producer()

    @precondition(lambda self: self.world.producers)
    @rule(data=st.data(), behind=st.integers(0, 2), plan=PLAN)
    def start(self, data: st.DataObject, behind: int, plan: Plan | None) -> None:
        process = data.draw(st.sampled_from(self.world.producers))
        self.world.produce(process, lambda p: start(p, behind), plan)

    @precondition(lambda self: self.world.producers)
    @rule(data=st.data(), salt=SALT, at_once=st.integers(1, 3), plan=PLAN)
    def seal(self, data: st.DataObject, salt: int, at_once: int, plan: Plan | None) -> None:
        process = data.draw(st.sampled_from(self.world.producers))
        self.world.produce(process, lambda p: seal(p, salt, at_once), plan)

    @precondition(lambda self: any(p.part.sealed for p in self.world.producers))
    @rule(data=st.data(), salt=SALT)
    def a_zombie_seals_again(self, data: st.DataObject, salt: int) -> None:
        process = data.draw(st.sampled_from([p for p in self.world.producers if p.part.sealed]))
        uids = data.draw(st.lists(st.sampled_from(sorted(process.part.sealed)), min_size=1, max_size=2, unique=True))
        self.world.produce(process, lambda p: seal_twice(p, uids, salt))

    @precondition(lambda self: self.world.producers)
    @rule(behind=st.integers(0, 1))
    def all_is_played(self, behind: int) -> None:
        self.world.produce(self.world.producers[-1], lambda p: (start(p, behind), play_all(p)))

    # -- training ------------------------------------------------------------------------------------

    @rule(plan=PLAN)
    def a_trainer_takes_over(self, plan: Plan | None) -> None:
        self.world.new_trainer(plan)

    @precondition(lambda self: self.world.trainers)
    @rule(data=st.data(), plan=PLAN)
    def train(self, data: st.DataObject, plan: Plan | None) -> None:
        process = data.draw(st.sampled_from(self.world.trainers[::-1]))
        self.world.train(process, lambda t: t.step(), plan)

    @precondition(lambda self: self.world.trainers)
    @rule(data=st.data(), salt=SALT, plan=PLAN)
    def roll_back(self, data: st.DataObject, salt: int, plan: Plan | None) -> None:
        process = data.draw(st.sampled_from(self.world.trainers[::-1]))
        self.world.roll_back(process, salt, plan)

    @precondition(lambda self: self.world.trainers and self.world.producers)
    @rule(plan=PLAN)
    def a_step_goes_well(self, plan: Plan | None) -> None:
        self.world.produce(self.world.producers[-1], play_all)
        self.world.train(self.world.trainers[-1], lambda t: t.step(), plan)

    also_a_step_goes_well = a_step_goes_well

    @precondition(lambda self: self.world.trainers and self.world.producers)
    @rule(back=st.booleans(), plan=PLAN)
    def groups_outlive_a_step(self, back: bool, plan: Plan | None) -> None:
        producer, trainer = self.world.producers[-1], self.world.trainers[-1]
        self.world.produce(producer, lambda p: (start(p, 0), play_some(p, self.world.policy.groups_per_step)))
        self.world.train(trainer, lambda t: t.step(), plan)
        self.world.produce(producer, lambda p: play_some(p, len(p.in_flight)))
        if back:
            self.world.roll_back(trainer, max(0, len(self.world.account.line) - 2))

    # -- others --------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.account.head is not None)
    @rule(salt=SALT, plan=PLAN)
    def an_operator_settles(self, salt: int, plan: Plan | None) -> None:
        self.world.settle(salt, plan)

    @rule()
    def time_passes(self) -> None:
        self.world.server.now += 2 * GRACE_S

    @precondition(lambda self: self.world.account.head is not None)
    @rule(plan=PLAN)
    def garbage_is_collected(self, plan: Plan | None) -> None:
        self.world.collect(plan)

    @precondition(lambda self: self.world.account.head is not None)
    @rule(mark=st.sampled_from(Mark), salt=SALT, plan=PLAN)
    def an_operator_marks_a_version(self, mark: Mark, salt: int, plan: Plan | None) -> None:
        self.world.retain(mark, salt, plan)

    def teardown(self) -> None:
        try:
            self.world.finish()
            self.world.audit()
        finally:
            store_log.SNAPSHOT_EVERY = self.usual
            shutil.rmtree(self.work, ignore_errors=True)


QUIET: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
Protocol.TestCase.settings = settings(max_examples=40, stateful_step_count=30, derandomize=True, **QUIET)
test_protocol = Protocol.TestCase


class LongProtocol(Protocol):
    """The same, for longer, and another one every time."""


LongProtocol.TestCase.settings = settings(max_examples=400, stateful_step_count=60, **QUIET)
test_long_protocol = pytest.mark.full(LongProtocol.TestCase)
