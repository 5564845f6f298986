"""A user's package of rewards that behave and misbehave, written where a bundle finds it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = '''
import os, time
from pathlib import Path
from rl.serverless import serverless

toy = serverless("toys", memory_mb=400, timeout_s=120)
hasty = serverless("hasty", memory_mb=400, timeout_s=1)

@toy
def good(view, factor=1.0):
    print("scoring", view.problem.index)
    return {"good": factor * view.environment_reward}

@toy
def process(view):
    return {"pid": os.getpid()}

@toy
def waiting(view, gate):
    """Scores once the file `gate` exists; `gate + "-pid"` says that it has begun."""
    Path(gate + "-" + str(os.getpid())).touch()
    while not Path(gate).exists():
        time.sleep(0.01)
    return {"waited": 1.0}

@hasty
def endless(view, begun):
    (Path(begun) / str(os.getpid())).touch()
    while True:
        time.sleep(1)

@toy
def crash(view, once=""):
    """Ends its process; with `once` the first time only."""
    if once and Path(once).exists():
        return {"crash": 1.0}
    if once:
        Path(once).touch()
    os._exit(3)

@toy
def hog(view):
    held = bytearray(b"x" * (500 << 20))
    time.sleep(60)

@toy
def many(view, parts):
    return {f"part-{i}": 1.0 for i in range(parts)}

@toy
def poison(view, what):
    if what == "raise":
        raise ZeroDivisionError("no answer")
    return {"nan": {"p": float("nan")}, "number": 5, "empty": {}, "text": {"p": "1"}, "none": None}[what]

def size(view):
    return {"size": float(len(view.messages[0].content))}

size = toy(size)

def plain(view):
    return {"pid": os.getpid()}

def garbage(event, context):
    """A handler, not a reward."""
    return [None, {"results": []}, {"results": [{"parts": {"p": None}}]}, {"results": [7]}][event["options"]["what"]]
'''


@contextmanager
def installed(directory: Path) -> Iterator[str]:
    """The import package `toy_rewards`, for the block."""
    (directory / "toy_rewards").mkdir()
    (directory / "toy_rewards" / "__init__.py").write_text(SOURCE)
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    try:
        yield "toy_rewards"
    finally:
        sys.path.remove(str(directory))
        sys.modules.pop("toy_rewards", None)
