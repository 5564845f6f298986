"""Clients of the LLM proxy: asynchronous for trajectories, synchronous for control. Without torch.

Invariants
- Every call ends by its deadline, with a result or a named error.
- A proxy that is away or says 503 or 429 is tried again by `ProxyClient` until the deadline (a generation that was cut
  off starts afresh: nothing of it was recorded). `ControlClient` tries once: its callers own the retry.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Sequence
from functools import cache
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary

import aiohttp
import httpx
import orjson

from infra.engines.protocol import Generation, Sampling
from infra.proxy.session_wire import RECORD, Opened, SessionBody, SessionRecord
from infra.proxy.wire import ServiceStatus, Status, TenantStatus
from rl.errors import DeadlineExceeded, Fenced, GenerationFailure, RollmillError, StaleTrajectory

BACKOFF_S = (0.05, 2.0)
"""First and longest pause between two tries; each is shortened by a random share."""
ABORT_S = 10.0
JSON = {"Content-Type": "application/json"}
"""The proxy takes nothing else."""


class ProxyUnavailable(GenerationFailure):
    """The proxy could not be reached, or said that it can not serve now, or not more."""


class GenerationTimeout(GenerationFailure, DeadlineExceeded):
    """One generation did not end before its deadline."""


class TrajectoryCancelled(GenerationFailure):
    """The trajectory was cancelled while it generated, or before."""


class RequestRefused(GenerationFailure):
    """The proxy refuses this request as it is; a retry would not help."""


class ControlRefused(RollmillError):
    """The proxy refuses a control call: a version that the log does not name, weights that do not fit."""


class NotServed(ControlRefused):
    """A job of a service that the proxy does not serve: paused, over, or not known to run yet."""


class ProxyClient:
    """Generation for trajectories, from any number of event loops (one HTTP session each). `key` is that of the role
    `rollout`, where the proxy asks for one."""

    def __init__(self, url: str, key: str | None = None):
        self.url = url.rstrip("/")
        self._headers = JSON | _authorization(key)
        self._sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = WeakKeyDictionary()

    async def generate(
        self,
        *,
        trajectory: str,
        request: str,
        tenant: str,
        token_ids: Sequence[int],
        sampling: Sampling,
        start_version: int,
        deadline_s: float,
        evaluation: bool = False,
        domain: str = "",
    ) -> Generation:
        """One turn. Raises StaleTrajectory, TrajectoryCancelled, RequestRefused, ProxyUnavailable (it stayed away
        until the deadline) or GenerationTimeout: all of them are StageFailures."""
        body = {
            "trajectory": trajectory,
            "request": request,
            "tenant": tenant,
            "domain": domain,
            "token_ids": list(token_ids),
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "seed": sampling.seed,
            "start_version": start_version,
            "evaluation": evaluation,
        }
        status, answer = await self._post("/generate", body, deadline_s, f"request {request}")
        if status == 200:
            spans = [(start, version) for start, version in answer["version_spans"]]
            return Generation(answer["token_ids"], answer["logprobs"], answer["finish_reason"], spans)
        detail = answer["detail"]
        if status == 409:
            raise (StaleTrajectory if answer["error"] == "stale" else TrajectoryCancelled)(detail)
        raise RequestRefused(f"request {request}: {answer['error']}: {detail}")

    async def open_session(self, body: SessionBody, deadline_s: float) -> Opened:
        """A session for an agent. Raises as `generate`."""
        what = f"session of {body.trajectory}"
        status, answer = await self._call("POST", "/sessions", body.model_dump(), deadline_s, what)
        if status != 200:
            raise RequestRefused(f"{what}: {answer['error']}: {answer['detail']}")
        return Opened(answer["session"], f"{self.url}/v1", answer["token"], answer["model"])

    async def close_session(self, opened: Opened, deadline_s: float) -> SessionRecord:
        """What the session recorded; it is gone. Raises as `generate`: RequestRefused also when the proxy was started
        anew meanwhile, or an earlier try of this call got through."""
        what = f"end of session {opened.session}"
        status, answer = await self._call("DELETE", f"/sessions/{opened.session}", None, deadline_s, what)
        if status != 200:
            raise RequestRefused(f"{what}: {answer['error']}: {answer['detail']}")
        return RECORD.validate_python(answer)

    async def abort(self, trajectory: str, deadline_s: float = ABORT_S) -> None:
        """End what the trajectory generates and refuse its next turn. Raises as `generate`."""
        path = f"/trajectories/{quote(trajectory, safe='')}/abort"
        status, answer = await self._post(path, {}, deadline_s, f"abort of {trajectory}")
        if status != 200:
            raise RequestRefused(f"abort of {trajectory}: {answer['error']}: {answer['detail']}")

    async def close(self) -> None:
        """Close this event loop's session."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    async def _post(self, path: str, body: Any, deadline_s: float, what: str) -> tuple[int, dict[str, Any]]:
        return await self._call("POST", path, body, deadline_s, what)

    async def _call(
        self, method: str, path: str, body: Any, deadline_s: float, what: str
    ) -> tuple[int, dict[str, Any]]:
        """Status and answer of the first try that is neither a lost connection nor a 429 or 503."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        content = orjson.dumps(body) if body is not None else None
        pause, longest = BACKOFF_S
        trouble: str | None = None
        while (left := end - loop.time()) > 0:
            try:
                timeout = aiohttp.ClientTimeout(total=left)
                async with self._session().request(
                    method, self.url + path, data=content, headers=self._headers, timeout=timeout
                ) as reply:
                    status, raw = reply.status, await reply.read()
            except TimeoutError:
                break
            except aiohttp.ClientError as error:
                trouble = f"{type(error).__name__}: {error}"
            else:
                answer = _answer(status, raw)
                if status not in (429, 503):
                    return status, answer
                trouble = answer["detail"]
            await asyncio.sleep(min(pause * random.uniform(0.5, 1.0), max(0.0, end - loop.time())))
            pause = min(2 * pause, longest)
        if trouble is not None:
            raise ProxyUnavailable(f"{what}: {self.url} was not available for {deadline_s:g} s: {trouble}")
        raise GenerationTimeout(f"{what}: no answer from {self.url} within {deadline_s:g} s")

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            # the proxy does the queueing: no limit on connections here
            session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
            self._sessions[loop] = session
        return session


@cache
def _trusted() -> ssl.SSLContext:
    """Whose certificates are trusted: read once, for it takes longer than many calls."""
    return httpx.create_ssl_context(trust_env=False)


class ControlClient:
    """Control of the engines, under one fence. Thread-safe. Each call has `deadline_s`, `prefetch` has `load_s` where
    that is given. `key` is that of the role `control`, where the proxy asks for one."""

    def __init__(
        self,
        url: str,
        deadline_s: float,
        fence: int | None = None,
        key: str | None = None,
        load_s: float | None = None,
    ):
        self.url = url.rstrip("/")
        self._deadline_s, self._fence, self._load_s = deadline_s, fence, load_s or deadline_s
        headers = JSON | _authorization(key)
        self._http = httpx.Client(base_url=self.url, headers=headers, verify=_trusted(), trust_env=False)

    def suspend(self) -> None:
        """Hold all generation. Raises Fenced, ProxyUnavailable, DeadlineExceeded (as all below)."""
        self._control("suspend")

    def prefetch(self, version: int) -> None:
        """Read a version while generation goes on. Raises ControlRefused too."""
        self._control("prefetch", self._load_s, version=version)

    def update(self, version: int, oldest_viable: int) -> None:
        """Serve a version; trajectories that started before `oldest_viable` end. Raises ControlRefused too."""
        self._control("update", version=version, oldest_viable=oldest_viable)

    def resume(self) -> None:
        self._control("resume")

    def abort(self, trajectory: str) -> None:
        """End what a trajectory generates and refuse its next turn; needs no fence."""
        self._call("POST", f"/trajectories/{quote(trajectory, safe='')}/abort", {}, self._deadline_s)

    def status(self, deadline_s: float | None = None) -> Status:
        return Status(**self._call("GET", "/status", None, deadline_s or self._deadline_s))

    def tenants(self, deadline_s: float | None = None) -> ServiceStatus:
        """Of a service for many tenants; `key` is one of the service's own."""
        answer = self._call("GET", "/status", None, deadline_s or self._deadline_s)
        found = {name: TenantStatus(**status) for name, status in answer["tenants"].items()}
        return ServiceStatus(found, answer["engine"])

    def close(self) -> None:
        self._http.close()

    def _control(self, call: str, deadline_s: float | None = None, **body: Any) -> None:
        if self._fence is None:
            raise Fenced(f"{call}: a control call needs a fence, and this client has none")
        self._call("POST", f"/control/{call}", {"fence": self._fence, **body}, deadline_s or self._deadline_s)

    def _call(self, method: str, path: str, body: Any, deadline_s: float) -> dict[str, Any]:
        content = None if body is None else orjson.dumps(body)
        try:
            reply = self._http.request(method, path, content=content, timeout=deadline_s)
        except httpx.ConnectTimeout as error:
            raise ProxyUnavailable(f"{path}: {self.url} can not be reached: {error}") from error
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(f"{path}: no answer from {self.url} within {deadline_s:g} s") from error
        except httpx.TransportError as error:
            raise ProxyUnavailable(f"{path}: {self.url} can not be reached: {error}") from error
        answer = _answer(reply.status_code, reply.content)
        if reply.status_code == 200:
            return answer
        if reply.status_code == 403 and answer["error"] == "fenced":
            raise Fenced(answer["detail"])
        if reply.status_code == 503:
            raise ProxyUnavailable(f"{path}: {answer['detail']}")
        kind = NotServed if answer["error"] == "not_running" else ControlRefused
        raise kind(f"{path}: {answer['error']}: {answer['detail']}")


def _authorization(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _answer(status: int, raw: bytes) -> dict[str, Any]:
    """The JSON object of an answer; anything else becomes an error object."""
    try:
        answer = orjson.loads(raw)
    except orjson.JSONDecodeError:
        answer = None
    if isinstance(answer, dict) and (status == 200 or "detail" in answer):
        return answer
    return {"error": f"status {status}", "detail": raw[:200].decode(errors="replace") or "no content"}
