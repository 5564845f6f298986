"""Runs as the jobs of a service: who has a place, who may start how much, whose batch is trained.

The policies are those of a service: `rl.jobs` (places, shares), `rl.fairness` (admission, the queue of batches),
`rl.rounds`, `rl.concurrency`. What the flow of a service reads of its jobs is read of the runs here.

Invariants: a run begins once it has a place, and gives it away with its last step; nobody starts more than its quota.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl.concurrency import Concurrency, Load
from rl.config.tenants import Job, QueueSection
from rl.fairness import Demand, PassedOver, TenantQueue, TenantShare, allot
from rl.jobs import Ended, Jobs, Started, Submitted, next_starts, shares
from rl.rounds import Rounds
from rl.trajectory import Uid
from sim.config import Scenario, TenantSection

if TYPE_CHECKING:
    from sim.run import Run

TRAINERS = frozenset({0})


class Service:
    """Of one cluster. A run is its number, or the job of this number."""

    def __init__(self, scenario: Scenario, slots: int):
        """`slots`: sequences that all engines decode together."""
        self._scenario = scenario
        self._sections = [section(scenario, number) for number in range(scenario.tenants)]
        self._jobs = Jobs()
        self._most = scenario.running or scenario.tenants
        self._concurrency: Concurrency | None = None
        if scenario.adaptive and scenario.max_concurrent is not None:
            self._concurrency = Concurrency(slots, scenario.members, scenario.max_concurrent)
        self._rounds = Rounds() if scenario.schedule == "rounds" else None
        own = QueueSection()
        self._shares: dict[str, TenantShare] = {}
        self.queue = TenantQueue({}, own.slack, own.patience)
        """Completed batches."""
        self._passed_over = PassedOver(own.patience)
        self._wanted: dict[int, int] = {}
        """Groups that each run would start, and has environments for, but is not entitled to yet."""
        self._lacking: dict[int, int] = {}
        """Groups that each run would start, and may not yet, for whatever reason."""
        self._environments = {d.name: d.environments for d in scenario.domains if d.environments is not None}
        self._lines: dict[str, list[int]] = {name: [] for name in self._environments}
        """By domain: runs that lack environments, in the order in which they asked."""

    # -- places ------------------------------------------------------------------------------------------

    def submit(self, number: int, now: float) -> None:
        one = self._sections[number]
        job = Job(
            tenant=f"t{number}", name="job", domains=("any",), priority=one.priority, weight=one.weight, quota=one.quota
        )
        self._jobs.apply(Submitted(time=now, job=job))

    def places(self, runs: Sequence[Run], now: float) -> list[int]:
        """Take the places of runs that are over, and give them away: which runs begin now."""
        over = [e for e in self._jobs.running if runs[number_of(e.job.id)].over]
        for entry in over:
            self._jobs.apply(Ended(time=now, id=entry.job.id))
        begun = next_starts(self._jobs, TRAINERS, self._most)
        for id, trainer in begun:
            self._jobs.apply(Started(time=now, id=id, trainer=trainer))
        if over or begun:
            self._shares = shares(self._jobs.running)
            self.queue.entitle(self._shares)
        return [number_of(id) for id, _ in begun]

    def begins(self, number: int) -> float:
        """Seconds from its place to its first version being served."""
        return self._sections[number].begins

    # -- who may start -----------------------------------------------------------------------------------

    def look(self, load: Load) -> bool:
        """At the engines, where the limit follows them; whether more may run than before."""
        return self._concurrency is not None and self._concurrency.limit < self._concurrency.look(load)

    @property
    def _limit(self) -> int | None:
        """Trajectories that may run at once; None is what alpha allows."""
        return self._scenario.max_concurrent if self._concurrency is None else self._concurrency.limit

    def grant(self, run: Run, uids: list[Uid], runs: Sequence[Run]) -> list[Uid]:
        """Which of the groups that its bound allows the run may start now."""
        fitting = self._with_environments(run, uids, runs) if self._environments else uids
        count = self._granted(run, len(fitting), runs)
        self._lacking[run.number] = len(uids) - count
        return fitting[:count]

    def waiting(self, runs: Sequence[Run]) -> list[Run]:
        """Those that would start more, and may be allowed to now that something ended."""
        return [run for run in runs if self._lacking.get(run.number)]

    def _with_environments(self, run: Run, uids: list[Uid], runs: Sequence[Run]) -> list[Uid]:
        """Those for whose groups their domain has environments. Runs that lack some stand in line: each gets one group
        before those behind it get any."""
        busy = Counter(flight.domain.name for one in runs for flight in one.in_flight.values())
        free = {name: most // run.scenario.members - busy[name] for name, most in self._environments.items()}
        for name, line in self._lines.items():
            ahead = line[: line.index(run.number)] if run.number in line else line
            free[name] -= sum(not self._wanted.get(number) for number in ahead)
        found, served, lacked = [], set(), set()
        for uid in uids:
            domain = run.stream.domain(uid.ordinal)
            if domain not in free:
                found.append(uid)
            elif free[domain] > 0:
                free[domain] -= 1
                found.append(uid)
                served.add(domain)
            else:
                lacked.add(domain)
        for name, line in self._lines.items():
            if run.number in line and (name in served or name not in lacked):
                line.remove(run.number)
            if name in lacked and run.number not in line:
                line.append(run.number)
        return found

    def _granted(self, run: Run, wanted: int, runs: Sequence[Run]) -> int:
        """How many of so many, by what the tenants are entitled to."""
        self._wanted[run.number] = wanted
        if self._rounds is not None:
            if self._rounds.look(self._served(runs)):
                for one in runs:  # those that were told to wait may start, too
                    one.changed = one.changed or bool(self._wanted.get(one.number))
            if not self._rounds.may(job_id(run.number), run.serving):
                return 0
        most, members = self._limit, run.scenario.members
        if most is None:
            quota = self._sections[run.number].quota
            granted = wanted if quota is None else max(0, min(wanted, quota // members - len(run.in_flight)))
        else:
            granted = self._allotted(run, most, runs)
        self._wanted[run.number] -= granted
        return granted

    def _served(self, runs: Sequence[Run]) -> dict[str, int | None]:
        """The version of every job that has a place and is not over; None before its first one is served, for which
        the others' round waits, as in a service."""
        placed = ((entry.job.id, runs[number_of(entry.job.id)]) for entry in self._jobs.running)
        return {id: run.serving if run.begun else None for id, run in placed if not run.over}

    def _allotted(self, run: Run, most: int, runs: Sequence[Run]) -> int:
        """As the rollout of a service asks for it."""
        members = run.scenario.members
        playing = [one for one in runs if one.begun and not one.over]
        free = most - members * sum(len(one.in_flight) for one in runs)
        demands = {
            job_id(one.number): Demand(wanted * members, len(one.in_flight) * members, members)
            for one in playing
            if (wanted := self._wanted.get(one.number, 0))
            and (self._rounds is None or self._rounds.may(job_id(one.number), one.serving))
        }
        complete = sum(
            one.serving is not None and not one.in_flight and not self._wanted.get(one.number) for one in playing
        )
        found = allot(max(0, free), demands, self._shares, complete, self._passed_over)
        groups = found.get(job_id(run.number), 0) // members
        self._passed_over.note({job_id(run.number): groups}, demands)
        return groups


def section(scenario: Scenario, number: int) -> TenantSection:
    """What the tenant of this number has of its own."""
    return scenario.shares[number % len(scenario.shares)] if scenario.shares else TenantSection()


def job_id(number: int) -> str:
    """Of the run of this number."""
    return f"t{number}/job"


def number_of(id: str) -> int:
    """Of the run with this job."""
    return int(id.partition("/")[0][1:])
