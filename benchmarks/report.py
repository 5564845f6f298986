"""The shape in which every benchmark says what it measured.

A benchmark prints whatever helps a reader and, as its last line, one JSON object:
`{"benchmark": ..., "figures": [{"name", "value", "unit", "goal", "met"}, ...], "machine": {...}}`.

Invariant: a figure without a goal has `goal` and `met` null; nothing is claimed for it.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import psutil

PACKAGES = ("torch", "transformers", "trl", "dask", "distributed", "prefect")


@dataclass(frozen=True)
class Figure:
    """One measured number. `better` says on which side of `goal` it should lie; at the goal it is met."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    better: Literal["lower", "higher"] = "lower"

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value <= self.goal if self.better == "lower" else self.value >= self.goal

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "unit": self.unit, "goal": self.goal, "met": self.met}


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def emit(benchmark: str, figures: Sequence[Figure]) -> None:
    """Print a line per figure and then the JSON object."""
    verdict = {None: "", True: "met", False: "MISSED"}
    for figure in figures:
        goal = (
            ""
            if figure.goal is None
            else f"goal {'<=' if figure.better == 'lower' else '>='} {figure.goal:g}"
        )
        print(
            f"{figure.name:40s} {figure.value:12.4g} {figure.unit:20s} {goal:14s} {verdict[figure.met]}".rstrip()
        )
    found = {
        "benchmark": benchmark,
        "figures": [figure.as_json() for figure in figures],
        "machine": machine(),
    }
    print(json.dumps(found), flush=True)
