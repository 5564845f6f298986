"""The jobs of a service: their events, and the state that these add up to.

    submit -> waiting -- started --> running -- ended --> done | failed
                 ^  \\-- pause --> paused <-- pause --/         |
                 \\------ resume ----/  \\------ resume ---------/ (failed)
    anything of these -- cancel --> cancelled;  done | failed | cancelled -- delete --> deleting -- erased --> deleted

Invariants
- The state is a fold of the events in their order; an event that its job's state does not allow is refused before it
  is written, so that what is written always folds.
- An id is used once: not even a deleted job gives its name away, for its log stays in the store.
- A job has one trainer while it runs.
- Pure: `time` is told by whoever writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from rl.config import upgrades
from rl.config.tenants import Job
from rl.errors import RollmillError
from rl.fairness import TenantShare


class JobRefused(RollmillError):
    """An event that the job's state does not allow, or a job that there is not."""


class State(StrEnum):
    WAITING = "waiting"
    """For a place, see `ServiceConfig.running`."""
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    DELETING = "deleting"
    DELETED = "deleted"


LIVE = frozenset({State.WAITING, State.RUNNING, State.PAUSED})
OVER = frozenset({State.DONE, State.CANCELLED, State.FAILED})

Order = Literal["pause", "resume", "cancel", "delete"]
ORDERS: dict[Order, tuple[frozenset[State], State]] = {
    "pause": (frozenset({State.WAITING, State.RUNNING}), State.PAUSED),
    "resume": (frozenset({State.PAUSED, State.FAILED}), State.WAITING),
    "cancel": (LIVE, State.CANCELLED),
    "delete": (OVER, State.DELETING),
}
"""From which states an order is taken, and where it leads."""


class _Event(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    time: float
    """Seconds since the epoch, by the clock of the writer."""


class Submitted(_Event):
    kind: Literal["submitted"] = "submitted"
    format: int = Field(default_factory=lambda: upgrades.FORMAT)
    """Of the job's fields (`rl.config.upgrades`)."""
    job: Job

    @model_validator(mode="before")
    @classmethod
    def _of_this_release(cls, tree: Any) -> Any:
        """Raises ConfigTooNew."""
        if not isinstance(tree, dict) or not isinstance(tree.get("job"), dict):
            return tree
        fields = {name: value for name, value in tree.items() if name != upgrades.FIELD}
        written = tree.get(upgrades.FIELD, 1)
        return fields | {"job": upgrades.upgraded(tree["job"] | {upgrades.FIELD: written}, "a submitted job")}


class Ordered(_Event):
    """A tenant or an operator asks."""

    kind: Literal["ordered"] = "ordered"
    id: str
    order: Order


class Started(_Event):
    """The service gave it a place. Again while it runs: another trainer goes on with it."""

    kind: Literal["started"] = "started"
    id: str
    trainer: Annotated[int, Field(ge=0)]
    """Number of the trainer that trains it, from 0."""


class Ended(_Event):
    kind: Literal["ended"] = "ended"
    id: str
    failure: str | None = None
    """Why it failed; None for one that is done."""


class Erased(_Event):
    """What a deleted job left in the store is gone."""

    kind: Literal["erased"] = "erased"
    id: str


Event = Annotated[Submitted | Ordered | Started | Ended | Erased, Field(discriminator="kind")]
EVENT: TypeAdapter[Event] = TypeAdapter(Event)


@dataclass(slots=True)
class Entry:
    """One job as it stands."""

    job: Job
    number: int
    """In the order of submission, from 0."""
    submitted: float
    state: State = State.WAITING
    trainer: int | None = None
    """Whose it is while it runs, and was before."""
    started: float | None = None
    """When it first got a place."""
    ended: float | None = None
    failure: str | None = None


@dataclass
class Jobs:
    """The fold of all events of one service."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def entry(self, id: str) -> Entry:
        """Raises JobRefused when there is none."""
        if (found := self.entries.get(id)) is None:
            known = ", ".join(sorted(self.entries)) or "none"
            raise JobRefused(f"there is no job {id!r}; there are: {known}")
        return found

    def of(self, *states: State) -> list[Entry]:
        """Those in one of these states, in the order of submission."""
        return [entry for entry in self.entries.values() if entry.state in states]

    @property
    def running(self) -> list[Entry]:
        return self.of(State.RUNNING)

    def check(self, event: Event) -> None:
        """Raise JobRefused when `apply` would."""
        if isinstance(event, Submitted):
            if event.job.id in self.entries:
                state = self.entries[event.job.id].state
                raise JobRefused(f"job {event.job.id!r} exists already ({state}); choose another name")
            return
        entry = self.entry(event.id)
        allowed, _ = _move(event)
        if entry.state not in allowed:
            what = event.order if isinstance(event, Ordered) else event.kind
            raise JobRefused(
                f"job {event.id!r} is {entry.state}: {what} is for one that is {' or '.join(sorted(allowed))}"
            )

    def apply(self, event: Event) -> None:
        """Raises JobRefused, and changes nothing then."""
        self.check(event)
        if isinstance(event, Submitted):
            self.entries[event.job.id] = Entry(event.job, len(self.entries), event.time)
            return
        entry = self.entries[event.id]
        _, entry.state = _move(event)
        if isinstance(event, Started):
            entry.trainer = event.trainer
            entry.started = entry.started if entry.started is not None else event.time
        if isinstance(event, Ended):
            entry.failure = event.failure
        if entry.state in OVER:
            entry.ended = event.time
        elif entry.state in LIVE:
            entry.ended = entry.failure = None


def _move(event: Ordered | Started | Ended | Erased) -> tuple[frozenset[State], State]:
    match event:
        case Ordered():
            return ORDERS[event.order]
        case Started():
            return frozenset({State.WAITING, State.RUNNING}), State.RUNNING
        case Ended():
            return LIVE, State.DONE if event.failure is None else State.FAILED
        case Erased():
            return frozenset({State.DELETING}), State.DELETED


def next_starts(jobs: Jobs, trainers: frozenset[int], most: int) -> list[tuple[str, int]]:
    """Which jobs get a place now, and with which trainer: those without a place by priority, then by arrival, each
    with the trainer that has the fewest jobs; and those whose trainer is gone."""
    if not trainers:
        return []
    load = dict.fromkeys(sorted(trainers), 0)
    lost = []
    for entry in jobs.running:
        if entry.trainer in load:
            load[entry.trainer] += 1
        else:
            lost.append(entry)
    waiting = sorted(jobs.of(State.WAITING), key=lambda e: (-e.job.priority, e.number))
    places = max(0, most - len(jobs.running))
    found = []
    for entry in [*lost, *waiting[:places]]:
        trainer = min(load, key=lambda t: (load[t], t))
        load[trainer] += 1
        found.append((entry.job.id, trainer))
    return found


def shares(entries: Iterable[Entry]) -> dict[str, TenantShare]:
    """What each of these jobs, which run side by side, is entitled to. A tenant with several of them has no more than
    with one: they divide its weight."""
    entries = list(entries)
    jobs = Counter(entry.job.tenant for entry in entries)
    return {e.job.id: replace(e.job.share, weight=e.job.weight / jobs[e.job.tenant]) for e in entries}
