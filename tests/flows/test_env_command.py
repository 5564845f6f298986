"""`rollmill env`: what a person sees and may type."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app

RUNNER = CliRunner()
ROOT = Path(__file__).parents[2]


def run(*arguments: str, typed: str = "") -> tuple[int, str]:
    result = RUNNER.invoke(app, ["env", *arguments], input=typed, env={"COLUMNS": "200"})
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_list_names_every_environment_that_ships() -> None:
    code, output = run("list")
    assert code == 0 and "calculator" in output and "frozen_lake" in output


def test_a_person_may_call_tools_by_name_and_answer() -> None:
    typed = ":add a=1 b=2\n:add a=x\n:nothing\n:add a=1 b=5000\n12\\\n3\n"
    code, output = run("play", "tests.envs.quiz:Quiz", "--set", "largest=50", typed=typed)
    assert code == 0
    for line in (
        'tool schema  {"name": "add"',
        '{"name": "add", "arguments": {"a": 1, "b": 2}}',
        "tool  3",
        "mistake  bad_arguments",
        "not said  :nothing is none of :expert, :random, :quit, :add",
        "mistake  tool_error",
        "reward  0",
        "end  4 turns, reward 0",
    ):
        assert line in output, output


def test_the_expert_plays_for_a_person() -> None:
    code, output = run("play", "calculator", "--seed", "3", "--split", "heldout", typed=":expert\n" * 6)
    assert code == 0 and "reward 1" in output and 'info  {"end": "right"}' in output


def test_data_is_fetched_first_and_what_is_missing_is_said_with_its_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envs.data.corpus.HOME", tmp_path)
    code, output = run("play", "shop")
    assert code == 2 and "the corpus shop is not on this machine" in output and "`rollmill env prepare shop`" in output
    assert run("play", "shop", "--set", "corpus=excerpt")[0] == 0
    code, output = run("prepare", "calculator")
    assert code == 0 and "calculator  is ready" in output


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("apt-get") is None, reason="the corpora are made from Debian's packages")
@pytest.mark.parametrize("name", ["shop", "knowledge_search"])
def test_data_is_prepared_once_and_then_played_with(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envs.data.corpus.HOME", tmp_path)
    for _ in range(2):
        code, output = run("prepare", name)
        assert code == 0 and f"{name}  is ready" in output, output
    assert run("play", name)[0] == 0


def test_the_end_of_input_gives_up() -> None:
    code, output = run("play", "frozen_lake")
    assert code == 0 and "end  0 turns, reward 0" in output


def test_a_check_says_what_holds_and_what_does_not() -> None:
    code, output = run("check", "tests.envs.quiz:Quiz", "--problems", "10")
    assert code == 0 and "at random 0.00, expert 1.00" in output and "no" not in output.split("mend")[1].split()
    code, output = run("check", "tests.envs.test_check:Easy", "--problems", "10")
    assert code == 1 and "at random 1.00" in output and "random_action" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "calculater"], ["calculater", "did you mean 'calculator'"]),
        (["play", "calculator", "--set", "sise=3"], ["sise", "unknown option"]),
        (["play", "calculator", "--set", "largest"], ["--set 'largest'", "option=value"]),
        (["play", "calculator", "--set", "largest=[1"], ["--set 'largest=[1'", "not YAML"]),
        (["play", "calculator", "--set", "largest=2024-01-01"], ["--set: environment_options", "JSON"]),
        (["play", "calculator", "--split", "test"], ["--split 'test'", "heldout"]),
        (["play", "tests.envs.test_check:WrongOpening"], ["reset gave", "no list of Messages"]),
        (["check", "agent"], ["'agent' is an agent", "train or evaluate"]),
        (["play", "verifiers"], ["'verifiers' is an agent", "train or evaluate"]),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], words: list[str]) -> None:
    code, output = run(*arguments)
    assert code == 2 and len(output.strip().splitlines()) == 1, output
    assert all(word in output for word in words), output


def test_a_package_adds_an_environment_with_one_file_and_an_entry_point(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text((ROOT / "tests" / "envs" / "quiz.py").read_text())
    metadata = tmp_path / "sums-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sums\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[rollmill.environments]\nsums = sums:Quiz\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "env", "check", "sums", "--problems", "5"],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and "expert 1.00" in done.stdout, done.stdout + done.stderr


def test_the_command_line_imports_nothing_heavy_until_a_command_needs_it() -> None:
    asked = (
        "import sys, flows.cli\n"
        "tops = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(tops & {'envs', 'infra', 'tasks', 'pydantic', 'torch', 'prefect', 'boto3', 'numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr
