"""Two gloo processes train like one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.training.test_grpo import difference, flat
from tests.training.two_ranks import CASES, run

ROOT = Path(__file__).parents[2]
LAUNCH = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
          "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m"]  # fmt: skip
FIGURES = (
    "entropy",
    "ess",
    "mismatch_kl",
    "tokens",
    "ratio_max",
    "capped_fraction",
    "loss",
    "grad_norm",
    "kl",
)


@pytest.mark.slow
def test_followers_outwait_a_batch_that_is_late(tmp_path: Path) -> None:
    """A batch may take any time, as long as group after group arrives."""
    command = [sys.executable, "-m", "tests.training.late_batch", str(tmp_path / "meeting")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said


@pytest.mark.slow
def test_two_processes_equal_one(base: Path, tmp_path: Path) -> None:
    """Gradients of the second of two steps, and all figures."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    command = [sys.executable, *LAUNCH, "tests.training.two_ranks", str(base), str(two)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    both = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT, env=environment
    )
    assert both.returncode == 0, both.stderr
    for case in CASES:
        run(base, one, case)
        got, want = (flat(load_file(where / f"{case}.safetensors")) for where in (two, one))
        assert difference(got, want) < 2e-6, case
        rank0, rank1, alone = (
            json.loads(p.read_text())
            for p in (two / f"{case}-0.json", two / f"{case}-1.json", one / f"{case}-0.json")
        )
        assert rank0["hashes"] == rank1["hashes"], case
        for name in FIGURES:
            assert rank0["figures"][0][name] == pytest.approx(
                alone["figures"][0][name], rel=1e-5, abs=1e-7
            ), (case, name)
            assert rank1["figures"][0][name] == rank0["figures"][0][name], (case, name)
