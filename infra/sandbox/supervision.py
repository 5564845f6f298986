"""Runs one started program to its end: feeds it, collects what it writes, and enforces what the kernel does not.

Invariants
- It ends: at the deadline, or when a bound is broken, the tree is killed; if even that does not end it within
  `GRACE_S`, that is a SandboxFailure.
- Memory here is bounded by the output limit, however much the program writes.
- A program that ran out of time while this supervisor, which asks for next to nothing, was itself kept from running
  for `STARVED` of it, is a SandboxFailure: the machine stood still, not the program. No program can bring that about
  by sleeping or looping. (That it had to share its core with others is not known here, and counts as its own time.)
"""

from __future__ import annotations

import os
import selectors
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal, Protocol

from infra.sandbox.errors import SandboxFailure
from infra.sandbox.limits import Limits

TICK_S = 0.05
"""How often bounds that must be looked at are looked at."""
GRACE_S = 10.0
STARVED = 0.5
"""Share of the time limit; what comes late by less is the program's own loss."""
CHUNK = 2**16

Isolation = Literal["full", "rlimits"]
Broken = Literal["time", "memory", "disk", "output", "cancelled"]


class Running(Protocol):
    """A program that was started, in whatever isolation."""

    process: subprocess.Popen[bytes]

    def kill(self) -> None: ...

    def bound_broken(self, limits: Limits) -> Broken | None:
        """The bound of those that must be looked at that is broken, if any."""


@dataclass
class Collected:
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    broken: Broken | None = None
    """The bound that it was killed for."""


def supervise(running: Running, stdin: bytes, limits: Limits, cancelled: threading.Event) -> Collected:
    """Wait for the end of the program, or bring it about. Blocks. Raises SandboxFailure."""
    process, collected = running.process, Collected()
    assert process.stdin and process.stdout and process.stderr
    outputs = {process.stdout: collected.stdout, process.stderr: collected.stderr}
    bound = limits.output_kb * 1024
    left = memoryview(stdin)
    now, look_at, starved_s = monotonic(), 0.0, 0.0
    deadline = now + limits.seconds
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdin, *outputs):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_WRITE if stream is process.stdin else selectors.EVENT_READ)
        while process.poll() is None:
            for key, _ in selector.select(TICK_S) if outputs.keys() & _open(selector) else ():
                if key.fileobj is process.stdin:
                    left = _feed(process.stdin.fileno(), left)
                    ended = not left
                else:
                    ended = not _read(key.fd, outputs[key.fileobj], bound)  # type: ignore[index]
                if ended:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
            if not outputs.keys() & _open(selector):  # it has nothing more to say, and is about to end
                with suppress(subprocess.TimeoutExpired):
                    process.wait(TICK_S)
            before, now = now, monotonic()
            if collected.broken is None:
                starved_s += max(0.0, now - before - TICK_S)
                collected.broken = _bound_broken(collected, bound, now > deadline, cancelled)
                if collected.broken is None and now >= look_at:
                    collected.broken, look_at = running.bound_broken(limits), now + TICK_S
                if collected.broken:
                    running.kill()
                    deadline = now + GRACE_S
            elif now > deadline:
                raise SandboxFailure(f"sandbox: process {process.pid} was killed but did not end in {GRACE_S:g} s")
        for stream in outputs.keys() & _open(selector):
            while len(outputs[stream]) <= bound and _read(stream.fileno(), outputs[stream], bound):
                pass
    running.kill()  # what it left behind, where its end does not end that
    if collected.broken == "time" and starved_s > STARVED * limits.seconds:
        raise SandboxFailure(
            f"sandbox: of the {limits.seconds:g} s of a program this machine stood still for {starved_s:.1f} s"
        )
    collected.broken = collected.broken or _bound_broken(collected, bound, False, cancelled)
    del collected.stdout[bound:], collected.stderr[bound:]
    return collected


def _open(selector: selectors.BaseSelector) -> set[object]:
    return {key.fileobj for key in selector.get_map().values()}


def _bound_broken(collected: Collected, bound: int, late: bool, cancelled: threading.Event) -> Broken | None:
    if cancelled.is_set():
        return "cancelled"
    if max(len(collected.stdout), len(collected.stderr)) > bound:
        return "output"
    return "time" if late else None


def _feed(fd: int, left: memoryview) -> memoryview:
    """What is still to be written; nothing once the program reads no more."""
    try:
        return left[os.write(fd, left[:CHUNK]) :] if left else left
    except BlockingIOError:
        return left
    except OSError:
        return left[:0]


def _read(fd: int, into: bytearray, bound: int) -> bool:
    """Read what there is; False at the end. Beyond the bound it is read and forgotten."""
    try:
        chunk = os.read(fd, CHUNK)
    except BlockingIOError:
        return False
    if len(into) <= bound:
        into += chunk
    return bool(chunk)
