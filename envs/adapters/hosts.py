"""Agents of other libraries, each library in a process of its own under its own Python, many episodes at once.

An agent there is a class whose instances are asynchronous contexts with `play(problem, client)`; what `play` returns or
raises comes back from `Host.play`. Requests and answers are one line of JSON each (`envs.adapters.hosted`).

Invariants
- One process for each event loop, interpreter, agent and options; it starts with the first episode that wants it and
  ends `IDLE_S` after the last one: such libraries take seconds to import.
- An episode that is cancelled is cancelled there. One whose process ends fails by `ChildFailed`, at once.
- A process ends with this one, whatever ends it, and so does what it started.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from envs.adapters.child import ROOT, ChildFailed, last_words
from envs.adapters.hosted import POLITE_S, descendants
from rl.trajectory import Problem

IDLE_S = 60.0
START_S = 300.0
LONGEST_LINE = 1 << 26
"""Bytes of an answer."""
_BOOT = "import sys; sys.path.append(sys.argv[1]); from envs.adapters.hosted import main; main()"


class Host:
    """One process. Use it on the event loop that it was made on."""

    _running: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Host]]] = WeakKeyDictionary()

    @classmethod
    def of(cls, python: str, agent: str, options: Mapping[str, Any]) -> Host:
        """The process of that agent with these options on the running loop, or a new one. Raises ValueError for what is
        no interpreter."""
        if not os.access(python, os.X_OK):
            raise ValueError(f"python ({python!r}) is no interpreter; build its virtual environment first")
        hosts = cls._running.setdefault(asyncio.get_running_loop(), {})
        key = json.dumps([python, agent, options], sort_keys=True)
        if key not in hosts:
            host = hosts[key] = cls(python, {"agent": agent, "options": options})
            host._forget = lambda: hosts.pop(key, None) if hosts.get(key) is host else None
        return hosts[key]

    def __init__(self, python: str, first: Mapping[str, Any]):
        self._loop = asyncio.get_running_loop()
        self._forget: Any = lambda: None
        self._numbers = count()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._retiring: asyncio.TimerHandle | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed when it ended
        self._ready = self._loop.create_future()
        self._living = self._loop.create_task(self._live(python, first))

    async def started(self) -> None:
        """Until it can play. Raises ChildFailed."""
        await asyncio.shield(self._ready)
        self._wait_for_episodes()

    async def play(self, problem: Problem, client: Mapping[str, Any]) -> Any:
        """What the agent's `play` returns. Raises ChildFailed."""
        number = next(self._numbers)
        answer = self._pending[number] = self._loop.create_future()
        try:
            await asyncio.shield(self._ready)
            fields = {name: getattr(problem, name) for name in Problem.__slots__}
            self._say({"id": number, "problem": fields, "client": dict(client)})
            return await answer
        finally:
            del self._pending[number]
            if not answer.done() or answer.cancelled():
                self._say({"cancel": number})
            self._wait_for_episodes()

    def _wait_for_episodes(self) -> None:
        if self._retiring is not None:
            self._retiring.cancel()
        self._retiring = self._loop.call_later(IDLE_S, self._retire_if_idle)

    def _retire_if_idle(self) -> None:
        if not self._pending:
            self.retire()

    def retire(self) -> None:
        """Let the process end; the next episode gets a new one."""
        self._forget()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def ended(self) -> None:
        """Until the process has ended, after `retire`."""
        await asyncio.shield(self._living)

    @property
    def pid(self) -> int | None:
        """Of its process, once there is one."""
        return self._process.pid if self._process is not None else None

    def _say(self, request: Mapping[str, Any]) -> None:
        if self._ready.done() and self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")

    async def _live(self, python: str, first: Mapping[str, Any]) -> None:
        """From the start of the process to its end."""
        error = ChildFailed("its process was ended")
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *(python, "-P", "-c", _BOOT, str(ROOT)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._log,
                limit=LONGEST_LINE,
                start_new_session=True,
            )
            try:
                error = await self._converse(process, first)
            finally:
                await _end(process)
        except Exception as trouble:
            error = ChildFailed(f"its process can not be talked to: {trouble!r}")
        finally:
            self._forget()
            said = last_words(self._log.fileno())
            self._log.close()
            told = ChildFailed(f"{error}; it last wrote: {said}") if said else error
            for waiting in (self._ready, *self._pending.values()):
                if not waiting.done():
                    waiting.set_exception(told)
                    waiting.exception()  # somebody may have stopped waiting

    async def _converse(self, process: asyncio.subprocess.Process, first: Mapping[str, Any]) -> ChildFailed:
        """Deliver answers until there are no more; why."""
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps(first).encode() + b"\n")
        try:
            answer = json.loads(await asyncio.wait_for(process.stdout.readline(), START_S) or "{}")
        except TimeoutError:
            return ChildFailed(f"it did not start within {START_S:g} s")
        if "ready" not in answer:
            return ChildFailed(answer.get("error", "its process ended while it started"))
        self._ready.set_result(None)
        while line := await process.stdout.readline():
            answer = json.loads(line)
            waiting = self._pending.get(answer["id"])
            if waiting is None or waiting.done():
                continue
            if "error" in answer:
                waiting.set_exception(ChildFailed(answer["error"]))
            else:
                waiting.set_result(answer["value"])
        return ChildFailed("its process ended")


async def _end(process: asyncio.subprocess.Process) -> None:
    """See it end: by itself, for its input is closed, or killed with all that it started."""
    assert process.stdin
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), 2 * POLITE_S)
    except (TimeoutError, asyncio.CancelledError) as error:
        for pid in (*descendants(process.pid), process.pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if isinstance(error, asyncio.CancelledError):
            raise
        await process.wait()
