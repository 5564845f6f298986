"""Several engines behind one interface: an Engine whose generations go where `rl.routing` says.

Invariants
- A generation runs on a healthy engine that serves what is served, or waits for one.
- An engine that dies, falls silent or fails an update is taken out at once. Its generations go on elsewhere from the
  tokens that it had told, else from the prompt; each token has the version that made it.
- An update reaches every engine or the engine leaves; if all refuse it for what it is, nothing has changed. One that
  joins is brought to what is served, and to go on, before it gets work; a policy that this fails for is brought to it
  by the first request, and costs those of its own tenant alone (`policies`).
- What waits is bounded: past `max_waiting` a request is refused, to be sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

from infra.engines import deadlines
from infra.engines.deadlines import Deadline
from infra.engines.errors import EngineClosed
from infra.engines.protocol import BASE, Capabilities, Engine, Generation, Sampling
from infra.engines.remote import LOAD_S
from infra.proxy.continuation import complete, extend, rest
from infra.proxy.members import HEALTH_S, Member, Members
from infra.proxy.policies import Policies, publish
from rl.errors import DeadlineExceeded, GenerationFailure
from rl.placement import HardwareClass
from rl.routing import Assignment, Router
from rl.waiting import Request

LEASE_S = 15.0
"""An engine that has not reported for so long is lost."""
COUNTERS = (
    "requests", "tokens_generated", "tokens_prefilled", "tokens_reused", "preempted", "swaps", "running", "waiting",
    "busy_s",
)  # fmt: skip


class Overloaded(GenerationFailure):
    """Too many requests wait for an engine; the same one may be sent again later."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose generation it is."""

    trajectory: str
    domain: str = ""
    may_split: bool = True
    """Whether prompt and answer may be computed by two engines."""
    runs_on: HardwareClass | None = None
    """Class that its run declares for the domain, before what the fleet's own says."""


class Fleet:
    """Lives on one event loop. `load_s` bounds reading a policy on an engine, `control_s` each other control call."""

    capabilities = Capabilities(
        mixed_adapters=True, continues_across_update=True, deterministic=False, prefix_cache=True
    )

    def __init__(
        self, router: Router, *, control_s: float, max_waiting: int, lease_s: float = LEASE_S, load_s: float = LOAD_S
    ):
        self.router = router
        self._control, self._load, self._max_waiting = deadlines.control(control_s), deadlines.load(load_s), max_waiting
        policies = self._policies = Policies(self._control, self._load)
        self._paused = self._closed = False
        self._assigned: dict[str, asyncio.Future[Assignment]] = {}
        self._swap = asyncio.Lock()
        self.members = Members(router, self._swap, policies.ready, policies.bring, self._dispatch, lease_s)
        self.continued = 0
        """Times that a generation went on after its engine was lost."""

    # -- generation --------------------------------------------------------------------------------------------

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        tenant: str,
        request_id: str,
        origin: Origin | None = None,
    ) -> Generation:
        """See the protocol. Raises Overloaded too. Cancelling it frees its place."""
        origin = origin or Origin(request_id)
        done = Generation([], [], "length")
        for life in count():
            tokens = [*token_ids, *done.token_ids]
            left = sampling.max_new_tokens - len(done.token_ids)
            name = f"{request_id}~{life}" if life else request_id
            trajectory, may_split, runs_on = origin.trajectory, origin.may_split, origin.runs_on
            asked = Request(name, tenant, trajectory, origin.domain, len(tokens), left, may_split, runs_on)
            found = await self._place(asked)
            sampled = 0
            try:
                part = await self._run(found, tokens, rest(sampling, len(done.token_ids)), tenant)
                sampled = len(part.token_ids)
                extend(done, part)
                self.router.finish(name, sampled)
                return done
            except EngineClosed as error:
                if self._closed:
                    raise
                self.continued += 1
                if error.partial is not None:
                    extend(done, error.partial)
                    if complete(done, sampling):
                        return done
            finally:
                self.router.release(name)
                self._dispatch()
        raise AssertionError("unreachable")

    async def _place(self, asked: Request) -> Assignment:
        if self._closed:
            raise EngineClosed("the engines were closed")
        if self.router.waiting >= self._max_waiting:
            raise Overloaded(f"{self.router.waiting} requests wait for an engine (engine.routing.max_waiting)")
        place = self._assigned[asked.id] = asyncio.get_running_loop().create_future()
        self.router.submit(asked)
        try:
            self._dispatch()
            return await place
        except BaseException:
            self.router.release(asked.id)
            self._dispatch()
            raise
        finally:
            self._assigned.pop(asked.id, None)

    def _dispatch(self) -> None:
        """Start what can run."""
        if self._paused or self._closed:
            return
        vain = True
        while vain:
            vain = False
            for found in self.router.dispatch():
                place = self._assigned.get(found.request.id)
                if place is None or place.done():  # nobody waits for it any more
                    self.router.release(found.request.id)
                    vain = True
                else:
                    place.set_result(found)

    async def _run(self, found: Assignment, tokens: list[int], sampling: Sampling, tenant: str) -> Generation:
        """Raises EngineClosed once the engine that failed was taken out."""
        name, member = found.request.id, self.members.all[found.engine]
        kv: dict[str, Any] = {}
        if found.prefill is not None:
            source = self.members.all[found.prefill]
            try:
                await self._policies.supply(source, tenant, self._swap)
                kv["kv"] = await source.engine.prefill(tokens, sampling, tenant, name)  # type: ignore[attr-defined]
            except EngineClosed as error:
                self.members.lose(source, str(error))
                raise
            except (GenerationFailure, DeadlineExceeded):
                pass  # an update came between, or others' prompts: this one is computed where the answer is
            self.router.prefilled(name)
        try:
            await self._policies.supply(member, tenant, self._swap)
            return await member.engine.generate(tokens, sampling, tenant, name, **kv)
        except EngineClosed as error:
            self.members.lose(member, str(error))
            raise

    async def abort(self, request_ids: Collection[str]) -> None:
        await self._everywhere(lambda engine: engine.abort(request_ids), "abort")

    # -- control -----------------------------------------------------------------------------------------------

    async def pause(self, mode: Literal["keep", "abort"] = "keep") -> None:
        before, self._paused = self._paused, True
        try:
            await self._everywhere(lambda engine: engine.pause(mode), "pause")
        except BaseException:
            self._paused = before
            raise

    async def resume(self) -> None:
        """Raises EngineClosed once the fleet was closed."""
        if self._closed:
            raise EngineClosed("the engines were closed")
        await self._everywhere(lambda engine: engine.resume(), "resume")
        self._paused = False
        self._dispatch()

    async def prefetch(self, tenant: str, version: int, directory: Path) -> None:
        await self._everywhere(lambda engine: engine.prefetch(tenant, version, directory), "prefetch", self._load)

    async def publish_adapter(self, tenant: str, version: int, directory: Path) -> None:
        await self._update(tenant, version, directory)

    async def withdraw_adapter(self, tenant: str) -> None:
        async with self._swap:
            self._policies.served.pop(tenant, None)  # an update that was cut off may have reached engines without it
            for member in self.members.all.values():
                member.lacks.discard(tenant)
            await self._everywhere(lambda engine: engine.withdraw_adapter(tenant), "withdraw")

    async def held(self) -> Collection[str]:
        return self._policies.served.keys() - {BASE}

    async def update_weights(self, version: int, directory: Path) -> None:
        await self._update(BASE, version, directory)

    async def _update(self, tenant: str, version: int, directory: Path) -> None:
        async with self._swap:
            if self._policies.served.get(tenant, (None, None))[0] == version:
                return
            revision = self.router.revision + 1

            def done(member: Member) -> None:
                member.lacks.discard(tenant)
                self.router.serves(member.facts.name, revision, tenant)

            await self._everywhere(lambda engine: publish(engine, tenant, version, directory), "update", done=done)
            self._policies.served[tenant] = (version, directory)
            self.router.advance(revision)
        self._dispatch()

    async def _everywhere(
        self,
        call: Callable[[Engine], Awaitable[None]],
        what: str,
        within: Deadline | None = None,
        done: Callable[[Member], None] = lambda member: None,
    ) -> None:
        """The call on every engine that serves. One that fails is lost; if all refuse for the same reason, other than
        being gone, that is raised and none is lost."""
        members = self.members.serving
        failures: dict[Member, Exception] = {}

        async def one(member: Member) -> None:
            try:
                async with (within or self._control).over(what):
                    await call(member.engine)
                done(member)
            except Exception as error:
                failures[member] = error

        await asyncio.gather(*map(one, members))
        kinds = {type(error) for error in failures.values()}
        refused = len(failures) == len(members) and len(kinds) == 1
        if members and refused and not kinds & {EngineClosed, DeadlineExceeded, TimeoutError}:
            raise next(iter(failures.values()))
        for member, error in failures.items():
            self.members.lose(member, f"{what}: {type(error).__name__}: {error}")

    # -- the rest ----------------------------------------------------------------------------------------------

    def versions(self) -> dict[str, int]:
        return self._policies.versions()

    async def health(self) -> bool:
        """False once closed; a fleet without an engine waits for one."""
        return not self._closed

    async def stats(self) -> dict[str, Any]:
        """Sums over the engines that serve, how many those are (`ready`), and each engine's own (`engines`), those that
        are expected and away included."""
        engines = await asyncio.gather(*map(_stats, list(self.members.all.values())))
        sums = {name: sum(engine.get(name, 0) for engine in engines) for name in COUNTERS}
        return sums | {
            "queued": self.router.waiting,
            "continued": self.continued,
            "engines_lost": self.members.lost,
            "paused": self._paused,
            "ready": len(self.members.serving),
            "engines": engines + self.members.away(),
        }

    async def close(self) -> None:
        """Let go of every engine; what waits or runs gets EngineClosed. Idempotent."""
        self._closed = True
        for place in self._assigned.values():
            if not place.done():
                place.set_exception(EngineClosed("the engines were closed"))
        await self.members.close()


async def _stats(member: Member) -> dict[str, Any]:
    own: dict[str, Any] = {}
    if member.state == "serving":
        with suppress(Exception):  # whoever needs it will lose it
            async with asyncio.timeout(HEALTH_S):
                own = await member.engine.stats()
    return member.summary() | own
