"""Lambda's Invoke API on loopback, for a machine without AWS.

It is our own for want of a faithful one that runs without Docker. Measured: AWS's emulator (`aws-lambda-rie`, in
`aws-sam-cli`) leaves out X-Amz-Function-Error and dies under two invocations at once; moto returns the event instead
of running anything; localstack wants Docker. What it must do is little, for the part that runs the handler is AWS's
`awslambdaric` itself: the real client (boto3) on one side, the real runtime on the other.

Kept: cold starts, one event per process at a time, timeouts, the memory of the process itself (not of its children),
6 MB each way, throttling (TooManyRequestsException), the shapes of errors, scale to zero. Not kept: it checks no
signature (anyone on this machine may call it), isolates nothing, and answers synchronous invocations only.

Invariants: loopback only; at most `concurrency` events at once, and what is above is refused, not queued; a process
that had no event for `idle_s` seconds is ended; none outlives this one.
"""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from aiohttp import web

from infra.compute.lifeline import NAMED, die_with_parent, last_words
from infra.compute.scratch import scratch
from infra.serverless.bundle import Bundle, Function, link_runtime, read_manifest
from infra.serverless.instance import Instance, Layout, Outcome
from rl.errors import RollmillError

HANDLER = "rewards.handler.handler"
REQUEST_BYTES = 6 * 1024 * 1024
"""Limit of a synchronous request."""
_INVOKE = "/2015-03-31/functions/{name}/invocations"


class Endpoint:
    """The functions of one bundle, by their full names."""

    def __init__(
        self, functions: Mapping[str, Function], layout: Layout, concurrency: int, idle_s: float, handler: str = HANDLER
    ):
        self._functions, self._layout, self._handler = functions, layout, handler
        self._concurrency, self._idle_s = concurrency, idle_s
        self._busy: set[Instance] = set()
        self._starting = 0
        self._idle: dict[str, list[Instance]] = {name: [] for name in functions}

    def app(self) -> web.Application:
        """The service; when it is shut down, all processes are ended."""
        app = web.Application(client_max_size=2 * REQUEST_BYTES)
        app.add_routes([web.post(_INVOKE, self._invoke)])
        app.cleanup_ctx.append(self._lifetime)
        return app

    @property
    def processes(self) -> int:
        return len(self._busy) + sum(map(len, self._idle.values()))

    async def _lifetime(self, app: web.Application) -> AsyncIterator[None]:
        reaper = asyncio.create_task(self._scale_to_zero())
        yield
        reaper.cancel()
        everyone = [*self._busy, *(i for pool in self._idle.values() for i in pool)]
        await asyncio.gather(*(instance.close() for instance in everyone))

    async def _invoke(self, request: web.Request) -> web.Response:
        name = request.match_info["name"].rpartition(":")[2]  # a name or an ARN
        kind = request.headers.get("X-Amz-Invocation-Type", "RequestResponse")
        body = await request.read() or b"{}"
        if name not in self._functions:
            return _refuse(404, "ResourceNotFoundException", f"Function not found: {name}")
        if len(body) > REQUEST_BYTES:
            told = f"Request must be smaller than {REQUEST_BYTES} bytes for the InvokeFunction operation"
            return _refuse(413, "RequestEntityTooLargeException", told)
        try:
            json.loads(body)
        except ValueError as error:
            told = f"Could not parse request body into json: {error}"
            return _refuse(400, "InvalidRequestContentException", told)
        if kind == "DryRun":
            return web.Response(status=204)
        if kind != "RequestResponse":
            told = f"X-Amz-Invocation-Type {kind!r}: this endpoint answers RequestResponse and DryRun"
            return _refuse(400, "InvalidParameterValueException", told)
        if len(self._busy) + self._starting >= self._concurrency:
            why = "ConcurrentInvocationLimitExceeded"
            return _refuse(429, "TooManyRequestsException", "Rate Exceeded.", Reason=why)
        outcome = await self._run(name, body)
        headers = {"X-Amz-Executed-Version": "$LATEST"}
        if outcome.failed:
            headers["X-Amz-Function-Error"] = "Unhandled"
        if request.headers.get("X-Amz-Log-Type") == "Tail":
            headers["X-Amz-Log-Result"] = base64.b64encode(outcome.log.encode()[-4096:]).decode()
        return web.Response(body=outcome.payload, content_type="application/json", headers=headers)

    async def _run(self, name: str, body: bytes) -> Outcome:
        instance = await self._claim(name)
        try:
            return await instance.invoke(str(uuid.uuid4()), body)
        except asyncio.CancelledError:  # the caller hung up: what runs can not be taken back
            instance.kill()
            raise
        finally:
            self._busy.discard(instance)
            if not instance.dead:
                self._idle[name].append(instance)

    async def _claim(self, name: str) -> Instance:
        """A warm process, the one used last first, or a new one."""
        while self._idle[name]:
            instance = self._idle[name].pop()
            if not instance.dead:
                self._busy.add(instance)
                return instance
        self._starting += 1
        try:
            instance = Instance(name, self._functions[name], self._layout, self._handler)
            await instance.start()
            self._busy.add(instance)
            return instance
        finally:
            self._starting -= 1

    async def _scale_to_zero(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._idle_s / 4))
            long_ago = time.monotonic() - self._idle_s
            for pool in self._idle.values():
                for instance in [i for i in pool if i.dead or i.idle_since < long_ago]:
                    pool.remove(instance)
                    await instance.close()


def _refuse(status: int, code: str, message: str, **more: str) -> web.Response:
    body = {"Type": "User", "message": message, "Message": message, **more}
    return web.json_response(body, status=status, headers={"x-amzn-ErrorType": code})


async def serve(endpoint: Endpoint, port: int) -> None:
    """Until SIGTERM or SIGINT."""
    runner = web.AppRunner(endpoint.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    await runner.cleanup()


def main(
    bundle: Annotated[Path, typer.Argument(help="Its packages, requirements and functions, as JSON.")],
    home: Annotated[Path, typer.Argument(help="Where code is laid out and logs are kept.")],
    port: int,
    prefix: str,
    concurrency: int,
    idle_s: float,
) -> None:
    """Serve a bundle, laid out from what is installed here."""
    die_with_parent()
    tree = json.loads(bundle.read_text())
    functions = read_manifest(json.dumps(tree["functions"]))
    try:
        with scratch(home, "code") as own:
            wanted = Bundle(tuple(functions.values()), tuple(tree["packages"]), tuple(tree["requires"]))
            wanted.link(own / "bundle")
            link_runtime(own / "runtime")
            layout = Layout(own / "bundle", own / "runtime", home / "logs")
            layout.logs.mkdir(exist_ok=True)
            named = {f"{prefix}-{name}": function for name, function in functions.items()}
            with suppress(KeyboardInterrupt):
                asyncio.run(serve(Endpoint(named, layout, concurrency, idle_s), port))
    except RollmillError as error:
        last_words("functions", error)
        raise SystemExit(NAMED) from None


if __name__ == "__main__":
    typer.run(main)
