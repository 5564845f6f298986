"""Random histories of a rollout side and a training side that share only the log and the sealed groups, with
crashes of either, zombies and rollbacks. After every record the ledger is held against the audit's account
(`rl.account`): conservation, at most once, the staleness bound, monotonic versions, snapshots."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rl.errors import Fenced, LogCorrupt
from rl.ledger import Ledger
from rl.records import Fence, GcFloor, Mark, Outcome, Reason, Retain, Rollback, Settle, decode
from rl.rollback import rolled_back
from rl.selection import Candidate, DropPolicy, Selection, admissible, doomed, select
from rl.staleness import StalenessPolicy
from rl.trajectory import Uid
from tests.rl.bookkeeping import World

FAILURES = st.sampled_from([Reason.STALE, Reason.ENVIRONMENT_ERROR, Reason.REWARD_ERROR, Reason.GENERATION_ERROR])


class Histories(RuleBasedStateMachine):
    @initialize(
        alpha=st.integers(0, 3),
        groups=st.integers(1, 3),
        more=st.integers(0, 2),
        budget=st.integers(1, 3),
        equal=st.booleans(),
        every=st.integers(1, 5),
    )
    def begin(self, alpha: int, groups: int, more: int, budget: int, equal: bool, every: int) -> None:
        self.policy = StalenessPolicy(alpha, groups, groups + more)
        self.drops = DropPolicy(budget, budget, train_equal_rewards=equal)
        self.world = World(self.policy, every)
        self.trainer = Ledger()
        self.zombie: Ledger | None = None
        self.rollout = Ledger()
        self.in_flight: dict[Uid, int] = {}
        self.world.append(self.trainer, Fence)
        self.world.step(self.trainer, [], [])

    # -- the rollout side ----------------------------------------------------------------------------

    @rule(follow=st.booleans())
    def admit(self, follow: bool) -> None:
        if follow:
            self.world.follow(self.rollout)
        up_to_date = self.rollout.lsn == len(self.world.log)
        before = self.world.unsettled(self.in_flight)
        visible = self.world.visible(self.rollout)
        new = admissible(self.rollout, self.world.serving, visible, self.in_flight.keys(), self.policy, self.drops)
        assert not set(new) & self.in_flight.keys()
        assert not set(new) & {c.uid for c in visible}
        for uid in new:
            self.in_flight[uid] = self.world.serving
        if not new or not up_to_date:
            return
        line = self.world.account.line
        serving_lag = len(line) - 1 - line.index(self.world.serving)
        capacity = (self.policy.alpha + 1 - serving_lag) * self.policy.examined_per_step
        protected = [uid for uid in new if self.drops.protected(self.rollout, uid.ordinal)]
        assert before + len(new) == self.world.unsettled(self.in_flight) == max(capacity, before + len(protected))
        assert all(self.world.account.is_open(uid) for uid in new)
        taken = self.in_flight.keys() | {c.uid for c in visible}
        between = (self.world.account.granted.get(o, 0) for o in range(max(new).ordinal if protected != new else 0))
        for ordinal, attempt in enumerate(between):
            assert self.world.account.settled(ordinal) or Uid(ordinal, attempt) in taken, "not in stream order"

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), signal=st.booleans(), late=st.booleans())
    def seal(self, data: st.DataObject, signal: bool, late: bool) -> None:
        uid = data.draw(st.sampled_from(sorted(self.in_flight)))
        start = self.in_flight.pop(uid)
        self.world.sealed.append(Candidate(uid, start, signal, newest=self.world.serving if late else start))

    @precondition(lambda self: self.in_flight)
    @rule(signals=st.lists(st.booleans(), min_size=1, max_size=12))
    def seal_many(self, signals: list[bool]) -> None:
        for uid, signal in zip(sorted(self.in_flight), signals, strict=False):
            self.world.sealed.append(Candidate(uid, self.in_flight.pop(uid), signal))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), reason=FAILURES)
    def give_up(self, data: st.DataObject, reason: Reason) -> None:
        uid = data.draw(st.sampled_from(sorted(self.in_flight)))
        del self.in_flight[uid]
        self.world.sealed.append(Candidate(uid, self.world.serving, False, tombstone=reason.value))

    @precondition(lambda self: self.world.sealed)
    @rule(data=st.data(), signal=st.booleans())
    def a_zombie_rollout_seals_again(self, data: st.DataObject, signal: bool) -> None:
        copied = data.draw(st.sampled_from(self.world.sealed))
        self.world.sealed.append(Candidate(copied.uid, self.world.serving, signal))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def rollout_crashes(self, data: st.DataObject) -> None:
        self.in_flight = {}
        self.rollout = self.world.fold(data.draw(st.sampled_from(self.world.starts())))

    # -- the training side ---------------------------------------------------------------------------

    @rule()
    def swap(self) -> None:
        assert self.trainer.head is not None
        self.world.serving = self.trainer.head

    def _select(self) -> Selection:
        result = select(self.trainer, self.world.visible(self.trainer), self.policy, self.drops)
        assert len(result.batch) <= self.policy.groups_per_step
        assert not (result.batch and result.awaited)
        for c in result.batch:
            self.policy.check(self.trainer, c.uid, c.version)
        return result

    @rule()
    def a_held_version_is_held_no_longer(self) -> None:
        awaited = self._select().awaited
        if awaited:
            drops = tuple(self.drops.drop(self.trainer, uid, Reason.STALE) for uid in awaited)
            assert all(d.reason is Reason.TOO_LONG and d.outcome is Outcome.ABANDON for d in drops)
            self.world.append(self.trainer, Settle, dropped=drops)

    @rule(late=st.booleans())
    def train(self, late: bool) -> None:
        self._train(late)

    def _train(self, late: bool = False) -> None:
        result = self._select()
        if not result.batch:
            if result.dropped:
                self.world.append(self.trainer, Settle, dropped=tuple(result.dropped))
            return
        if late and self.in_flight:  # sealed while the step trains
            uid = min(self.in_flight)
            self.world.sealed.append(Candidate(uid, self.in_flight.pop(uid), True, newest=self.world.serving))
        taken = {c.uid for c in result.batch} | {Uid.parse(d.uid) for d in result.dropped}
        more = doomed(self.trainer, self.world.visible(self.trainer), taken, self.policy, self.drops)
        self.world.step(self.trainer, result.batch, result.dropped + more)

    @precondition(lambda self: self.trainer.trained_groups)
    @rule(data=st.data())
    def trainer_crashes(self, data: st.DataObject) -> None:
        self.zombie = self.trainer
        self.trainer = self.world.fold(data.draw(st.sampled_from(self.world.starts())))
        self.world.append(self.trainer, Fence)

    @precondition(lambda self: self.zombie is not None)
    @rule()
    def a_zombie_trainer_commits(self) -> None:
        assert self.zombie is not None
        length = len(self.world.log)
        with pytest.raises(Fenced):
            self.world.step(self.zombie, [], [])
        assert len(self.world.log) == length

    @precondition(lambda self: len(self.trainer.line) > 2)
    @rule(data=st.data(), swap=st.booleans())
    def roll_back(self, data: st.DataObject, swap: bool) -> None:
        line, gone = self.trainer.line, self.trainer.deleted
        full = [v for v in line if self.world.full(v)]
        resumable = []
        for to in line:
            resume = max(v for v in full if v <= to)
            needed = resume if resume == to else line[max(0, line.index(resume) - self.policy.alpha)]
            if needed >= self.trainer.gc_floor and not {to, resume} & gone:
                resumable.append(to)
        to = data.draw(st.sampled_from(resumable))
        start = data.draw(st.sampled_from(self._starts_up_to(to)))
        records = [decode(body) for body in self.world.log[max(0, start - 1) :]]
        self.world.append(self.trainer, Rollback, to=to, snapshot=rolled_back(records, to))
        if swap:
            self.swap()

    def _starts_up_to(self, version: int) -> list[int]:
        """Where a fold may begin that is to find the moment at which `version` was the head."""
        starts = [0]
        for at, body in enumerate(self.world.log, 1):
            snapshot = decode(body).snapshot
            if snapshot is not None and snapshot.head == version:
                starts.append(at)
        return starts

    @precondition(lambda self: len(self.trainer.line) > 4)
    @rule(data=st.data())
    def collect(self, data: st.DataObject) -> None:
        line = self.trainer.line
        newest = max(v for v in line if self.world.full(v))
        low = line[max(0, line.index(newest) - self.policy.alpha)]
        if low >= self.trainer.gc_floor:
            version = data.draw(st.integers(self.trainer.gc_floor, low))
            self.world.append(self.trainer, GcFloor, version=version)

    @rule(data=st.data(), mark=st.sampled_from(Mark))
    def mark(self, data: st.DataObject, mark: Mark) -> None:
        """An operator marks any version that ever was; the ledger refuses what would hurt."""
        version = data.draw(st.integers(0, self.trainer.next_version - 1))
        needed = self.trainer.line[-1 - self.policy.alpha :]
        needed.append(max(v for v in self.trainer.line if self.world.full(v)))
        marked = version in self.trainer.deleted
        gone = version < self.trainer.gc_floor or marked
        pinned = version in self.trainer.pins
        refused = (mark is Mark.PIN and gone) or (mark is Mark.DELETE and (pinned or version in needed))
        state = self.world.state(version) if mark is Mark.PIN else None
        try:
            self.world.append(self.trainer, Retain, version=version, mark=mark, state=state)
        except LogCorrupt:
            assert refused
            return
        assert not refused
        assert (version in self.trainer.pins) == (mark is Mark.PIN)
        assert (version in self.trainer.deleted) == (mark is Mark.DELETE or marked)

    # -- both, so that histories get somewhere -------------------------------------------------------

    @rule(fates=st.lists(st.sampled_from(["signal", "signal", "equal", "fails", "hangs"]), min_size=4, max_size=8))
    def a_step_goes_well(self, fates: list[str]) -> None:
        self.swap()
        self.admit(True)
        for at, uid in enumerate(sorted(self.in_flight)):
            fate = fates[at % len(fates)]
            if fate != "hangs":
                tombstone = Reason.ENVIRONMENT_ERROR.value if fate == "fails" else None
                sealed = Candidate(uid, self.in_flight.pop(uid), fate == "signal", tombstone)
                self.world.sealed.append(sealed)
        self._train()

    also_a_step_goes_well = a_step_goes_well

    # -- always --------------------------------------------------------------------------------------

    @invariant()
    def any_fold_is_the_same_ledger(self) -> None:
        folds = [self.world.fold(start) for start in self.world.starts()[-3:]] + [self.world.fold(0)]
        assert all(vars(fold) == vars(self.trainer) for fold in folds)

    @invariant()
    def the_newest_full_version_is_on_the_line(self) -> None:
        line = self.world.account.line
        assert self.trainer.newest_full == max(v for v in line if v % 3 == 0)


Histories.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
test_histories = Histories.TestCase
