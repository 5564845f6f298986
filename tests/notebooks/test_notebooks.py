"""The notebooks run from their first cell to their last, on small settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.command_line import Rollmill

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
SMALL_POOLS = "pools={type: local, cpu: 64, lambda: 8}"


def execute(name: str, where: Path, small: dict[str, Any]) -> nbformat.NotebookNode:
    """Run a notebook in `where`, with other values for what its first code cell sets."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    (at,) = (i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ()))
    unknown = [field for field in small if f"{field} =" not in notebook.cells[at].source]
    assert not unknown, f"{name} has no parameters {unknown}"
    text = "\n".join(f"{field} = {value!r}" for field, value in small.items())
    notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(text))
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(where)}}).execute()
    return notebook


def pictures(notebook: nbformat.NotebookNode) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_kept_without_output_and_says_what_it_is(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert notebook.cells[0].source.startswith("# ") and len(code) < len(notebook.cells)
    told = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown").splitlines()
    titles = [line for line in told if line.startswith("# ")]
    assert titles == [notebook.cells[0].source.splitlines()[0]], "one title; a paragraph is no heading"
    assert not any(line.startswith(("# #", "#\n")) or len(line) > 90 for line in told if line.startswith("#"))


@pytest.mark.slow
def test_a_cluster_is_planned(tmp_path: Path) -> None:
    small = {"STEPS": 4, "GROUPS": 8, "ALPHAS": (1, 2), "DEVIATIONS": (1, 10), "ROUNDS": 1}
    notebook = execute("cluster", tmp_path, small)
    assert pictures(notebook) == 3


@pytest.fixture
def here(rollmill: Rollmill, monkeypatch: pytest.MonkeyPatch) -> Rollmill:
    """Kernels and what they start find the session's servers, and this code."""
    root = str(NOTEBOOKS.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]))
    return rollmill


@pytest.mark.full
@pytest.mark.server
@pytest.mark.timeout(1200)
def test_the_quickstart_trains_and_shows_it(here: Rollmill, tmp_path: Path) -> None:
    small = {"STEPS": 4, "PROBLEMS": 8, "NAME": "nb-quickstart", "OVERRIDES": [SMALL_POOLS, "training.group_size=4"]}
    notebook = execute("quickstart", tmp_path, small)
    assert pictures(notebook) >= 2
    assert here.log("nb-quickstart").ledger.head == 4


@pytest.mark.full
@pytest.mark.server
@pytest.mark.timeout(1200)
def test_an_environment_of_ones_own_is_made_and_trained(here: Rollmill, tmp_path: Path) -> None:
    small = {"STEPS": 3, "PROBLEMS": 8, "OVERRIDES": [SMALL_POOLS, "training.group_size=4"]}
    notebook = execute("your_environment", tmp_path, small)
    assert pictures(notebook) == 2
    assert (tmp_path / "my_game" / "my_game" / "careful.py").is_file()


@pytest.mark.full
@pytest.mark.server
@pytest.mark.timeout(1200)
def test_trajectories_are_shown_token_by_token(here: Rollmill, tmp_path: Path) -> None:
    small = {"STEPS": 4, "NAME": "nb-looked-into", "OVERRIDES": [SMALL_POOLS, "evaluation.problems=8"]}
    notebook = execute("trajectories", tmp_path, small)
    assert pictures(notebook) == 2
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("started under version" in output.get("data", {}).get("text/html", "") for output in outputs) == 2


@pytest.mark.full
@pytest.mark.server
@pytest.mark.timeout(1200)
def test_settings_are_compared(here: Rollmill, tmp_path: Path) -> None:
    variants = {
        "alpha 0": ["staleness.alpha=0"],
        "first": [
            "staleness.alpha=1",
            "rollout.redundancy={mode: first_finished, extra_members: 2, extra_groups: 2}",
        ],
    }
    small = {"STEPS": 3, "SCALE": 0.005, "OVERRIDES": [SMALL_POOLS, "training.group_size=4"], "VARIANTS": variants}
    notebook = execute("alpha_and_redundancy", tmp_path, small)
    assert pictures(notebook) == 4


@pytest.mark.full
@pytest.mark.server
@pytest.mark.timeout(1200)
def test_tenants_share_a_base(here: Rollmill, tmp_path: Path) -> None:
    notebook = execute("tenants", tmp_path, {"STEPS": 2, "TENANTS": ("ann", "bob")})
    assert pictures(notebook) >= 2
