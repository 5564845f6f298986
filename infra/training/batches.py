"""Phase GET_BATCH: waits until the buffer holds a batch for the step on the log's head.

    poll the log and the buffer -> select -> a batch, or settle what was dropped and go on, or pause

Invariants
- What can not be trained is settled at once, so that its replacement is admitted while the trainer waits.
- While a problem that grew too old too often is in flight, or a group that only this step may still train, the version
  is held for it (`rl.selection`): for `Limits.hold_s`, and no longer.
- Every group of a batch passed `StalenessPolicy.check`, which raises: selection filters, the check proves.
- The wait ends: `deadlines.batch` without a single new group is a BatchTimeout that says what was there.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from infra.store.buffer import SampleBuffer
from infra.store.errors import Overtaken
from infra.store.log import CommitLog
from rl.config.run import RunConfig
from rl.errors import DeadlineExceeded, RollmillError
from rl.ledger import Ledger
from rl.records import Drop, Reason
from rl.selection import Candidate, DropPolicy, Selection, doomed, select
from rl.staleness import StalenessPolicy
from rl.stream import ProblemStream
from rl.trajectory import Group, Uid

log = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class Limits:
    """How long the trainer looks for a batch before it ends by name, or goes on without what it waits for."""

    deadline_s: float
    """Without a single new group."""
    hold_s: float
    """For a problem that grew too old too often."""
    max_flat_groups: int
    """Groups in a row with equal rewards."""

    @classmethod
    def of(cls, config: RunConfig) -> Limits:
        return cls(config.deadlines.batch, config.deadlines.trajectory, config.training.max_flat_groups)


@dataclass
class Seen:
    """What was looked at and not trained."""

    settled: Counter[str] = field(default_factory=Counter)
    """Attempts settled between steps, by reason."""
    flat: list[float] = field(default_factory=list)
    """Rewards of the trajectories of groups in which all were equal."""
    evicted: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Groups that grew too old, by domain and generated tokens of the longest member, rounded up to a power of two
    (0: it was still running)."""


class Batches:
    """Forms batches for the one trainer that holds the fence of `log`."""

    def __init__(
        self,
        log: CommitLog,
        buffer: SampleBuffer,
        staleness: StalenessPolicy,
        drops: DropPolicy,
        stream: ProblemStream,
        limits: Limits,
        in_flight: Callable[[], Mapping[Uid, int]] = dict,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """`in_flight`: attempts that were started and the version under which (`infra.store.flights`). `pause` between
        two looks; it gives True where nothing could arrive meanwhile, which then is no wait."""
        self._in_flight = in_flight
        self._log, self._buffer, self._staleness, self._drops = log, buffer, staleness, drops
        self._stream, self._limits, self._clock, self._pause = stream, limits, clock, pause
        self._flat_groups = 0
        self._held_since: float | None = None
        self._seen = Seen()

    def report(self) -> Seen:
        """What was seen since the last report."""
        seen, self._seen = self._seen, Seen()
        return seen

    def next(self, on_its_way: Callable[[], Ledger | None] = lambda: None) -> Batch:
        """The batch of the step on the head. Raises BatchTimeout, NoSignal, Fenced, StalenessViolation, or a
        StoreError.

        While `on_its_way` gives a ledger, in which a version stands that is not committed yet, that is the head, and
        the log is neither read nor written: what is to be dropped without a batch is dropped afterwards."""
        seen: set[Uid] = set()
        last, (wait, longest) = self._clock(), PAUSE_S
        while True:
            projected = on_its_way()
            ledger = self._log.sync() if projected is None else projected
            candidates = self._buffer.refresh(ledger, self._staleness)
            if new := {c.uid for c in candidates} - seen:
                seen |= new
                last, wait = self._clock(), PAUSE_S[0]
            selection = self._select(ledger, candidates)
            if projected is None or selection.batch:
                self._look_at_flat(selection)
                selection.dropped += self._give_up_waiting(ledger, selection)
                if selection.batch:
                    self._count_evicted(selection.dropped, candidates)
                    return self._take(ledger, selection.batch, selection.dropped)
                if selection.dropped:
                    self._settle(selection.dropped, candidates)
                    continue
            if self._clock() - last > self._limits.deadline_s:
                raise BatchTimeout(self._describe(ledger, candidates))
            if self._pause(wait) is True:
                last = self._clock()
            wait = min(1.5 * wait, longest)

    def _select(self, ledger: Ledger, candidates: Sequence[Candidate]) -> Selection:
        """What is in flight is looked at only where a batch could form without it."""
        quotas = self._quotas(ledger)
        selection = select(ledger, candidates, self._staleness, self._drops, quotas)
        if selection.batch and (flying := self._in_flight()):
            return select(ledger, candidates, self._staleness, self._drops, quotas, flying)
        return selection

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
        self._seen.flat += rewards
        self._flat_groups = 0 if selection.batch else self._flat_groups + len(flat)
        if flat and self._flat_groups >= self._limits.max_flat_groups:
            raise NoSignal(
                f"{self._flat_groups} groups in a row had equal rewards (the last ones {rewards[-1]:g}): nothing to "
                "learn from; start from a policy that succeeds sometimes (model.warmstart), change the task's "
                "difficulty, or raise training.max_flat_groups"
            )

    def _quotas(self, ledger: Ledger) -> Mapping[str, int]:
        """The mix of the next step: that of as many problems of the stream, in their turn."""
        looked_at = self._staleness.examined_per_step
        return self._stream.mix(max(0, ledger.next_version - 1) * looked_at, looked_at)

    def _give_up_waiting(self, ledger: Ledger, selection: Selection) -> list[Drop]:
        """Drops of the attempts for which the version was held for too long."""
        if not selection.awaited:
            self._held_since = None
            return []
        if self._held_since is None:
            self._held_since = self._clock()
            log.info("version %s is held for %s", ledger.head, ", ".join(map(str, selection.awaited)))
        if self._clock() - self._held_since <= self._limits.hold_s:
            return []
        self._held_since = None
        return [self._drops.drop(ledger, uid, Reason.STALE) for uid in selection.awaited]

    def _count_evicted(self, dropped: Sequence[Drop], candidates: Sequence[Candidate]) -> None:
        known = {str(c.uid): c for c in candidates}
        for drop in dropped:
            if drop.reason in (Reason.STALE, Reason.TOO_LONG):
                c = known.get(drop.uid)
                domain = self._stream.domain(Uid.parse(drop.uid).ordinal)
                self._seen.evicted[domain, 1 << (c.tokens - 1).bit_length() if c and c.tokens else 0] += 1

    def _settle(self, dropped: Sequence[Drop], candidates: Sequence[Candidate]) -> None:
        try:
            self._log.append_settle(dropped)
        except Overtaken:
            return  # somebody settled one of them first: look again
        self._seen.settled.update(drop.reason.value for drop in dropped)
        self._count_evicted(dropped, candidates)

    def late(self, batch: Batch) -> list[Drop]:
        """What the step itself makes too old, as of now: dropped in its own record. Empty for what arrives
        later still; the next selection drops that. Raises Overtaken when the step can not be committed any more."""
        ledger = self._log.sync()
        gone = [*batch.uids, *(Uid.parse(drop.uid) for drop in batch.dropped)]
        if taken := [uid for uid in gone if not ledger.is_open(uid)]:
            raise Overtaken(f"attempt {taken[0]} was settled by another writer while its step was made")
        candidates = self._buffer.refresh(ledger, self._staleness)
        late = doomed(ledger, candidates, gone, self._staleness, self._drops)
        self._count_evicted(late, candidates)
        return late

    def _describe(self, ledger: Ledger, candidates: Sequence[Candidate]) -> str:
        alive = [c for c in candidates if c.tombstone is None]
        versions = ", ".join(
            f"{n} of version {v}" for v, n in sorted(Counter(c.version for c in alive).items())
        )
        return (
            f"no new group for {self._limits.deadline_s:.0f} s (deadlines.batch) while waiting for a batch of "
            f"{self._staleness.groups_per_step} at version {ledger.head}: the buffer holds {len(alive)} groups"
            f"{f' ({versions})' if versions else ''}, {sum(c.informative for c in alive)} with signal, and "
            f"{len(candidates) - len(alive)} given up; is the rollout running?"
        )
