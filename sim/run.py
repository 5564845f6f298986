"""One tenant's run under the virtual clock: the policies of `rl/` decide, the world only obeys.

The rollout side keeps in flight what `rl.selection.admissible` says and ends what `rl.staleness` says is too old; the
trainer's side takes the batch that `rl.selection.select` chooses, in the order of `rl.modes` and `rl.protocol`, and
folds every record into an `rl.ledger.Ledger`. They are the objects of the running system, not copies. As there, the
trainer looks at a ledger in which the version on its way stands already, and the rollout side at the log.

Invariants
- Nothing of a policy is decided here: this file turns their answers into starts, ends and moments.
- Policies are asked again only when something that they look at changed; between, their answer is the same.
- A version is served only after its record; the engines stand still only from SUSPEND to RESUME.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl.ledger import Ledger
from rl.modes import MODES
from rl.protocol import Phase, StepProtocol
from rl.records import Drop, Fence, Reason, Record, Settle, StateRef, Step
from rl.redundancy import Mode, RedundancyPolicy
from rl.selection import Candidate, DropPolicy, Selection, admissible, doomed, select
from rl.staleness import StalenessPolicy
from rl.stream import ProblemStream
from rl.trajectory import Uid
from sim.batches import mix, ready, settled
from sim.config import Scenario
from sim.host import Flight, Host, StepTimes
from sim.service import section
from sim.workload import length_factor

MEMBER_RETRIES = 2
_STATE = StateRef(prefix="", manifest_sha256="", full=True)


class Run:
    """Ledgers, policies and state of one tenant."""

    def __init__(self, number: int, scenario: Scenario, host: Host, steps: int | None = None):
        self.number, self.scenario, self.host = number, scenario, host
        self.begun = False
        """Whether it has a place, and its first version is there."""
        r = scenario.redundancy
        self.redundancy = RedundancyPolicy(Mode(r.mode), r.extra_members, r.extra_groups)
        examined = self.redundancy.examined(scenario.groups_per_step, scenario.groups_per_step)
        self.mode = MODES[scenario.mode]
        bound, admission = self.mode.bound(scenario.alpha), scenario.alpha
        self.policy = StalenessPolicy(bound, scenario.groups_per_step, examined, steps, admission)
        self.drops = DropPolicy(train_equal_rewards=True, forgets=self.redundancy.mode is Mode.FIRST_FINISHED)
        own = section(scenario, number).domains
        self._domains = {d.name: d for d in scenario.domains if not own or d.name in own}
        self.stream = ProblemStream(scenario.seed + number, {name: d.weight for name, d in self._domains.items()})
        self.protocol = StepProtocol(scenario.alpha, self.mode.eager)
        self.log, self.ahead = Ledger(), Ledger()
        """What the rollout side reads, and what the trainer knows will be there."""
        self._append(Fence(lsn=1, nonce="", writer="", time=0.0))
        self._append(self._step_record([], []))
        self._at_once = self.mode.alternates or self.mode.eager
        """Whether the engines get a version as soon as it is committed."""
        self.serving: int | None = None if self._at_once else self.log.head
        self.in_flight: dict[Uid, Flight] = {}
        self.sealed: dict[Uid, Candidate] = {}
        self.offered: dict[Uid, Candidate] = {}
        """Those of the sealed ones that the version on its way does not settle."""
        self.sizes: dict[Uid, tuple[float, float]] = {}
        self.steps: list[StepTimes] = []
        self.durations: list[float] = []
        """Of the sealed groups, from start to end."""
        self.changed = True
        """Whether admission may answer something new."""
        self._chosen: Selection | None = None
        self._record: Step | None = None
        """On its way to the log."""
        self._pushed = False
        self._submit_wanted = False
        self._swap_wanted = self._at_once
        self._swapping = False
        self._asked = self._batch_at = self._trained_at = 0.0
        self._quotas: tuple[int, Mapping[str, int]] = -1, {}
        """Of the step that makes this version: groups of each domain."""
        self._tombs = 0
        self._missing = 0
        """Groups that must be sealed before it is worth asking for a batch ..."""
        self._awaited: set[Uid] = set()
        """... of these, or of any if there are none."""

    @property
    def over(self) -> bool:
        return self.policy.steps is not None and len(self.steps) >= self.policy.steps

    @property
    def waits(self) -> bool:
        """Whether the trainer could take a batch of this run, if there were one."""
        if self._chosen is not None or self.serving is None:
            return False
        if self.scenario.weights.mode == "inline" and (self._record or self._swapping or self._swap_wanted):
            return False  # the trainer is busy handing its version over
        return self.protocol.may(Phase.GET_BATCH)

    def begin(self) -> None:
        self.begun, self._asked = True, self.host.now

    def poll(self) -> None:
        """Do whatever is due now."""
        if self._pushed and not self._swapping and self.protocol.may(Phase.COMMIT):
            self._commit()
        if self._swap_wanted and not self._swapping and self.protocol.may(Phase.SUSPEND):
            self._swap_wanted, self._swapping = False, True
            self.protocol.enter(Phase.SUSPEND)
            self.host.swap(self)
        if self._submit_wanted and self._record is None and not self._swapping and not self._swap_wanted:
            self._submit()
        if self.changed and self.serving is not None:
            self._admit()
        if self.waits and self._may_be_enough():
            self._take()

    def _may_be_enough(self) -> bool:
        """Whether it is worth asking for a batch: there are tombstones to settle, or as many groups as are needed."""
        if self._tombs and self._record is None:
            return True
        return self._missing <= 0 and len(self.offered) >= self.policy.groups_per_step

    # -- the trainer's side ------------------------------------------------------------------------------

    def _take(self) -> None:
        waits = self.mode.waits and self.scenario.late == "wait" and not self.drops.forgets
        flying = {uid: flight.version for uid, flight in self.in_flight.items()} if waits else None
        offered = ready(self.offered, self.ahead, self.policy.groups_per_step, self.scenario.batches)
        if self._quotas[0] != self.ahead.next_version:
            self._quotas = self.ahead.next_version, mix(self.stream, self.ahead, self.policy.examined_per_step)
        chosen = select(self.ahead, offered, self.policy, self.drops, self._quotas[1], flying)
        self._missing, self._awaited = chosen.missing, set(chosen.awaited)
        if not chosen.batch:
            if chosen.dropped and self._record is None:
                self._append(Settle(**self._stamp(), dropped=tuple(chosen.dropped)))
                self._forget()
                self.changed = True
            return
        self._chosen, self._batch_at = chosen, self.host.now
        self.protocol.enter(Phase.GET_BATCH)
        self._swap_wanted = self._swap_wanted or not self._at_once
        sizes = [self.sizes[c.uid] for c in chosen.batch]
        self.host.train(self, sum(s[0] for s in sizes), sum(s[1] for s in sizes))
        self.poll()

    def trained(self) -> None:
        """The step on the chosen batch is computed."""
        self._trained_at = self.host.now
        self.protocol.enter(Phase.TRAIN)
        self._submit_wanted = True

    def _submit(self) -> None:
        """Hand the version over to be published; the one before is."""
        assert self._chosen is not None
        self._submit_wanted = False
        chosen, self._chosen = self._chosen, None
        late = doomed(self.ahead, self.offered.values(), settled(chosen), self.policy, self.drops)
        lags = [self.policy.check(self.ahead, c.uid, c.version) for c in chosen.batch]
        self._record = self._step_record(chosen.batch, [*chosen.dropped, *late], sum(lags) / len(lags))
        self.ahead.apply(self._record)
        self._offer()
        self._times = (self._asked, self._batch_at, self._trained_at)
        self._asked = self.host.now
        self.host.push(self)

    def pushed(self) -> None:
        """The new version is in the store, and may be named."""
        self._pushed = True

    def _commit(self) -> None:
        record, self._record, self._pushed = self._record, None, False
        assert record is not None
        self.log.apply(record)
        self.protocol.enter(Phase.COMMIT)
        now = self.host.now
        count = len(record.trained) * self.scenario.group_size
        self.steps.append(StepTimes(record.version, *self._times, now, record.metrics["tokens"], count,
                                    record.metrics["lag"]))  # fmt: skip
        self._forget()
        self._swap_wanted = self._swap_wanted or self._at_once
        self.changed = True

    def swapped(self) -> None:
        """The engines have the head, and go on."""
        for phase in (Phase.UPDATE, Phase.RESUME, Phase.RECOMPUTE):
            self.protocol.enter(phase)
        self._swapping = False
        self.serving = self.log.head
        self.changed = True
        if self.mode.alternates:
            self._asked = self.host.now
        oldest = self.policy.oldest_viable(self.log, self.mode.base_ahead(self.scenario.alpha))
        self.give_up([uid for uid, flight in self.in_flight.items() if flight.version < oldest], Reason.STALE)

    # -- the rollout side --------------------------------------------------------------------------------

    def _admit(self) -> None:
        self.changed = False
        assert self.serving is not None
        uids = admissible(self.log, self.serving, self.sealed.values(), self.in_flight.keys(), self.policy, self.drops)
        flights = []
        for uid in self.host.grant(self, uids):
            domain = self._domains[self.stream.domain(uid.ordinal)]
            problem = length_factor(domain.problem_spread, self.scenario.seed, self.number, uid.ordinal)
            flight = Flight(uid, self.serving, domain, problem, self.host.now)
            self.in_flight[uid] = flight
            flights.append(flight)
        if flights:
            self._awaited.clear()
            self.host.place(self, flights)

    def finished(self, uid: Uid, members: list[int] | None, tokens: float, squares: float) -> None:
        """At least as many members as are needed have their rewards: all of them, or `members`, in the order in which
        they finished. Their lengths add up to `tokens`, the squares of their lengths to `squares`."""
        flight, size = self.in_flight[uid], self.scenario.group_size
        if members is not None:
            if self.redundancy.chosen(size, members, flight.failed) is None:
                return
            tokens, squares = tokens * size / len(members), squares * size / len(members)
        self.sizes[uid] = (tokens, squares)
        self.durations.append(self.host.now - flight.began)
        if not self._awaited or uid in self._awaited:
            self._missing -= 1
        newest = self.serving if self.serving != flight.version else None
        self.sealed[uid] = self.offered[uid] = Candidate(
            uid, flight.version, True, None, newest, flight.domain.name, int(tokens)
        )
        self._end([uid], playing=members is not None)

    def failed(self, uid: Uid, member: int) -> bool:
        """A member's environment failed; whether it is tried afresh."""
        flight = self.in_flight[uid]
        retries = flight.retries[member] = flight.retries.get(member, 0) + 1
        if not self.redundancy.extra_members and retries <= MEMBER_RETRIES:
            return True
        flight.failed.add(member)
        if self.redundancy.hopeless(flight.failed):
            self.give_up([uid], Reason.ENVIRONMENT_ERROR)
        return False

    def give_up(self, uids: list[Uid], reason: Reason) -> None:
        """End groups and seal their tombstones."""
        assert self.log.head is not None
        for uid in uids:
            self.sealed[uid] = self.offered[uid] = Candidate(uid, self.log.head, False, tombstone=reason.value)
        self._tombs += len(uids)
        self._missing = 0
        self._end(uids)
        self.changed = self.changed or bool(uids)

    def _end(self, uids: list[Uid], playing: bool = True) -> None:
        for uid in uids:
            del self.in_flight[uid]
        if uids:
            self.host.end(self, uids, playing)

    # -- records -----------------------------------------------------------------------------------------

    def _step_record(self, batch: list[Candidate], dropped: list[Drop], lag: float = 0.0) -> Step:
        return Step(
            **self._stamp(),
            version=self.ahead.next_version,
            base=self.ahead.head,
            state=_STATE,
            weights_sha256="",
            alpha=self.policy.alpha,
            trained=tuple(str(c.uid) for c in batch),
            dropped=tuple(dropped),
            metrics={"tokens": sum(self.sizes[c.uid][0] for c in batch), "lag": lag} if batch else {},
        )

    def _stamp(self) -> dict[str, Any]:
        return {"lsn": self.ahead.lsn + 1, "nonce": "", "writer": "", "time": 0.0}

    def _append(self, record: Record) -> None:
        self.ahead.apply(record)
        self.log.apply(record)

    def _forget(self) -> None:
        """What is settled is looked at no more; what outgrew the bound while it ran is ended."""
        floor = self.policy.floor(self.log)
        self.sealed = {u: c for u, c in self.sealed.items() if self.log.is_open(u) and c.version >= floor}
        self.sizes = {u: size for u, size in self.sizes.items() if u in self.sealed}
        self._offer()
        self._end([uid for uid in self.in_flight if not self.log.is_open(uid)])

    def _offer(self) -> None:
        self._missing = 0
        self.offered = {u: c for u, c in self.sealed.items() if self.ahead.is_open(u)}
        self._tombs = sum(c.tombstone is not None for c in self.offered.values())
