"""What the adapters share: from another library's values to ours."""

from __future__ import annotations

import math
import random
from typing import Any

from envs.protocol import in_split
from rl.trajectory import Problem


def seed_of(problem: Problem) -> int:
    """The seed that another library gets, from 0 to 2**31 - 1. It is all that tells its problems apart from outside,
    so the split is decided by it: give it as the fingerprint."""
    rng = random.Random(problem.seed)
    while not in_split(seed := rng.getrandbits(31), problem.split):
        pass
    return seed


def plain(value: Any) -> Any:
    """The JSON value that comes nearest: arrays as lists, what is not finite as None, the rest as its text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if hasattr(value, "tolist"):  # numpy's
        return plain(value.tolist())
    return str(value)
