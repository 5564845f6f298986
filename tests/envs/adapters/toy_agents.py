"""An agent as `envs.adapters.hosts` plays it, which behaves and misbehaves as its problem's domain says."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rl.trajectory import Problem


class Toy:
    """Writes what happens to it into the directory `notes`."""

    def __init__(self, notes: str):
        if not notes:
            raise ValueError("notes must be a directory")
        self.notes = Path(notes)
        self.here = self.most = 0

    async def __aenter__(self) -> Toy:
        return self

    async def __aexit__(self, *raised: Any) -> None:
        (self.notes / "closed").touch()

    async def play(self, problem: Problem, client: dict[str, Any]) -> Any:
        print("this is no answer")
        self.here += 1
        self.most = max(self.most, self.here)
        try:
            match problem.domain:
                case "wait":  # until as many were here at once as its index says
                    while self.most < problem.index:
                        await asyncio.sleep(0.01)
                    return {"pid": os.getpid(), "seed": problem.seed, "key": client["api_key"]}
                case "raise":
                    raise ZeroDivisionError("no answer")
                case "die":
                    sys.stderr.write("these are my last words")
                    sys.stderr.flush()
                    os._exit(3)
                case "start":  # a process in a session of its own
                    self.child = subprocess.Popen(
                        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
                    )
                    return {"pid": os.getpid(), "child": self.child.pid}
            (self.notes / "begun").touch()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            (self.notes / "cancelled").touch()
            raise
        finally:
            self.here -= 1
