"""Phase GET_BATCH: waits until the buffer holds a batch for the step on the log's head.

    poll the log and the buffer -> select -> a batch, or settle what was dropped and go on, or pause

Invariants
- What can not be trained is settled at once, so that its replacement is admitted while the trainer waits.
- Every group of a batch passed `StalenessPolicy.check`, which raises: selection filters, the check proves.
- The wait ends: `deadlines.batch` without a single new group is a BatchTimeout that says what was there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infra.store.buffer import SampleBuffer
from infra.store.errors import Overtaken
from infra.store.log import CommitLog
from rl.errors import DeadlineExceeded, RollmillError
from rl.ledger import Ledger
from rl.records import Drop, Reason
from rl.selection import Candidate, DropPolicy, Selection, doomed, select
from rl.staleness import StalenessPolicy
from rl.trajectory import Group, Uid

PAUSE_S = (0.05, 0.5)
"""First and longest pause between two looks."""


class BatchTimeout(DeadlineExceeded):
    """No new group arrived for so long that the rollout side must be broken."""


class NoSignal(RollmillError):
    """Group after group has equal rewards: there is nothing to learn from."""


@dataclass(frozen=True)
class Batch:
    """A step's samples, before it is committed."""

    base: int
    version: int
    """The version that the step makes."""
    groups: list[Group]
    segments: list[str]
    dropped: list[Drop]
    lags: list[int]

    @property
    def uids(self) -> list[Uid]:
        return [group.uid for group in self.groups]


class Batches:
    """Forms batches for the one trainer that holds the fence of `log`."""

    def __init__(
        self,
        log: CommitLog,
        buffer: SampleBuffer,
        staleness: StalenessPolicy,
        drops: DropPolicy,
        deadline_s: float,
        max_flat_groups: int,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._log, self._buffer, self._staleness, self._drops = log, buffer, staleness, drops
        self._max_flat_groups, self._flat_groups = max_flat_groups, 0
        self._deadline_s, self._clock, self._pause = deadline_s, clock, pause
        self.settled: Counter[str] = Counter()
        """Attempts settled between steps, by reason; whoever reports them clears it."""
        self.flat: list[float] = []
        """Rewards of the trajectories of groups that were looked at and not trained, for all were equal; whoever
        reports them clears it."""

    def next(self) -> Batch:
        """The batch of the step on the head. Raises BatchTimeout, NoSignal, Fenced, StalenessViolation, or a
        StoreError."""
        seen: set[Uid] = set()
        last, (wait, longest) = self._clock(), PAUSE_S
        while True:
            ledger = self._log.sync()
            candidates = self._buffer.refresh(ledger, self._staleness)
            if new := {c.uid for c in candidates} - seen:
                seen |= new
                last, wait = self._clock(), PAUSE_S[0]
            selection = select(ledger, candidates, self._staleness, self._drops)
            self._look_at_flat(selection)
            if selection.batch:
                return self._take(ledger, selection.batch, selection.dropped)
            if selection.dropped:
                self._settle(selection.dropped)
                continue
            if self._clock() - last > self._deadline_s:
                raise BatchTimeout(self._describe(ledger, candidates))
            self._pause(wait)
            wait = min(1.5 * wait, longest)

    def _take(self, ledger: Ledger, batch: Sequence[Candidate], dropped: Sequence[Drop]) -> Batch:
        assert ledger.head is not None
        lags = [self._staleness.check(ledger, c.uid, c.version) for c in batch]
        uids = [c.uid for c in batch]
        groups = self._buffer.take(uids)
        # the members' own start versions, not the candidate's claim
        for group in groups:
            for member in group.members:
                self._staleness.check(ledger, f"{group.uid}/{member.member}", member.start_version)
        segments = self._buffer.segments(uids)
        return Batch(ledger.head, ledger.next_version, groups, segments, list(dropped), lags)

    def _look_at_flat(self, selection: Selection) -> None:
        """Note the rewards of what has no signal. Raises NoSignal when there was nothing else for too long."""
        flat = [Uid.parse(drop.uid) for drop in selection.dropped if drop.reason is Reason.EQUAL_REWARD]
        rewards = [reward for group in self._buffer.take(flat) for reward in group.rewards]
        self.flat += rewards
        self._flat_groups = 0 if selection.batch else self._flat_groups + len(flat)
        if flat and self._flat_groups >= self._max_flat_groups:
            raise NoSignal(
                f"{self._flat_groups} groups in a row had equal rewards (the last ones {rewards[-1]:g}): nothing to "
                "learn from; start from a policy that succeeds sometimes (model.warmstart), change the task's "
                "difficulty, or raise training.max_flat_groups"
            )

    def _settle(self, dropped: Sequence[Drop]) -> None:
        try:
            self._log.append_settle(dropped)
        except Overtaken:
            return  # somebody settled one of them first: look again
        self.settled.update(drop.reason.value for drop in dropped)

    def late(self, batch: Batch) -> list[Drop]:
        """What the step itself makes too old, as of now: dropped in its own record. Empty for what arrives
        later still; the next selection drops that."""
        ledger = self._log.sync()
        candidates = self._buffer.refresh(ledger, self._staleness)
        gone = [*batch.uids, *(Uid.parse(drop.uid) for drop in batch.dropped)]
        return doomed(ledger, candidates, gone, self._staleness, self._drops)

    def _describe(self, ledger: Ledger, candidates: Sequence[Candidate]) -> str:
        alive = [c for c in candidates if c.tombstone is None]
        versions = ", ".join(
            f"{n} of version {v}" for v, n in sorted(Counter(c.version for c in alive).items())
        )
        return (
            f"no new group for {self._deadline_s:.0f} s (deadlines.batch) while waiting for a batch of "
            f"{self._staleness.groups_per_step} at version {ledger.head}: the buffer holds {len(alive)} groups"
            f"{f' ({versions})' if versions else ''}, {sum(c.informative for c in alive)} with signal, and "
            f"{len(candidates) - len(alive)} given up; is the rollout running?"
        )
