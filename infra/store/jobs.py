"""The job book of a service: an append-only list of events in the store, `services/<name>/jobs/{seq:010d}.json`.

Everybody writes to it: who submits and orders, the service, its trainers and its rollout. Creating the object, if
absent, is the event; the number that was free decides the order.

Invariants
- An event is checked against the fold of all before it, and is written only if it fits there (`rl.jobs`).
- Readers get the next key until there is none: no listing, and one request where nothing is new.

An instance belongs to one thread. Whoever may write to this prefix may order about the jobs of every tenant: it is
the operator's, and a tenant whose own credentials are confined to `<tenant>/` asks through the operator.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable

from pydantic import ValidationError

from infra.store.errors import NotFound
from infra.store.objects import ObjectStore
from rl.config.run import service_prefix
from rl.config.tenants import Job
from rl.errors import ConfigTooNew, DeadlineExceeded, LogCorrupt, LogTooNew
from rl.jobs import EVENT, Ended, Erased, Event, Jobs, Order, Ordered, Started, Submitted

APPEND_S = 60.0
"""How long an event may be overtaken by others."""


class JobBook:
    """Of one service, by its name. `jobs` is the fold of what was read."""

    def __init__(self, store: ObjectStore, service: str, clock: Callable[[], float] = time.time):
        self.jobs = Jobs()
        self.length = 0
        """Events read."""
        self._store, self._prefix, self._clock = store, f"{service_prefix(service)}jobs/", clock

    def sync(self) -> Jobs:
        """Read what is new. Raises LogCorrupt, LogTooNew, ConfigTooNew or a StoreError."""
        while (event := self._read(self.length)) is not None:
            self.jobs.apply(event)
            self.length += 1
        return self.jobs

    def submit(self, job: Job) -> None:
        """Raises JobRefused when there is one of this name; a StoreError. Whether the service can do it is for
        `Job.run` to say, before."""
        self._append(Submitted(time=self._clock(), job=job))

    def order(self, id: str, order: Order) -> None:
        """Raises JobRefused for one that the job's state does not allow, or a StoreError."""
        self._append(Ordered(time=self._clock(), id=id, order=order))

    def start(self, id: str, trainer: int) -> None:
        """The job runs, with this trainer. Raises as `order`."""
        self._append(Started(time=self._clock(), id=id, trainer=trainer))

    def end(self, id: str, failure: str | None = None) -> None:
        """The job is done, or failed for this reason. Raises as `order`: JobRefused also when somebody else ended it
        before."""
        self._append(Ended(time=self._clock(), id=id, failure=failure))

    def erase(self, id: str) -> None:
        """What a deleted job had is gone. Raises as `order`."""
        self._append(Erased(time=self._clock(), id=id))

    def _read(self, seq: int) -> Event | None:
        key = self._key(seq)
        try:
            return EVENT.validate_json(self._store.get(key))
        except NotFound:
            return None
        except ConfigTooNew as error:
            raise ConfigTooNew(f"{key}: {error}") from error
        except ValidationError as error:
            unknown = [".".join(map(str, e["loc"])) for e in error.errors() if e["type"] == "extra_forbidden"]
            if unknown:
                raise LogTooNew(f"{key}: this Rollmill does not know {', '.join(unknown)}; upgrade it") from error
            raise LogCorrupt(f"{key}: not an event of this format: {error.errors()[0]['msg']}") from error

    def _append(self, event: Event) -> None:
        end = time.monotonic() + APPEND_S
        # pydantic's own JSON has no infinity; what is written has to be read by everybody
        body = json.dumps(EVENT.dump_python(event, mode="json", by_alias=True)).encode()
        EVENT.validate_json(body)
        while True:
            self.sync().check(event)
            if self._store.create(self._key(self.length), body, uuid.uuid4().hex):
                self.jobs.apply(event)
                self.length += 1
                return
            if time.monotonic() > end:
                raise DeadlineExceeded(f"the job book could not be written in {APPEND_S:.0f} s: others keep winning")

    def _key(self, seq: int) -> str:
        return f"{self._prefix}{seq:010d}.json"
