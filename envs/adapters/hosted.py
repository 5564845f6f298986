"""The other side of `envs.adapters.hosts`: an agent under the Python of its own library, which plays many episodes at
once. It imports little.

    {"agent": "module:Class", "options": {...}}     first; answered by {"ready": true} or {"error": ...}
    {"id": 7, "problem": {...}, "client": {...}}    play; answered by {"id": 7, "value": ...} or {"id": 7, "error": ...}
    {"cancel": 7}                                   no longer wanted; not answered

Invariants
- What the library prints goes to standard error, never between the answers.
- The process ends when its standard input does, for then its parent is gone or has done with it: politely, within
  `POLITE_S`; after that it is killed, and whatever it started with it, in sessions of their own, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from rl.trajectory import Problem

POLITE_S = 10.0


def main() -> None:
    """Answer requests until the input ends."""
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    try:
        asyncio.run(_serve(asked, answers))
    finally:
        _end()


async def _serve(asked: Any, answers: Any) -> None:
    requests: asyncio.Queue[bytes | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in asked:
            loop.call_soon_threadsafe(requests.put_nowait, line)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(requests.put_nowait, None)
        threading.Event().wait(POLITE_S)
        _end()

    def say(**answer: Any) -> None:
        answers.write(json.dumps(answer, allow_nan=False).encode() + b"\n")
        answers.flush()

    threading.Thread(target=read, name="requests", daemon=True).start()
    first = await requests.get()
    if first is None:
        return
    wanted = json.loads(first)
    try:
        module, _, name = wanted["agent"].partition(":")
        made = await asyncio.to_thread(lambda: getattr(import_module(module), name)(**wanted["options"]))
        agent = await made.__aenter__()
    except Exception as error:
        return say(error=_named(error))
    playing: dict[int, asyncio.Task[None]] = {}

    async def play(request: dict[str, Any]) -> None:
        try:
            value = await agent.play(Problem(**request["problem"]), request["client"])
            say(id=request["id"], value=value)
        except Exception as error:
            say(id=request["id"], error=_named(error))
        finally:
            playing.pop(request["id"], None)

    try:
        say(ready=True)
        while (line := await requests.get()) is not None:
            request = json.loads(line)
            if "cancel" in request:
                if (task := playing.get(request["cancel"])) is not None:
                    task.cancel()
            else:
                playing[request["id"]] = asyncio.create_task(play(request))
    finally:
        for task in list(playing.values()):
            task.cancel()
        await asyncio.gather(*playing.values(), return_exceptions=True)
        await made.__aexit__(None, None, None)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _end() -> None:
    """Kill all that this process started, and itself."""
    for pid in reversed(descendants(os.getpid())):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


def descendants(pid: int) -> list[int]:
    """Processes that a process started, and those that these did; empty where there is no /proc."""
    found = [pid]
    for parent in found:  # grows as it goes
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                found += map(int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split())
    return found[1:]
