"""Routes of the engines' hosts, which report to their proxy again and again.

    POST /control/engines/{name}    {"state": "joining" | "serving" | "lost"}
                                   422 where the proxy has an engine of its own

Invariant: what is connected to is an address that a holder of the control key named, under that same key.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from infra.engines.errors import BadRequest
from infra.engines.protocol import Capabilities, Engine
from infra.engines.remote import RemoteEngine
from infra.proxy.fleet import Fleet
from infra.proxy.http import answer, post, read
from infra.proxy.members import Facts
from infra.proxy.wire import ReportBody
from rl.config.work import DeadlineSection


def routes(engine: Engine, key: str, deadlines: DeadlineSection) -> list[Route]:
    """Of the proxy of this engine; `key` opens the hosts of the engines of a fleet."""

    async def report(request: Request) -> Response:
        body = await read(request, ReportBody)
        if not isinstance(engine, Fleet):
            raise BadRequest("this proxy has an engine of its own; leave engine.instances away, or start it anew")
        facts = Facts(request.path_params["name"], body.incarnation, body.hardware, body.slots, body.capacity)
        capabilities = Capabilities(**body.capabilities)

        def connect() -> RemoteEngine:
            return RemoteEngine(body.url, key, capabilities, deadlines.control, deadlines.load)

        state = engine.members.report(facts, connect)
        return answer({"state": state})

    return [post("/control/engines/{name}", report)]
