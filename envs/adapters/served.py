"""The child's side of `envs.adapters.child`; runs under the Python of another library, so it imports little.

Invariants
- What the library prints goes to standard error, never between the answers.
- The process ends, with all in its session, as soon as its standard input does: its parent is gone.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
from dataclasses import asdict
from importlib import import_module
from queue import SimpleQueue
from typing import Any

from envs.protocol import Environment, Step
from rl.trajectory import Problem


def main() -> None:
    """Answer requests until the input ends."""
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    requests: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        for line in asked:
            requests.put(line)
        os.killpg(0, signal.SIGKILL) if os.getpgrp() == os.getpid() else os._exit(70)

    threading.Thread(target=read, name="requests", daemon=True).start()
    asyncio.run(_serve(requests, answers))


async def _serve(requests: SimpleQueue[bytes], answers: Any) -> None:
    environment: Environment | None = None
    while True:
        request = json.loads(await asyncio.to_thread(requests.get))
        try:
            if request["do"] == "make":
                module, _, name = request["environment"].partition(":")
                environment, value = getattr(import_module(module), name)(**request["options"]), None
            else:
                assert environment is not None
                value = await _done(environment, request)
            line = json.dumps({"value": value}, allow_nan=False)
        except Exception as error:
            line = json.dumps({"error": f"{type(error).__name__}: {error}"})
        answers.write(line.encode() + b"\n")
        answers.flush()


async def _done(environment: Environment, request: dict[str, Any]) -> Any:
    match request["do"]:
        case "reset":
            messages = await environment.reset(Problem(**request["problem"]))
            return {
                "messages": [[message.role, message.content] for message in messages],
                "tools": list(environment.tools),
                "fingerprint": environment.fingerprint(),
            }
        case "step":
            step = await environment.step(request["action"])
            assert isinstance(step, Step), f"{type(step).__name__} instead of a Step"
            return {**asdict(step), "observation": [step.observation.role, step.observation.content]}
        case "expert":
            try:
                return environment.expert_action()
            except NotImplementedError:
                return None
        case "random":
            return environment.random_action(random.Random(request["seed"]))
        case "close":
            return await environment.close()
    raise ValueError(f"no request {request['do']!r}")
