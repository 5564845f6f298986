"""Sessions: an agent's generations for one trajectory, recorded token by token.

    open --turns--> ... --(stale | cancelled | replaced)--> ended: refused by that name --close | deadline--> gone

Invariants
- What is sent to the engine is what was recorded on the branch that the history continues, and the new items behind
  it; see `rl.sessions`. A turn is recorded when its result is there, or not at all.
- Every turn of a session is sampled under its temperature and within its limits.
- Tokens of sessions are kept as digests only. A session is gone after its deadline, whoever forgot it; of one that
  was closed nothing stays in memory.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from time import time

from infra.chat import ChatCodec
from infra.engines.protocol import Generation
from infra.proxy.admission import BUSY
from infra.proxy.auth import digest
from infra.proxy.control import Proxy
from infra.proxy.refusals import Denied, Refused
from infra.proxy.session_wire import SessionBody, SessionRecord
from infra.proxy.stops import cut
from infra.proxy.wire import GenerateBody
from rl.errors import GenerationFailure
from rl.recorder import versions_of
from rl.sessions import History, Recording, Turn, drifts
from rl.stream import derive_seed
from rl.trajectory import Message

OVER = 410
"""Status of a session that is over: clients of OpenAI's API do not try this one again by themselves."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of an agent, whatever its form."""

    history: History
    tools: Hashable
    encode: Callable[[int], list[int]]
    """Tokens of the history's items behind the first n."""
    said: Callable[[int], list[Message]]
    """The same, readable."""
    answered: Callable[[str, str, list[int]], History]
    """The history with the answer, as the agent will know it: from what it is told, all that was said, its tokens."""
    closes: bool
    """Whether the items behind a turn of the model can only follow when it is closed."""
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Heard:
    """The result of a turn."""

    turn: Turn
    text: str
    """What the agent is told: without a stop text, and what came behind it."""
    prompt_tokens: int


@dataclass(slots=True, eq=False)
class Session:
    """One trajectory's agent."""

    name: str
    body: SessionBody
    recording: Recording = field(default_factory=Recording)
    started: int = 0
    """Turns that were recorded or are being sampled."""
    requests: int = 0
    ended: str | None = None
    limit: str | None = None
    trouble: str | None = None
    flights: set[asyncio.Future[Generation]] = field(default_factory=set)
    deadline: asyncio.TimerHandle | None = None
    """It holds the session, so it is cancelled when that is gone."""

    def record(self) -> SessionRecord:
        turns = self.recording.turns
        body = self.body
        return SessionRecord(
            self.name,
            body.trajectory,
            body.start_version,
            self.ended,
            self.limit,
            self.trouble,
            turns,
            drifts(turns),
        )

    def over(self) -> Denied:
        reason = self.ended or "closed"
        return Denied(reason, OVER, f"trajectory {self.body.trajectory} is over: {reason}")

    def deny(self, limit: str, value: int) -> Denied:
        self.limit = self.limit or limit
        return Denied(limit, 400, f"trajectory {self.body.trajectory}: {limit} of this session is {value}, and reached")


class Sessions:
    """All sessions of one proxy. Lives on its event loop. `codec` is made when the first session is opened."""

    def __init__(self, proxy: Proxy, codec: Callable[[], ChatCodec]):
        self.proxy, self._make_codec = proxy, codec
        self._codec: ChatCodec | None = None
        self._by_token: dict[bytes, Session] = {}
        self._by_name: dict[str, tuple[bytes, Session]] = {}
        self._by_trajectory: dict[str, Session] = {}

    @property
    def codec(self) -> ChatCodec:
        assert self._codec is not None, "a session was opened before"
        return self._codec

    async def open(self, body: SessionBody) -> tuple[str, Session]:
        """A new session and its token. Raises ConfigError when the model has no chat template to speak
        of, Denied (403) for another tenant."""
        self.proxy.check_tenant(body.tenant)
        if self._codec is None:
            self._codec = await asyncio.to_thread(self._make_codec)
        if (former := self._by_trajectory.get(body.trajectory)) is not None:
            self._end(former, "replaced")
        token = secrets.token_urlsafe(32)
        session = Session(secrets.token_hex(8), body)
        key = digest(token)
        self._by_token[key] = self._by_trajectory[body.trajectory] = session
        self._by_name[session.name] = key, session
        self.proxy.metrics.sessions.inc()
        session.deadline = asyncio.get_running_loop().call_later(body.deadline_s, self._forget, session)
        return token, session

    def of_token(self, token: str) -> Session | None:
        return self._by_token.get(digest(token))

    def of_name(self, name: str) -> Session | None:
        found = self._by_name.get(name)
        return found[1] if found is not None else None

    def close(self, session: Session) -> SessionRecord:
        """What was recorded; the session is gone, and so is what it was sampling."""
        record = session.record()
        self._forget(session)
        return record

    def cancel(self, trajectory: str) -> None:
        """Serve this trajectory's session no more; its generations in flight are the proxy's to end."""
        if (session := self._by_trajectory.get(trajectory)) is not None:
            session.ended = session.ended or "cancelled"

    def _end(self, session: Session, reason: str) -> None:
        session.ended = session.ended or reason
        for flight in session.flights:
            flight.cancel()

    def _forget(self, session: Session) -> None:
        found = self._by_name.pop(session.name, None)
        if found is None:
            return
        if session.deadline is not None:
            session.deadline.cancel()
        del self._by_token[found[0]]
        self.proxy.metrics.sessions.dec()
        if self._by_trajectory.get(session.body.trajectory) is session:
            del self._by_trajectory[session.body.trajectory]
            self._end(session, "closed")

    async def sample(self, session: Session, ask: Ask) -> Heard:
        """One turn. Raises Denied (410: over; 400: a limit), Refused(unavailable), UnfitConversation, and the engine's
        errors."""
        body = session.body
        if session.ended is not None:
            raise session.over()
        if session.started >= body.max_turns:
            raise session.deny("max_turns", body.max_turns)
        session.started += 1
        try:
            heard = await self._sample(session, ask)
        except BaseException as error:
            session.started -= 1
            busy = isinstance(error, Denied) and error.status == BUSY
            if busy or isinstance(error, Refused | GenerationFailure):
                session.trouble = str(error)
            raise
        session.trouble = None
        return heard

    async def _sample(self, session: Session, ask: Ask) -> Heard:
        body, recording, codec = session.body, session.recording, self.codec
        place = recording.locate(ask.tools, ask.history)
        known = recording.tokens(place)
        added = ask.encode(place.known)
        if ask.closes and known and known[-1] not in codec.stop_token_ids:
            added = [codec.end, *added]
        room = body.max_tokens - len(known) - len(added)
        if room < 1:
            raise session.deny("max_tokens", body.max_tokens)
        start = time()
        wanted = min(body.max_new_tokens, ask.max_new_tokens or body.max_new_tokens)
        generation = await self._generate(session, [*known, *added], min(room, wanted), ask.seed)
        kept, told = cut(codec, generation, ask.stop)
        text = codec.decode(kept.token_ids)
        turn = recording.add(
            place,
            ask.tools,
            ask.history,
            ask.answered(told, text, kept.token_ids),
            prompt=added,
            token_ids=kept.token_ids,
            logprobs=kept.logprobs,
            versions=versions_of(kept.version_spans, len(kept.token_ids)),
            said=ask.said(place.known),
            text=text,
            finish_reason=kept.finish_reason,
            start=start,
            end=time(),
        )
        if turn.drift is not None:
            self.proxy.metrics.drift.labels(turn.drift.value, body.tenant, body.domain).inc()
        return Heard(turn, told, len(known) + len(added))

    async def _generate(self, session: Session, tokens: list[int], room: int, seed: int | None) -> Generation:
        body, number = session.body, session.requests
        session.requests += 1
        if body.seed is not None:
            seed = derive_seed(body.seed, number)
        flight = asyncio.ensure_future(
            self.proxy.generate(
                GenerateBody(
                    trajectory=body.trajectory,
                    request=f"{session.name}-{number}",
                    tenant=body.tenant,
                    domain=body.domain,
                    token_ids=tokens,
                    temperature=body.temperature,
                    max_new_tokens=room,
                    stop_token_ids=list(self.codec.stop_token_ids),
                    seed=seed,
                    start_version=body.start_version,
                    evaluation=body.evaluation,
                )
            )
        )
        session.flights.add(flight)
        try:
            generation = await asyncio.shield(flight)
        except Refused as refused:
            if refused.reason == "unavailable":
                raise
            session.ended = session.ended or refused.reason
            raise Denied(refused.reason, OVER, refused.detail) from refused
        except asyncio.CancelledError:
            if not flight.cancelled():
                raise
            raise session.over() from None
        finally:
            flight.cancel()
            session.flights.discard(flight)
        if generation.finish_reason == "abort":
            raise Refused("unavailable", f"the turn of trajectory {body.trajectory} was cut off")
        return generation
