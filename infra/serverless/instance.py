"""One execution environment: a process of a function, and the Runtime API that it asks for work.

    POST init ---- GET next -> event ---- POST response | error ---- GET next -> ...
      process started      (frozen by AWS between two events; here it merely waits)

The process is AWS's own runtime interface client, `awslambdaric`, on the bundle's code and nothing else: without
site-packages, a module that the bundle forgot is missing here as it would be there.

Invariants: one event at a time; an environment that timed out, crashed or outgrew its memory is ended with its whole
process group and never used again; it ends when the process that started it does, however that ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

from infra.serverless.bundle import Function, runtime

ACCOUNT, REGION = "000000000000", "us-east-1"
INIT_S = 10.0
"""What AWS gives a process to start; a start that takes longer counts against the function's own timeout."""
RESPONSE_BYTES = 6_291_556
"""Limit of a response."""
_MEMORY_PERIOD_S = 0.1
_TAIL_BYTES = 4096
_API = "/2018-06-01/runtime"
# Reads the lifeline, then becomes awslambdaric.
_BOOT = """
import os, runpy, signal, sys, threading
pipe, null = os.dup(0), os.open(os.devnull, os.O_RDONLY)
os.dup2(null, 0)
def watch():
    while os.read(pipe, 1): pass
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
sys.path[:0] = sys.argv[2:]
sys.argv[:] = ["awslambdaric", sys.argv[1]]
runpy.run_module("awslambdaric", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Layout:
    """Where the code lies."""

    code: Path
    """The unpacked bundle."""
    runtime: Path
    """What Lambda's runtime has installed."""
    logs: Path
    """A directory with a file for each function."""


@dataclass(frozen=True)
class Outcome:
    """Of one invocation."""

    payload: bytes
    failed: bool
    """Whether the payload tells of an error (X-Amz-Function-Error)."""
    log: str
    """The last 4 KB of the log, with Lambda's REPORT line."""


def arn(function: str) -> str:
    return f"arn:aws:lambda:{REGION}:{ACCOUNT}:function:{function}"


class Instance:
    """One execution environment. Made by `start`; `dead` once it may not be used any more."""

    def __init__(self, full_name: str, function: Function, layout: Layout, handler: str):
        self._name, self._function, self._layout, self._handler = full_name, function, layout, handler
        self._events: asyncio.Queue[tuple[str, bytes] | None] = asyncio.Queue()
        self._answer: asyncio.Future[tuple[bytes, bool]] = asyncio.get_running_loop().create_future()
        self._ready = asyncio.Event()
        self._tail = bytearray()
        self._log = (layout.logs / f"{function.name}.log").open("ab", buffering=0)
        self._peak_mb = 0
        self._background: list[asyncio.Task[None]] = []
        self._init_ms: float | None = None
        self.dead = False
        self.idle_since = time.monotonic()

    async def start(self) -> None:
        """Open the Runtime API on a port of its own and start the process."""
        self._began = time.perf_counter()
        app = web.Application(client_max_size=2 * RESPONSE_BYTES)
        app.add_routes(
            [
                web.get(f"{_API}/invocation/next", self._next),
                web.post(f"{_API}/invocation/{{id}}/response", self._response),
                web.post(f"{_API}/invocation/{{id}}/error", self._error),
                web.post(f"{_API}/init/error", self._error),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        port = self._runner.addresses[0][1]
        paths = [str(self._layout.code), str(self._layout.runtime)]
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _BOOT, self._handler, *paths),
            cwd=self._layout.code,
            env=self._environment(port),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._background = [asyncio.create_task(self._watch_output()), asyncio.create_task(self._watch_memory())]

    def _environment(self, port: int) -> dict[str, str]:
        """Lambda's reserved variables. Credentials and the address of S3 are those of this process."""
        kept = {k: v for k, v in os.environ.items() if k.startswith("AWS_") or k in ("PATH", "NO_PROXY", "no_proxy")}
        return kept | {
            "AWS_LAMBDA_RUNTIME_API": f"127.0.0.1:{port}",
            "AWS_LAMBDA_FUNCTION_NAME": self._name,
            "AWS_LAMBDA_FUNCTION_VERSION": "$LATEST",
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(self._function.memory_mb),
            "AWS_LAMBDA_LOG_GROUP_NAME": f"/aws/lambda/{self._name}",
            "AWS_LAMBDA_LOG_STREAM_NAME": "local",
            "AWS_LAMBDA_INITIALIZATION_TYPE": "on-demand",
            "AWS_EXECUTION_ENV": f"AWS_Lambda_{runtime()}",
            "AWS_REGION": os.environ.get("AWS_REGION", REGION),
            "LAMBDA_TASK_ROOT": str(self._layout.code),
            "_HANDLER": self._handler,
            "ROLLMILL_FUNCTION": self._function.name,
            "LANG": "en_US.UTF-8",
            "TZ": ":UTC",
        }

    async def invoke(self, request_id: str, body: bytes) -> Outcome:
        """One event. Never raises: what goes wrong is an outcome, as Lambda tells it."""
        cold = self._init_ms is None
        self._request_id, timeout_s = request_id, self._function.timeout_s
        self._answer = asyncio.get_running_loop().create_future()
        if not cold:
            self._tail.clear()
        if self.dead:
            self._die(self._process.returncode)
        self._events.put_nowait((request_id, body))
        began = time.perf_counter()
        try:
            if cold:
                await self._started(INIT_S + timeout_s)
                began = time.perf_counter()
            payload, failed = await asyncio.wait_for(asyncio.shield(self._answer), timeout_s)
        except TimeoutError:
            self.kill()
            told = f"RequestId: {request_id} Error: Task timed out after {self._function.timeout_s:.2f} seconds"
            payload, failed = _error("Sandbox.Timedout", told), True
        if len(payload) > RESPONSE_BYTES:
            told = f"Response payload size exceeded maximum allowed payload size ({RESPONSE_BYTES} bytes)."
            payload, failed = _error("Function.ResponseSizeTooLarge", told), True
        self.idle_since = time.monotonic()
        return Outcome(payload, failed, self._report((time.perf_counter() - began) * 1e3, cold))

    async def _started(self, seconds: float) -> None:
        """Until it asks for work, or has failed to start. Raises TimeoutError."""
        ready = asyncio.ensure_future(self._ready.wait())
        either: list[asyncio.Future[Any]] = [ready, self._answer]
        done, _ = await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not done:
            raise TimeoutError

    def kill(self) -> None:
        """End the process with all that it started."""
        self.dead = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """End it and wait until it is gone."""
        self.kill()
        await asyncio.gather(*self._background, return_exceptions=True)

    # -- the Runtime API -----------------------------------------------------------------------------

    async def _next(self, request: web.Request) -> web.Response:
        if self._init_ms is None:
            self._init_ms = (time.perf_counter() - self._began) * 1e3
        self._ready.set()
        event = await self._events.get()
        if event is None:
            return web.Response(status=410)  # the process that asked is gone
        request_id, body = event
        headers = {
            "Lambda-Runtime-Aws-Request-Id": request_id,
            "Lambda-Runtime-Deadline-Ms": str(int((time.time() + self._function.timeout_s) * 1e3)),
            "Lambda-Runtime-Invoked-Function-Arn": arn(self._name),
        }
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def _response(self, request: web.Request) -> web.Response:
        return await self._settle(request, failed=False)

    async def _error(self, request: web.Request) -> web.Response:
        return await self._settle(request, failed=True)

    async def _settle(self, request: web.Request, failed: bool) -> web.Response:
        body = await request.read()
        if not self._answer.done():
            self._answer.set_result((body, failed))
        return web.json_response({"status": "OK"}, status=202)

    # -- the process ---------------------------------------------------------------------------------

    async def _watch_output(self) -> None:
        """Keep the log until the process has ended, then tell so."""
        assert self._process.stdout is not None
        while chunk := await self._process.stdout.read(1 << 16):
            self._log.write(chunk)
            self._tail += chunk
            del self._tail[:-_TAIL_BYTES]
        code = await self._process.wait()
        self.kill()  # what it left behind in its group
        self._die(code)
        self._events.put_nowait(None)
        await self._runner.cleanup()
        self._log.close()

    def _die(self, code: int | None) -> None:
        self.dead = True
        if self._answer.done():
            return
        if self._peak_mb > self._function.memory_mb:
            kind, why = "Runtime.OutOfMemory", "signal: killed"
        else:
            how = "" if code is None else f"exit status {code}" if code >= 0 else f"signal: {signal.strsignal(-code)}"
            kind, why = "Runtime.ExitError", how.lower()
        told = f"RequestId: {self._request_id} Error: Runtime exited with error: {why}"
        self._answer.set_result((_error(kind, told), True))

    async def _watch_memory(self) -> None:
        """End the process when it outgrows its memory. Its children are not counted: to find them takes a look at every
        process of the machine, ten times a second."""
        process = psutil.Process(self._process.pid)
        while not self.dead:
            with suppress(psutil.NoSuchProcess):
                used_mb = process.memory_info().rss >> 20
                self._peak_mb = max(self._peak_mb, used_mb)
                if used_mb > self._function.memory_mb:
                    self.kill()
            await asyncio.sleep(_MEMORY_PERIOD_S)

    def _report(self, took_ms: float, cold: bool) -> str:
        said = self._tail.decode(errors="replace")
        init = f"\tInit Duration: {self._init_ms:.2f} ms" if cold and self._init_ms is not None else ""
        report = (
            f"REPORT RequestId: {self._request_id}\tDuration: {took_ms:.2f} ms\t"
            f"Billed Duration: {int(took_ms) + 1} ms\tMemory Size: {self._function.memory_mb} MB\t"
            f"Max Memory Used: {self._peak_mb} MB{init}\n"
        )
        if not self._log.closed:
            self._log.write(report.encode())
        return f"{said}\n{report}"[-_TAIL_BYTES:]


def _error(kind: str, message: str) -> bytes:
    return json.dumps({"errorType": kind, "errorMessage": message}).encode()
