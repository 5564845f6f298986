"""The command line without a run: bad input is one clear line, nothing heavy is imported for a dry run."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from flows.cli import app

RUNNER = CliRunner()


def run(*arguments: str, **env: str):
    return RUNNER.invoke(app, list(arguments), env={"COLUMNS": "200", **env})


@pytest.mark.parametrize("preset", ["calculator", "frozen_lake"])
def test_every_preset_passes_its_dry_run(preset):
    result = run("train", preset, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "fine" in result.output


def test_the_dry_run_does_not_import_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from flows.cli import app;"
        "r = CliRunner().invoke(app, ['train', 'calculator', '--dry-run']); assert r.exit_code == 0, r.output;"
        "heavy = {'torch', 'transformers', 'trl', 'mlflow', 'prefect'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "override, words",
    [
        ("training.step=3", ["training.step", "did you mean 'steps'"]),
        ("staleness.alpha=-1", ["staleness.alpha", "-1"]),
        ("training.advantage=nonsense", ["training.advantage", "nonsense", "grpo"]),
        ("domains.0.environment=calculater", ["environment", "calculater", "calculator"]),
        ("domains.0.environment_options={sizes: 3}", ["environment_options", "sizes"]),
        ("domains.0.reward=no.such:thing", ["reward", "no.such:thing"]),
        ("model.source={type: pretrained, path: nowhere}", ["model.source.path", "nowhere"]),
        ("pools.cpu=2", ["pools.cpu", "group_size"]),
        ("rollout.max_new_tokens=9999", ["max_new_tokens", "max_tokens"]),
        ("rollout.max_tokens=2049", ["rollout.max_tokens (2049)", "model takes (2048)", "lower it to 2048"]),
        ("engine={type: vllm, max_length: 255}", ["rollout.max_tokens (256)", "engine.max_length (255)"]),
        ("no-equals-sign", ["--set", "field.path=value"]),
        ("name=[1", ["--set", "name=[1", "not YAML"]),
        ("name=2024-13-45", ["--set", "name=2024-13-45", "month must be"]),
    ],
)
def test_a_mistake_is_one_line_that_names_field_value_and_mend(override, words):
    result = run("train", "calculator", "--dry-run", "--set", override)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.output, result.output
    assert len(result.output.strip().splitlines()) == 1


def test_an_unknown_configuration_names_the_presets():
    result = run("train", "no-such-file.yaml", "--dry-run")
    assert result.exit_code == 2
    assert "calculator" in result.output


@pytest.mark.parametrize(
    "content, words", [(b"name: caf\xe9\n", "UTF-8"), (None, "File name too long")], ids=["no text", "no file name"]
)
def test_a_file_that_can_not_be_read_is_one_line(tmp_path, content, words):
    path = tmp_path / ("run.yaml" if content is not None else "x" * 300)
    if content is not None:
        path.write_bytes(content)
    result = run("train", str(path), "--dry-run")
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert words in result.output and len(result.output.strip().splitlines()) == 1


def test_an_s3_endpoint_that_does_not_answer_is_one_clear_error(tmp_path):
    result = run(
        "versions",
        "list",
        "calculator",
        AWS_ACCESS_KEY_ID="x",
        AWS_SECRET_ACCESS_KEY="y",
        AWS_ENDPOINT_URL_S3="http://127.0.0.1:9",
        ROLLMILL_HOME=str(tmp_path),
    )
    assert result.exit_code == 2
    assert "127.0.0.1:9" in result.output and "Traceback" not in result.output


def test_help_reads_well():
    result = run("--help")
    assert result.exit_code == 0
    for command in ("demo", "train", "evaluate", "versions", "samples", "gc", "doctor", "up", "down"):
        assert command in result.output
