"""A project as `rollmill init` begins it: it runs as it is, in a place of its own, and it learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from tests.command_line import Rollmill

Python = Callable[..., str]


def init(directory: Path) -> Path:
    result = CliRunner().invoke(app, ["init", str(directory)])
    assert result.exit_code == 0, result.output
    return directory


def python(directory: Path, interpreter: str = sys.executable, env: dict[str, str] | None = None) -> Python:
    """Runs `python ...` in the project; its output."""

    def run(*arguments: str, timeout: float = 120) -> str:
        done = subprocess.run(
            [interpreter, *arguments], cwd=directory, env=env, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, f"{arguments}:\n{done.stdout}{done.stderr}"
        return done.stdout

    return run


def test_nothing_is_written_over_and_a_bad_name_is_one_line(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for name, words in (("full", "not an empty"), ("My Project", "small letters"), ("json", "exists already")):
        result = CliRunner().invoke(app, ["init", str(tmp_path / name)])
        assert result.exit_code == 2 and words in result.output, result.output
        assert len(result.output.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize(
    ("directory", "words"),
    [(".", "the directory you are in"), ("../taken.txt/new-project", "can not be made")],
)
def test_a_place_where_no_directory_can_be_put_is_one_line(tmp_path, monkeypatch, directory, words):
    (tmp_path / "here").mkdir()
    (tmp_path / "taken.txt").touch()
    monkeypatch.chdir(tmp_path / "here")
    for command in (["init", directory], ["export", "frozen_lake", "--to", directory]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2 and words in result.output, (result.output, result.exception)
        assert len(result.output.strip().splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "here", tmp_path / "taken.txt"]


def test_an_empty_directory_behind_a_link_is_filled(tmp_path):
    (tmp_path / "my-project").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "my-project")
    assert (init(tmp_path / "link") / "config.yaml").is_file() and (tmp_path / "link").is_symlink()


@pytest.mark.slow
def test_a_new_project_passes_its_own_tests_and_the_dry_run(tmp_path):
    directory = init(tmp_path / "my-project")
    run = python(directory, env={**os.environ, "PYTHONPATH": str(directory)})
    run("-m", "ruff", "check", "--line-length=120", ".")
    run("-m", "ruff", "format", "--check", "--line-length=120", ".")
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", "tests")
    assert "fine" in run("-m", "flows.cli", "train", "config.yaml", "--dry-run")


@pytest.mark.full
@pytest.mark.server
@pytest.mark.timeout(1200)
def test_a_newcomer_gets_from_nothing_to_a_learning_curve(rollmill: Rollmill, tmp_path):
    """An environment, a reward and an algorithm in a package of one's own, installed as any other."""
    directory = init(tmp_path / "newcomer")
    lines = sum(len(p.read_text().splitlines()) for p in directory.rglob("*") if p.suffix in (".py", ".yaml", ".toml"))
    assert lines <= 150
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True, timeout=120)
    fresh = tmp_path / "venv" / "bin" / "python"
    where = subprocess.check_output([fresh, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    for path in (sysconfig.get_path("purelib"), str(Path(__file__).parents[2])):  # as if `pip install rollmill` were
        with (Path(where.strip()) / "rollmill-here.pth").open("a") as file:
            file.write(path + "\n")
    run = python(directory, str(fresh), {**rollmill.env, "ROLLMILL_HOME": str(tmp_path / "home")})
    python(directory)(
        "-m", "pip", "--python", str(fresh), "install", "-q", "--no-build-isolation", "--no-deps", "-e", "."
    )
    run("-m", "flows.cli", "train", "config.yaml", timeout=900)
    report = json.loads((tmp_path / "home" / "runs" / "default.newcomer" / "report.json").read_text())
    figures = {f["name"]: f["value"] for f in report["figures"]}
    assert figures["heldout_reward_after"] >= figures["heldout_reward_before"] + 0.15, figures
    assert figures["wall_s"] < 900
    run("-m", "flows.cli", "export", "config.yaml", "--to", "model")
    run("-c", "from transformers import AutoModelForCausalLM as M; M.from_pretrained('model')")
