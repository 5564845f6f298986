"""`rollmill engine`: what is here, and what is said when it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from infra.engines import vllm_install

RUNNER = CliRunner()


def run(*arguments: str) -> tuple[int, str]:
    result = RUNNER.invoke(app, ["engine", *arguments], env={"COLUMNS": "300"})
    return result.exit_code, result.output


def test_without_vllm_every_command_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    code, output = run("list")
    assert code == 0 and "part of Rollmill" in output and "vllm" not in output
    for command in ("check", "install"):
        code, output = run(command)
        assert code == 2 and "--cpu" in output and len(output.splitlines()) == 1


def test_an_installation_that_is_not_fit_is_listed_with_its_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    python = Path(sys.executable)
    for plugin, stale, text in (
        (None, False, "has no rollmill-vllm"),
        ("0", False, "has rollmill-vllm 0"),
        ("1", True, "lock"),
    ):
        found = vllm_install.Installation(python, "0.32.0", "PATH", plugin, stale)
        monkeypatch.setattr(vllm_install, "installations", lambda found=found: [found])
        assert text in run("list")[1]
        code, output = run("check")
        assert code == 2 and text in output


def test_serving_for_a_run_names_what_is_missing_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLMILL_VLLM_KEY", raising=False)
    code, output = run("serve", "frozen_lake")
    assert code == 2 and "engine.type" in output
    external = "engine={type: vllm, instances: {bandwidth_gpu: 0}, external: [{url: 'http://10.0.0.7:8000'}]}"
    for command in (["engine", "serve", "frozen_lake"], ["train", "frozen_lake", "--dry-run"]):
        result = RUNNER.invoke(app, [*command, "--set", external], env={"COLUMNS": "300"})
        assert result.exit_code == 2 and "ROLLMILL_VLLM_KEY is not set" in result.output
