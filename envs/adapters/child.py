"""Any environment in a process of its own, under any Python: for libraries whose dependencies, global state or crashes
must not be this process's.

    environment: child
    environment_options:
      python: .venv/share/rollmill/gem/bin/python
      environment: envs.adapters.gem:Gem
      options: {id: "game:Mastermind-v0-easy"}

The interpreter needs the library and nothing of ours; our code is appended to its path. Requests and answers are one
line of JSON each (`envs.adapters.served`).

Invariants
- One child serves one episode at a time, and the next one only after it closed the last one well: starting anew would
  import the library anew, which takes some of them seconds. Else it ends with `close`, also while a call hangs in it,
  or when no episode wants it.
- All children, and what they started in their sessions, end when this process does, whatever ends it.
- Nothing is evaluated that the child says; what it raises, and its death, are a `ChildFailed` here.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from envs.protocol import Environment, Hints, Needs, Step
from envs.threads import in_daemon
from rl.errors import ConfigError
from rl.trajectory import Message, Problem

ROOT = Path(__file__).parents[2]
LONGEST_S = 600.0
"""Of any answer, should nobody have a shorter deadline."""
IDLE_S = 3.0
"""How long a child without an episode waits for the next one."""
POLITE_S = 2.0
"""How long an environment may take to close before its process is killed."""
_BOOT = "import sys; sys.path.append(sys.argv[1]); from envs.adapters.served import main; main()"


class ChildFailed(Exception):
    """The environment in the child raised, or the child ended; the message says which, and what it last wrote."""


class Child(Environment):
    """The environment `environment` (`module:Class`), constructed with `options` under the interpreter `python`."""

    hints: ClassVar[Hints] = Hints(expected_turns=8, prompt_tokens=300, response_tokens=60)
    needs: ClassVar[Needs] = Needs(memory_mb=200, processes=1)

    def __init__(self, environment: str, options: dict[str, Any] | None = None, python: str = sys.executable):
        module, separator, name = environment.partition(":")
        if not (module and separator and name):
            raise ValueError(f"environment ({environment!r}) must be of the form module:Class")
        if not os.access(python, os.X_OK):
            raise ValueError(f"python ({python!r}) is no interpreter; build its virtual environment first")
        self._what = {"environment": environment, "options": options or {}}
        self._python = python
        self._process: _Process | None = None
        self._well = False
        """Whether the last call was answered: then the child can be closed, else it is killed."""
        self._shown: Mapping[str, Any] = {}

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> None:
        """Construct one in a child. Raises ConfigError if that fails."""
        probe = cls(**options)
        process = _Process.of(probe._python)
        try:
            process.ask({"do": "make", **probe._what})
        except ChildFailed as error:
            process.end()
            raise ConfigError(f"environment_options: {options.get('environment')} can not be made: {error}") from error
        process.park()

    async def reset(self, problem: Problem) -> list[Message]:
        self._process = process = _Process.of(self._python)
        fields = {name: getattr(problem, name) for name in Problem.__slots__}

        def start() -> Any:
            process.ask({"do": "make", **self._what})
            return process.ask({"do": "reset", "problem": fields})

        self._shown = await self._answered(start)
        return [Message(role, content) for role, content in self._shown["messages"]]

    async def step(self, action: str) -> Step:
        process = self._live()
        found = await self._answered(lambda: process.ask({"do": "step", "action": action}))
        return Step(**{**found, "observation": Message(*found["observation"])})

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if self._well:
            with suppress(ChildFailed):
                await self.in_thread(lambda: process.ask({"do": "close"}, POLITE_S))
                return process.park()
        await in_daemon(process.end, "end of a child")

    async def _answered(self, work: Callable[[], Any]) -> Any:
        self._well = False
        found = await self.in_thread(work)
        self._well = True
        return found

    @property
    def tools(self) -> Sequence[dict[str, Any]]:  # type: ignore[override]
        return self._shown.get("tools", ())

    def fingerprint(self) -> object:
        return self._shown.get("fingerprint")

    def expert_action(self) -> str:
        return self._said({"do": "expert"})

    def random_action(self, rng: random.Random) -> str:
        return self._said({"do": "random", "seed": rng.getrandbits(64)})

    def _said(self, request: dict[str, Any]) -> str:
        found = self._live().ask(request)
        if found is None:
            raise NotImplementedError(f"{self._what['environment']} has no expert: a warm start can not use it")
        return found

    def _live(self) -> _Process:
        if self._process is None:
            raise ChildFailed("there is no child: reset comes first, and nothing after close")
        return self._process


class _Process:
    """The child's process, and the conversation with it."""

    _idle: ClassVar[dict[str, deque[_Process]]] = defaultdict(deque)
    """By interpreter."""

    @classmethod
    def of(cls, python: str) -> _Process:
        """An idle one of that interpreter, or a new one."""
        with suppress(IndexError):
            while True:
                process = cls._idle[python].pop()
                process._retiring.cancel()
                if process._popen.poll() is None:
                    return process
                process.end()
        return cls(python)

    def park(self) -> None:
        """Leave it to the next episode, for a while."""
        self._retiring = threading.Timer(IDLE_S, self._retire)
        self._retiring.daemon = True
        self._retiring.start()
        self._idle[self._python].append(self)

    def _retire(self) -> None:
        with suppress(ValueError):  # another episode has it
            self._idle[self._python].remove(self)
            self.end()

    def __init__(self, python: str):
        self._python = python
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `end`
        self._popen = subprocess.Popen(
            [python, "-P", "-c", _BOOT, str(ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        self._buffer = bytearray()

    def ask(self, request: dict[str, Any], longest_s: float = LONGEST_S) -> Any:
        """What the child answers. Raises ChildFailed."""
        assert self._popen.stdin
        try:
            self._popen.stdin.write(json.dumps(request).encode() + b"\n")
            self._popen.stdin.flush()
            answer = json.loads(self._line(time.monotonic() + longest_s))
        except (OSError, ValueError) as error:  # ValueError: the pipe is closed, or that was no JSON
            raise ChildFailed(
                f"no answer to {request['do']!r}: {error}; it last wrote: {self._last_words()}"
            ) from error
        if "error" in answer:
            raise ChildFailed(answer["error"])
        return answer["value"]

    def _line(self, deadline: float) -> bytes:
        assert self._popen.stdout
        pipe = self._popen.stdout.fileno()
        while (end := self._buffer.find(b"\n")) < 0:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("deadline")
            if not (more := os.read(pipe, 1 << 16)):
                raise ConnectionError("it ended")
            self._buffer += more
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def end(self) -> None:
        """Kill its session, and wait for it; idempotent."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout, self._log):
            with suppress(OSError):
                assert pipe
                pipe.close()

    def _last_words(self) -> str:
        with suppress(ValueError):  # it is closed
            return last_words(self._log.fileno())
        return ""


def last_words(log: int) -> str:
    """The end of what a process wrote to that file."""
    with suppress(OSError):
        size = os.fstat(log).st_size
        return os.pread(log, 500, max(0, size - 500)).decode(errors="replace").strip()
    return ""
