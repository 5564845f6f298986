"""Every benchmark that README and docs/ tell runs to its end, in its smallest setting, and tells its figures.

What it measures is not judged here: a shared machine's figures belong beside the goals, not into a test.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.docs.commands import ROOT, commands, ran

SMALLEST = {
    "policies": ("--quick",),
    "simulator": ("--quick",),
    "sandbox": ("--quick",),
    "environments": ("--quick",),
    "routing": ("--quick",),
    "orchestration": ("--quick",),
    "trainer_step": ("--quick",),
    "buffer": ("--quick",),
    "weights": ("--quick",),
    "serverless_reward": ("--quick",),
    "crash": ("--kills", "10", "--real", "1"),
    "soak": ("--minutes", "2"),
    "proxy": ("--quick",),
    "tenants": ("--tiny",),
    "time_to_reward": ("--quick",),
    "async_modes": ("--quick",),
    "async_sweeps": ("alpha", "--quick"),
}


def test_these_are_the_benchmarks_told() -> None:
    modules = {c.words[2].partition(".") for c in commands() if c.words[:2] == ("python", "-m")}
    assert {name for package, _, name in modules if package == "benchmarks"} - {"<name>"} == SMALLEST.keys()


@pytest.mark.full
@pytest.mark.server
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_runs_to_its_end(name: str, tmp_path: Path) -> None:
    own = {"ROLLMILL_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    code, told = ran(f"benchmarks.{name}", *SMALLEST[name], "--json", cwd=ROOT, log=tmp_path / "log", **own)
    assert told.splitlines()[-1].startswith("{"), f"exit code {code}: {told[-4000:]}"
    last = json.loads(told.splitlines()[-1])
    missed = any(figure["met"] is False for figure in last["figures"])
    assert last["benchmark"] == name and (code == 0 or missed), f"exit code {code}: {told[-4000:]}"
    figures = {figure["name"]: figure["value"] for figure in last["figures"]}
    assert figures and len(figures) == len(last["figures"]), "no figures, or one told twice"
    assert all(math.isfinite(value) for value in figures.values()), figures
    assert "left out" not in told and " failed: " not in told, told[-4000:]
