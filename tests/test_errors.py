"""Every named error reaches another process as itself: Dask turns one that can not be restored into an Exception."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl.errors import RollmillError

ROOT = Path(__file__).parents[1]
PACKAGES = ("rl", "envs", "rewards", "infra", "tasks", "flows", "sim", "benchmarks")
SAMPLES: dict[str, Any] = {"int": 7, "float": 2.5, "Path": Path("a/b"), "list[int]": [3, 4]}
"""Arguments by annotation; anything else gets a string."""


def import_everything() -> None:
    for package in filter(lambda name: (ROOT / name / "__init__.py").exists(), PACKAGES):
        for module in pkgutil.walk_packages([str(ROOT / package)], f"{package}."):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] in PACKAGES:
                    raise  # else an extra that is not installed


def errors(base: type[RollmillError] = RollmillError) -> Iterator[type[RollmillError]]:
    yield base
    for child in base.__subclasses__():
        yield from errors(child)


def make(kind: type[RollmillError]) -> RollmillError:
    if kind.__init__ is Exception.__init__:
        return kind("a message", 3)
    parameters = list(inspect.signature(kind).parameters.values())
    values = {p.name: SAMPLES.get(str(p.annotation), f"some {p.name}") for p in parameters}
    keywords = {p.name: values.pop(p.name) for p in parameters if p.kind is p.KEYWORD_ONLY}
    return kind(*values.values(), **keywords)


@pytest.mark.slow
def test_every_named_error_survives_pickling() -> None:
    import_everything()
    kinds = {kind for kind in errors() if kind.__module__.partition(".")[0] in PACKAGES}
    assert len(kinds) > 50
    for kind in kinds:
        error = make(kind)
        error.add_note("a note")
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            again = pickle.loads(pickle.dumps(error, protocol))
            assert type(again) is kind
            assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error)), kind
