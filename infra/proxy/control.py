"""The state of the proxy: what is served, who may change it, what is in flight.

    serving --suspend--> suspended (new requests wait, those in flight are held) --resume | watchdog--> serving
    update: at any time; the engine swaps between two tokens, then what is too old ends

A proxy whose engine is `shared` with those of other tenants serves its own tenant alone, and suspends it alone: what is
in flight goes on, and new requests wait.

Invariants
- Fences come from the log alone. A control call with a fence below the newest one that was read there changes
  nothing, nor does one (`resume` apart) with a fence that the log, read anew, does not name.
- A suspension ends within `deadlines.control`, also when the trainer is dead (`suspension`).
- A generation of a trajectory that started before `oldest_viable` ends and a later one is refused, except in
  evaluation.
- Once a proxy of a shared engine is closed nothing of its tenant is there, nor comes there: what is being read or
  published then is waited for before it is withdrawn.
- Whatever ends a request - result, refusal, deadline, a client that went away - frees its place in the engine.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from infra.engines.protocol import Engine, Generation, Sampling
from infra.proxy.admission import Places
from infra.proxy.fleet import Fleet, Origin, Overloaded
from infra.proxy.flights import Flights
from infra.proxy.metrics import Metrics
from infra.proxy.policies import publish
from infra.proxy.refusals import Denied, Refused
from infra.proxy.suspension import Suspension
from infra.proxy.versions import LogView, VersionSource
from infra.proxy.wire import GenerateBody, Status
from rl.config.run import RunConfig
from rl.errors import Fenced, RollmillError


class UnknownFence(RollmillError):
    """A fence that is in nobody's hands: the commit log does not name it."""


@dataclass
class Proxy:
    """One engine, or a fleet of them, and its clients. Lives on one event loop."""

    config: RunConfig
    engine: Engine
    source: VersionSource
    shared: bool = False
    metrics: Metrics = field(default_factory=Metrics)
    serving: int | None = None
    prefetched: int | None = None
    head: int | None = None
    fence: int = 0
    oldest_viable: int = 0

    def __post_init__(self) -> None:
        self.tenant = self.config.served_as
        self.places = Places.of(self.config, self.tenant)
        self._serial = 0
        self._flights = Flights()
        engine = None if self.shared else self.engine
        self._suspension = Suspension(engine, self.config.deadlines.control, self.metrics)
        self._swap = asyncio.Lock()
        self._reading = asyncio.Lock()
        """Held while a version is prefetched, for which an update must not wait."""
        self._closed = False

    # -- generation --------------------------------------------------------------------------------------------

    async def generate(self, body: GenerateBody) -> Generation:
        """One turn. Raises Refused, Denied, and the engine's named errors. Cancelling it frees its place."""
        with self.metrics.generation(body.tenant, body.domain) as count:
            generation = await self._generate(body)
            count(len(generation.token_ids))
            return generation

    async def _generate(self, body: GenerateBody) -> Generation:
        self.check_tenant(body.tenant)
        self._flights.admit(body)
        if (refusal := self._stale(body)) is not None:
            raise refusal
        with self._flights.flying(body):
            try:
                async with asyncio.timeout(self.config.deadlines.generate):
                    return await self._run(body)
            except TimeoutError:
                seconds = self.config.deadlines.generate
                raise Refused("unavailable", f"no result within deadlines.generate ({seconds:g} s)") from None

    def check_tenant(self, tenant: str) -> None:
        """Raise Denied (403) for another tenant of a shared engine."""
        if self.shared and tenant != self.tenant:
            raise Denied("forbidden", 403, f"tenant: the key is that of {self.tenant!r}, not of {tenant!r}")

    async def _run(self, body: GenerateBody) -> Generation:
        async with self.places.place(body.tenant, body.domain):
            return await self._sample(body)

    async def _sample(self, body: GenerateBody) -> Generation:
        await self._suspension.over()
        if self.serving is None:
            raise Refused("unavailable", "no version is loaded yet")
        sampling = Sampling(body.temperature, body.max_new_tokens, tuple(body.stop_token_ids), body.seed)
        self._serial += 1
        whose = f"{self.tenant}/" if self.shared else ""
        name = f"{whose}{body.request}#{self._serial}"
        if not isinstance(self.engine, Fleet):
            return await self.engine.generate(body.token_ids, sampling, body.tenant, name)
        declared = self.config.generation.by_domain.get(body.domain)
        origin = Origin(whose + body.trajectory, body.domain, body.may_split, declared)
        try:
            return await self.engine.generate(body.token_ids, sampling, body.tenant, name, origin)
        except Overloaded as error:
            raise Refused("unavailable", str(error)) from error

    def _stale(self, body: GenerateBody) -> Refused | None:
        if body.start_version >= self.oldest_viable or body.evaluation:
            return None
        began = f"trajectory {body.trajectory} started under version {body.start_version}"
        return Refused("stale", f"{began}; {self.oldest_viable} is the oldest that can be trained")

    def abort(self, trajectory: str) -> int:
        """End what the trajectory has in flight and refuse its next turn; how many were in flight."""
        return self._flights.cancel(trajectory)

    # -- control -----------------------------------------------------------------------------------------------

    async def suspend(self, fence: int) -> None:
        """Hold all generation. Idempotent; each call gives the watchdog a new deadline. Raises Fenced,
        UnknownFence, StoreError, and what the engine raises; then what was suspended still is, within its deadline."""
        await self._guard(fence)
        await self._suspension.begin()

    async def resume(self, fence: int) -> None:
        """Go on. Idempotent; does not need the log, so that a store that is down can not prolong a suspension.
        Raises Fenced."""
        self._compare(fence)
        await self._suspension.end()

    async def prefetch(self, fence: int, version: int) -> None:
        """Read a version while generation goes on. Raises as `suspend`, and UnknownVersion, WeightMismatch."""
        async with self._reading:
            view = await self._guard(fence)
            await self._read(view, version)
            self.prefetched = version

    async def update(self, fence: int, version: int, oldest_viable: int) -> None:
        """Serve a version from now on. Raises as `prefetch`; then what was served still is."""
        async with self._swap:
            view = await self._guard(fence)
            await self._serve(view, version, oldest_viable, fence)

    async def load_head(self) -> bool:
        """Serve the newest version of the log, unless a version is served; whether one is."""
        async with self._swap:
            if self.serving is None:
                view = await self._look()
                if view.head is not None:
                    await self._serve(view, view.head, view.floor)
            return self.serving is not None

    async def _serve(self, view: LogView, version: int, oldest_viable: int, fence: int | None = None) -> None:
        with self.metrics.swap.time():
            directory = await self._read(view, version)
            if fence is not None:
                self._compare(fence)  # somebody may have taken over while the files were read
            self._check_open()
            await publish(self.engine, self.tenant, version, directory)
        self.serving, self.oldest_viable, self.prefetched = version, oldest_viable, None
        self.metrics.serving.set(version)
        self._flights.end(self._stale)

    async def _read(self, view: LogView, version: int) -> Path:
        """Have the engine read a version; where its files are."""
        directory = await self.source.directory(view, version)
        self._check_open()
        await self.engine.prefetch(self.tenant, version, directory)
        return directory

    def _check_open(self) -> None:
        """Raise Refused once it is closed."""
        if self._closed:
            raise Refused("unavailable", f"{self.tenant or self.config.name} is served no more")

    async def _guard(self, fence: int) -> LogView:
        """The log as it is now. Raises Fenced or UnknownFence unless this is its newest fence, StoreError."""
        self._compare(fence)
        view = await self._look()
        self._compare(fence)
        if fence > self.fence:
            raise UnknownFence(f"fence {fence} is not in the commit log (its newest is {self.fence})")
        return view

    def _compare(self, fence: int) -> None:
        if fence < self.fence:
            raise Fenced(f"fence {fence} is older than {self.fence}: another trainer took over")

    async def _look(self) -> LogView:
        self._check_open()
        view = await self.source.look()
        self.head, self.fence = view.head, max(self.fence, view.fence)
        return view

    # -- the rest ----------------------------------------------------------------------------------------------

    @property
    def suspended(self) -> bool:
        return self._suspension.holds

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    async def status(self) -> Status:
        return Status(
            serving=self.serving,
            head=self.head,
            fence=self.fence,
            suspended=self.suspended,
            oldest_viable=self.oldest_viable,
            prefetched=self.prefetched,
            in_flight=self.in_flight,
            engine=await self.engine.stats(),
        )

    async def close(self) -> None:
        """Close the engine, or leave a shared one; requests in flight are refused as unavailable. What is being read is
        waited for within `deadlines.control`."""
        self._closed = True
        self._suspension.close()
        if not self.shared:
            self.source.close()
            await self.engine.close()
            return
        self._flights.end(lambda _: Refused("unavailable", f"{self.tenant} is served no more"))
        with suppress(TimeoutError):  # then it is not published any more, only read
            async with asyncio.timeout(self.config.deadlines.control), self._swap, self._reading:
                pass
        self.source.close()
        await self.engine.withdraw_adapter(self.tenant)
