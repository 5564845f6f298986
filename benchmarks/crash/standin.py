"""The two sides of a run without their engines: rollout and trainer as the flows drive them, over the real log, buffer
and selection, with made-up episodes and a model of 32 bytes.

A "training step" hashes the weights with the samples, so a replay from the last full checkpoint must reach the very
weights that the log names, or samples, order or checkpoint are not what they were. No torch, no clock of its own.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from infra.store import schema
from infra.store.buffer import SampleBuffer
from infra.store.directories import pull_directory, push_directory
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from infra.training.batches import Batches, Limits
from rl.errors import LogCorrupt, RollmillError
from rl.ledger import Ledger
from rl.records import Reason, StateRef, Step
from rl.selection import Candidate, DropPolicy, admissible
from rl.staleness import StalenessPolicy
from rl.stream import ProblemStream
from rl.trajectory import NO_VERSION, Group, Status, Trajectory, Uid

MEMBERS = 2
FAILURES = (Reason.ENVIRONMENT_ERROR, Reason.REWARD_ERROR, Reason.GENERATION_ERROR, Reason.STALE)
WEIGHTS = "model/weights.bin"
STREAM = ProblemStream(0, {"hash": 1.0, "sum": 0.5})
HOLD_S = 2.0
"""For a problem that grew too old too often."""


class Diverged(RollmillError):
    """A logged step, replayed, gave other weights than the record says."""


class Witness(ObjectStore):
    """The store as one process sees it, which tells `note` (key, nonce) of every creation that was acknowledged."""

    def __init__(self, client: Any, bucket: str, note: Callable[[str, str], None], **clock: Any) -> None:
        super().__init__(client, bucket, **clock)
        self._note = note

    def create(self, key: str, body: bytes, nonce: str) -> bool:
        made = super().create(key, body, nonce)
        if made:
            self._note(key, nonce)
        return made


def episode(uid: Uid, start: int, newest: int, reward: float, member: int, text: bytes) -> Trajectory:
    """One made-up trajectory whose first sampled token is of version `start` and whose last is of `newest`."""
    sampled = [start, *[newest] * len(text)]
    return Trajectory(
        uid=uid,
        member=member,
        problem=STREAM.problem(uid.ordinal),
        start_version=start,
        prompt_length=1,
        token_ids=[0, 1, *text],
        loss_mask=[0] + [1] * len(sampled),
        logprobs=[0.0] + [-0.5] * len(sampled),
        versions=[NO_VERSION, *sampled],
        messages=[],
        status=Status.TERMINATED,
        turns=1,
        rewards={"outcome": reward},
    )


def play(uid: Uid, start: int, newest: int, flat: bool, text: bytes) -> Group:
    """A whole group, with equal rewards when `flat`."""
    rewards = [1.0 if flat else float(member % 2) for member in range(MEMBERS)]
    return Group.of([episode(uid, start, newest, reward, m, text) for m, reward in enumerate(rewards)])


class Rollout:
    """One producer. It owns no cursor: what it starts is a function of the log and the sealed groups."""

    def __init__(
        self, store: ObjectStore, prefix: str, writer: str, policy: StalenessPolicy, drops: DropPolicy
    ) -> None:
        self.writer, self._policy, self._drops, self._seq = writer, policy, drops, 0
        self.log = CommitLog(store, prefix, writer)
        self.buffer = SampleBuffer(store, prefix)
        self.in_flight: dict[Uid, int] = {}
        """Start version of every group that was started and not sealed."""
        self.sealed: dict[Uid, Candidate] = {}

    def look(self) -> Ledger:
        """Follow the log and the buffer."""
        ledger = self.log.sync()
        self.sealed = {c.uid: c for c in self.buffer.refresh(ledger, self._policy)}
        return ledger

    def start(self, serving: int) -> list[Uid]:
        """Start what may be started, by engines that serve this version."""
        ledger = self.log.ledger
        new = admissible(ledger, serving, self.sealed.values(), self.in_flight, self._policy, self._drops)
        self.in_flight |= dict.fromkeys(new, serving)
        return new

    def seal(self, uids: Sequence[Uid], newest: int, flat: bool, text: bytes) -> None:
        """End groups of one start version, in one segment of this writer's own."""
        groups = [play(uid, self.in_flight[uid], max(newest, self.in_flight[uid]), flat, text) for uid in uids]
        self._seq += 1
        self.buffer.seal(groups, self.writer, self._seq)
        for group in groups:
            del self.in_flight[group.uid]
            self.sealed[group.uid] = Candidate.of(group)

    def admit(self, uid: Uid, newest: int, flat: bool, text: bytes) -> None:
        """End one group under the name of its attempt, as the stage admit does."""
        group = play(uid, self.in_flight[uid], max(newest, self.in_flight[uid]), flat, text)
        self.buffer.seal([group], f"g{uid.ordinal:010d}", uid.attempt)
        del self.in_flight[uid]
        self.sealed[uid] = Candidate.of(group)

    def give_up(self, uid: Uid, reason: Reason) -> None:
        """End one group as a tombstone, as the rollout flow does."""
        group = Group.give_up(uid, STREAM.problem(uid.ordinal), self.log.sync().head or 0, reason.value)
        self.buffer.seal([group], f"t{uid.ordinal:010d}", uid.attempt)
        self.in_flight.pop(uid, None)
        self.sealed[uid] = Candidate.of(group)


class Trainer:
    """Fences, restores, replays, and steps; one object per fence, to be thrown away after any error."""

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        writer: str,
        policy: StalenessPolicy,
        drops: DropPolicy,
        work: Path,
        checkpoint_every: int,
        deadline_s: float,
        clock: Callable[[], float],
        pause: Callable[[float], None],
    ) -> None:
        self._store, self._prefix, self._work, self._every = store, prefix, work, checkpoint_every
        self._alpha = policy.alpha
        self.log = CommitLog(store, prefix, writer)
        self.buffer = SampleBuffer(store, prefix)
        limits = Limits(deadline_s, HOLD_S, max_flat_groups=1 << 30)
        self._batches = Batches(self.log, self.buffer, policy, drops, STREAM, limits, clock=clock, pause=pause)
        self.log.fence()
        self.weights = self._resume()

    def step(self) -> Step:
        """One optimizer step, committed. Raises as `Batches.next` and `CommitLog.append_step`."""
        batch = self._batches.next()
        weights = learn(self.weights, batch.groups)
        ref = self._push(batch.version, weights)
        step = self.log.append_step(
            state=ref,
            weights_sha256=weights.hex(),
            alpha=self._alpha,
            trained=batch.uids,
            segments=batch.segments,
            dropped=[*batch.dropped, *self._batches.late(batch)],
        )
        self.weights = weights
        return step

    def roll_back(self, to: int) -> bool:
        """Go back to a version, to the state that the log names afterwards; False when that is refused, because
        what it builds on may be deleted or it is no longer live."""
        try:
            self.log.append_rollback(to)
        except LogCorrupt:
            return False
        self.weights = self._resume()
        return True

    def _resume(self) -> bytes:
        """The head's weights: restored from the newest full state and replayed; made, if there is none."""
        ledger = self.log.ledger
        version = ledger.newest_full
        if version is None:
            weights = learn(b"", [])
            self.log.append_step(state=self._push(0, weights), weights_sha256=weights.hex(), alpha=self._alpha)
            return weights
        weights = self._restore(ledger.states[version])
        for step in self.log.steps_after(version):
            weights = learn(weights, self.buffer.fetch(step))
            if weights.hex() != step.weights_sha256:
                raise Diverged(f"version {step.version}, replayed, has other weights than record {step.lsn} says")
        return weights

    def _push(self, version: int, weights: bytes) -> StateRef:
        draft = self._work / "draft"
        shutil.rmtree(draft, ignore_errors=True)
        full = version % self._every == 0
        for name in (WEIGHTS, "trainer/optimizer.bin")[: 1 + full]:
            (draft / name).parent.mkdir(parents=True)
            (draft / name).write_bytes(weights)
        prefix = self.log.state_prefix()
        return StateRef(
            prefix=prefix, manifest_sha256=push_directory(self._store, self._prefix + prefix, draft), full=full
        )

    def _restore(self, ref: StateRef) -> bytes:
        return restore(self._store, self._prefix, ref, self._work)


def restore(store: ObjectStore, prefix: str, ref: StateRef, work: Path) -> bytes:
    """The weights of a version, verified, through a fresh cache. Raises NotFound or Corrupt."""
    cache = work / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    return (pull_directory(store, prefix + ref.prefix, ref.manifest_sha256, cache) / WEIGHTS).read_bytes()


def learn(weights: bytes, groups: Sequence[Group]) -> bytes:
    """The next weights. They depend on every number of every sample, and on the order."""
    return hashlib.sha256(weights + (schema.encode(groups) if groups else b"")).digest()

