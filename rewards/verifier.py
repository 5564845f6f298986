"""Math equivalence in worker processes that can be ended, for the library can not be stopped from inside.

math-verify guards itself with an alarm signal, which exists in a process's main thread only, and one call into a
long-integer power hears no signal at all. So it runs in children that are polled and killed.

Invariants
- A call ends within its deadline, in any thread. What was killed is replaced by the next call.
- CPU seconds and memory of one comparison are limited by the kernel: an answer too costly to compare is told apart
  from a machine too busy to compare it, for only the latter is not the policy's doing.
- Lines of JSON over pipes: nothing is unpickled, and `__main__` is not imported again.
- A child ends with its parent: at the end of its input when idle, at its CPU limit when not.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from enum import StrEnum
from functools import cache
from time import monotonic

CPU_S = 5
"""Of one comparison; the kernel counts whole seconds."""
MEMORY_MB = 768
"""Address space of a worker: within the memory of the function `math`, so that a greedy answer ends by this limit and
not the function by its own."""


class Verdict(StrEnum):
    EQUAL = "equal"
    DIFFERENT = "different"
    TOO_COSTLY = "too_costly"
    """It took more than CPU_S or MEMORY_MB."""


class VerifierTimeout(RuntimeError):
    """No verdict within the deadline, and the CPU limit was not reached: the machine is too busy."""


class VerifierCrash(RuntimeError):
    """A worker ended without a verdict, and not by a limit."""


class Verifier:
    """A pool of at most `workers` processes, started as they are needed. Thread-safe."""

    def __init__(self, workers: int):
        self._slots = threading.BoundedSemaphore(workers)
        self._idle: list[_Worker] = []  # append and pop are atomic

    def compare(self, right: str, given: str, deadline_s: float) -> Verdict:
        """Whether two answers in LaTeX mean the same. Raises VerifierTimeout, VerifierCrash."""
        end = monotonic() + deadline_s
        if not self._slots.acquire(timeout=deadline_s):
            raise VerifierTimeout(f"no free worker to compare answers within {deadline_s:g} s")
        try:
            try:
                worker = self._idle.pop()
            except IndexError:
                worker = _Worker()
            verdict = worker.ask([right, given], end - monotonic())
            if worker.alive:
                self._idle.append(worker)
            return verdict
        finally:
            self._slots.release()

    def close(self) -> None:
        """End the idle workers."""
        while self._idle:
            self._idle.pop().kill()


class _Worker:
    def __init__(self) -> None:
        # It sees exactly what this process sees: in a function's bundle there are no site-packages.
        env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-m", "rewards.verifier_worker", str(CPU_S), str(MEMORY_MB)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
        )
        self.alive = True

    def ask(self, question: list[str], seconds: float) -> Verdict:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._obituary()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, seconds)):
                self.kill()
                raise VerifierTimeout(f"no verdict on an answer within {seconds:.1f} s; the machine is too busy")
        reply = self._process.stdout.readline()
        return Verdict(json.loads(reply)) if reply else self._obituary()

    def _obituary(self) -> Verdict:
        self.kill(only_reap=True)
        code = self._process.returncode
        if code == -signal.SIGXCPU:
            return Verdict.TOO_COSTLY
        raise VerifierCrash(f"the process that compares answers ended with {code}")

    def kill(self, only_reap: bool = False) -> None:
        self.alive = False
        if not only_reap:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@cache
def shared() -> Verifier:
    """The pool of this process, one worker for each core."""
    return Verifier(os.cpu_count() or 1)
