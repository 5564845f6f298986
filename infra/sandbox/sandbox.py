"""Runs untrusted programs: `Sandbox(limits).run(argv, files, stdin) -> Result`, or `arun` for the same in asyncio.

    full      namespaces, limits and a filter of system calls (infra/sandbox/bubblewrap.py). The default.
    rlimits   limits only (infra/sandbox/rlimits.py): for code that is clumsy, not hostile. Only if asked for by name.

Invariants
- There is no silent fallback: a machine that can not give the isolation asked for is a SandboxUnavailable when the
  Sandbox is made, and every result says under which it was had.
- Bad programs give results. An exception says that the sandbox failed, not the program.
- As many programs run at once in this process as it has cores, since a program that waits for a core would be late
  through no fault of its own. Waiting for a place does not count against its deadline.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath
from time import monotonic

from infra.sandbox.bubblewrap import Bubblewrap
from infra.sandbox.errors import SandboxFailure, SandboxUnavailable
from infra.sandbox.limits import Limits
from infra.sandbox.rlimits import Rlimits
from infra.sandbox.supervision import Broken, Isolation, supervise

_PROBE = "import os; os.waitpid(os.fork(), 0); print('ready')"


@dataclass(frozen=True)
class Result:
    """What became of one program."""

    exit_code: int
    """Its own; 128 + n if signal n ended it."""
    stdout: bytes
    stderr: bytes
    seconds: float
    """Wall clock, the start of the sandbox included."""
    isolation: Isolation
    broken: Broken | None = None
    """The bound that it was killed for."""

    @property
    def timed_out(self) -> bool:
        return self.broken == "time"

    @property
    def out_of_memory(self) -> bool:
        """Killed for its memory. One that was only refused more may end in any way of its own."""
        return self.broken == "memory"

    @property
    def out_of_disk(self) -> bool:
        return self.broken == "disk"

    @property
    def out_of_output(self) -> bool:
        return self.broken == "output"


class Sandbox:
    """Thread-safe; one serves any number of runs. Raises SandboxUnavailable."""

    def __init__(self, limits: Limits | None = None, isolation: Isolation = "full"):
        if isolation not in ("full", "rlimits"):
            raise ValueError(f"isolation ({isolation!r}) must be 'full' or 'rlimits'")
        self.limits = limits or Limits()
        self.isolation: Isolation = isolation
        self._starter = _starter(isolation)

    @property
    def python(self) -> str:
        """Path of the interpreter in the sandbox, for `argv`."""
        return self._starter.interpreter.executable

    def run(self, argv: Sequence[str], files: Mapping[str, bytes | str] | None = None, stdin: bytes = b"") -> Result:
        """Run a program to its end. `files` are laid into its working directory, by relative path.

        Raises SandboxFailure, and ValueError for a path that leaves the working directory.
        """
        return self._submit(argv, files, stdin, threading.Event()).result()

    async def arun(
        self, argv: Sequence[str], files: Mapping[str, bytes | str] | None = None, stdin: bytes = b""
    ) -> Result:
        """As `run`. Cancelling it kills the program."""
        cancelled = threading.Event()
        try:
            return await asyncio.wrap_future(self._submit(argv, files, stdin, cancelled))
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def _submit(
        self, argv: Sequence[str], files: Mapping[str, bytes | str] | None, stdin: bytes, cancelled: threading.Event
    ) -> Future[Result]:
        laid = {_inside(name): text.encode() if isinstance(text, str) else text for name, text in (files or {}).items()}
        return _places().submit(_execute, self._starter, self.limits, list(argv), laid, stdin, cancelled)


def _execute(
    starter: Bubblewrap | Rlimits,
    limits: Limits,
    argv: list[str],
    files: Mapping[str, bytes],
    stdin: bytes,
    cancelled: threading.Event,
) -> Result:
    start = monotonic()
    running = starter.start(argv, files, limits)
    try:
        collected = supervise(running, stdin, limits, cancelled)
        code = running.exit_code()
    finally:
        running.close()
    if code is None and collected.broken is None:
        said = collected.stderr.decode(errors="replace").strip() or "no reason was given"
        raise SandboxFailure(f"sandbox: {argv[0]} was not started: {said}")
    return Result(
        128 + signal.SIGKILL if code is None else code,
        bytes(collected.stdout),
        bytes(collected.stderr),
        monotonic() - start,
        starter.isolation,
        collected.broken,
    )


@cache
def _places() -> ThreadPoolExecutor:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThreadPoolExecutor(cores, thread_name_prefix="sandbox")


@cache
def _starter(isolation: Isolation) -> Bubblewrap | Rlimits:
    """Made and tried once per process: one harmless program has to come back. Raises SandboxUnavailable."""
    starter = Bubblewrap() if isolation == "full" else Rlimits()
    try:
        argv = [starter.interpreter.executable, "-I", "-S", "-c", _PROBE]
        result = _execute(starter, Limits(seconds=30), argv, {}, b"", threading.Event())
    except SandboxFailure as error:
        raise SandboxUnavailable(f"{error}; {starter.mend}") from error
    if result.stdout != b"ready\n":
        said = (result.stderr or result.stdout).decode(errors="replace").strip()
        raise SandboxUnavailable(
            f"sandbox: a trial program ended with code {result.exit_code} (bound broken: {result.broken}): {said}; "
            f"{starter.mend}"
        )
    return starter


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"files: {name!r} must be a relative path inside the working directory")
    return str(path)
