"""`rollmill rewards`: what a person types and sees."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from tests.serverless.conftest import Serve


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["rewards", *words], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, ["rewards", *words], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    return result.output


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLMILL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_list_shows_what_runs_where() -> None:
    lines = {line.split("│")[1].strip(): line for line in run("list").splitlines() if "│" in line}
    assert "1024 MB" in lines["math"] and "math-verify" in lines["math"] and "MB" not in lines["outcome"]


def test_bundle_writes_a_package(tmp_path: Path) -> None:
    told = run("bundle", "math", "--to", str(tmp_path / "b.zip"))
    assert "Lambda's limit: 250" in told
    with zipfile.ZipFile(tmp_path / "b.zip") as archive:
        assert list(json.loads(archive.read("rollmill.json"))) == ["math"]


@pytest.mark.slow
def test_invoke_and_logs_on_this_machine() -> None:
    told = run("invoke", "math", "--said", r"so \boxed{0.5}", "--info", "{answer: 1/2}", "--local")
    assert '"math": 1.0' in told and "REPORT" in told
    assert "REPORT" in run("logs", "math", "--local")


@pytest.mark.slow
def test_invoke_where_the_environment_says(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()
    monkeypatch.setenv("AWS_ENDPOINT_URL_LAMBDA", served.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    told = run("invoke", "toy_rewards:poison", "--said", "x", "--option", "what=nan", "--prefix", "t")
    assert "not a finite number" in told
    elsewhere = refused("invoke", "toy_rewards:good", "--said", "x", "--prefix", "other")
    assert "function other-toys: ResourceNotFound" in elsewhere


def test_mistakes_are_one_line() -> None:
    assert "'outcome' is no function" in refused("invoke", "outcome", "--said", "x")
    assert "nothing is named 'maths'; did you mean 'math'?" in refused("logs", "maths")
    assert "was never started here" in refused("logs", "math", "--local")
    assert "--info 'x' is not a mapping" in refused("invoke", "math", "--said", "x", "--info", "x", "--local")
