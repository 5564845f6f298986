"""Who may call what: a bearer key for each role, and a token for each session.

    control    the trainer and the driver            everything but /v1
    rollout    the workers that play trajectories    everything but /control and /v1
    session    one agent, for one trajectory         /v1 alone

Invariants
- No route but /healthz is served without a key once the proxy has any; what no line above names is nobody's.
- Keys are compared in constant time, kept as digests only, and never part of a message.
- Unknown is 401 `unauthorized`, known but of another role 403 `forbidden`; on /v1 in the form that OpenAI's clients
  read.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from infra.proxy.http import Failure
from infra.proxy.openai import error_response

OPEN = "/healthz"
SESSION = "/v1/"
CONTROL = "/control/"


class Role(StrEnum):
    CONTROL = "control"
    ROLLOUT = "rollout"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one run, made from its secret: whoever holds one role's key can not make the other's."""

    control: str = field(repr=False)
    rollout: str = field(repr=False)

    @classmethod
    def of(cls, secret: str) -> Keys:
        """Equal secrets give equal keys. Raises ValueError for a secret that could be guessed."""
        if len(secret) < 32:
            raise ValueError(f"the secret of a run has {len(secret)} characters; it needs 32 at least")
        return cls(*(hmac.digest(secret.encode(), role.value.encode(), "sha256").hex() for role in Role))

    @classmethod
    def random(cls) -> Keys:
        return cls.of(secrets.token_urlsafe(32))

    def of_tenant(self, name: str) -> Keys:
        """Those of one tenant of a service whose keys these are, by the name under which its policy is served."""
        return Keys(tenant_key(self.control, name), tenant_key(self.rollout, name))

    def role(self, key: str) -> Role | None:
        """Whose key this is."""
        given = digest(key)
        found = None
        for role, known in ((Role.CONTROL, self.control), (Role.ROLLOUT, self.rollout)):
            if hmac.compare_digest(given, digest(known)):
                found = role
        return found


def tenant_key(master: str, name: str) -> str:
    """A tenant's key of some role, made from the service's key of that role: from neither can another tenant's, or
    another role's, be made."""
    return hmac.digest(master.encode(), name.encode(), "sha256").hex()


def digest(key: str) -> bytes:
    """What is kept of a key, and compared: of one length, and unrelated for keys that are alike."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


class Guard:
    """Middleware in front of all routes. `is_session` tells whether a token is that of a living session."""

    def __init__(self, app: ASGIApp, keys: Keys, is_session: Callable[[str], bool]):
        self._app, self._keys, self._is_session = app, keys, is_session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == OPEN or (refusal := self._refusal(scope)) is None:
            await self._app(scope, receive, send)
        else:
            await refuse(refusal, scope, receive, send)

    def _refusal(self, scope: Scope) -> Failure | None:
        path: str = scope["path"]
        key = bearer(Headers(scope=scope))
        if key is None:
            return Failure("unauthorized", 401, f"{path} needs a key: send `Authorization: Bearer <key>`")
        role = self._keys.role(key)
        if role is None and not self._is_session(key):
            return Failure("unauthorized", 401, f"{path}: the key is none of this run, or of a session that is over")
        if path.startswith(SESSION):
            allowed = role is None
        elif path.startswith(CONTROL):
            allowed = role is Role.CONTROL
        else:
            allowed = role is not None
        return None if allowed else Failure("forbidden", 403, f"{path} is not for the role {role or 'session'}")


async def refuse(refusal: Failure, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer by a refusal, in the form that the callers of this path read."""
    agents = scope["path"].startswith(SESSION)
    await (error_response(refusal) if agents else refusal.response())(scope, receive, send)


def bearer(headers: Headers) -> str | None:
    """The key that a request carries."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None
