"""`rollmill runs` on runs in a store."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from flows.configure import load_config
from flows.home import Home
from infra.store.objects import ObjectStore
from rl.config.infrastructure import StoreSection
from rl.config.load import dumps
from tests.store.runs import Run


@pytest.fixture
def store(own_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setenv("ROLLMILL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    bucket = StoreSection(bucket="runs-command")
    store = ObjectStore.connect(bucket)
    store.ensure_bucket()
    return store


def made(store: ObjectStore, tmp_path: Path, name: str, rewards: list[float], *sets: str) -> Run:
    config = load_config("frozen_lake", [f"name={name}", "store.bucket=runs-command", *sets])
    store.put(f"{config.prefix}config.json", dumps(config).encode())
    run = Run(store, config.prefix, tmp_path / name)
    for at, reward in enumerate([0.0, *rewards]):
        metrics = {"reward": reward, "entropy": 1.0, "tokens": 100.0} if at else {}
        ledger = run.log.ledger
        assert ledger.next_version == at
        run.log.append_step(state=run.state(at), weights_sha256="w", alpha=1, metrics=metrics)
    return run


def runs(*arguments: str) -> Result:
    from flows.cli import app

    return CliRunner().invoke(app, ["runs", *arguments], env={"COLUMNS": "200"})


def good(*arguments: str) -> str:
    result = runs(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


FALLS = [0.2, 0.4, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9, 0.5, 0.2, 0.2, 0.2, 0.2, 0.2]


def test_ls_and_status_tell_how_far_each_run_came_and_what_calls_for_a_look(store: ObjectStore, tmp_path: Path) -> None:
    made(store, tmp_path, "well", [0.1 * at for at in range(8)])
    made(store, tmp_path, "ill", FALLS, "tenant=acme")
    listed = good("ls", "--bucket", "runs-command").splitlines()
    ill, well = (next(line for line in listed if name in line) for name in ("acme/ill", "default/well"))
    assert "15/20" in ill and "0.200" in ill and "reward collapse" in ill
    assert "8/20" in well and "0.700" in well and "collapse" not in well
    assert "acme/ill" not in good("ls", "--bucket", "runs-command", "--tenant", "default")

    said = good("status", "acme/ill", "--bucket", "runs-command")
    assert "version 15 of 20" in said and "reward collapse at version 15" in said
    assert "no alerts" in good("status", "well", "--bucket", "runs-command")


def test_a_run_of_a_newer_rollmill_hides_no_other(store: ObjectStore, tmp_path: Path) -> None:
    made(store, tmp_path, "old", [0.5], "tenant=newer")
    config = dumps(load_config("frozen_lake", ["name=new"])).replace('"format": 1', '"format": 9')
    store.put("newer/new/config.json", config.encode())
    listed = good("ls", "--bucket", "runs-command", "--tenant", "newer")
    assert "newer/old" in listed and "0.500" in listed
    assert "the configuration of run 'newer/new' is of format 9" in listed


def test_compare_tells_figures_and_differing_fields_and_draws_the_curves(store: ObjectStore, tmp_path: Path) -> None:
    made(store, tmp_path, "slow", [0.1, 0.2, 0.3], "training.learning_rate=1.0e-4")
    made(store, tmp_path, "fast", [0.3, 0.6, 0.9], "training.learning_rate=1.0e-3", "staleness.alpha=2")
    plot = tmp_path / "compared.png"
    said = good("compare", "slow", "default/fast", "--plot", str(plot), "--bucket", "runs-command")
    best = next(line for line in said.splitlines() if line.startswith("reward, best"))
    assert best.split()[-2:] == ["0.300", "0.900"]
    rate = next(line for line in said.splitlines() if line.startswith("training.learning_rate"))
    assert rate.split()[-2:] == ["0.0001", "0.001"]
    assert any(line.startswith("staleness.alpha") for line in said.splitlines())
    assert "training.steps" not in said and plot.stat().st_size > 5_000


def test_logs_show_the_parts_of_a_run(store: ObjectStore, tmp_path: Path) -> None:
    directory = tmp_path / "home" / "runs" / "default.mine" / "logs"
    directory.mkdir(parents=True)
    (directory / "trainer.log").write_text("\n".join(f"line {at}" for at in range(100)))
    (directory / "rollout.log").write_text("rolled out")
    said = good("logs", "mine", "--lines", "2")
    assert "line 99" in said and "line 97" not in said and "rolled out" in said
    assert "rolled out" not in good("logs", "mine", "--part", "trainer")


def test_no_two_runs_share_a_directory_on_a_machine(store: ObjectStore, tmp_path: Path) -> None:
    for tenant, name in (("a", "b-c"), ("a-b", "c"), ("a-b-c", "d"), ("a-b", "c-d")):
        config = load_config("frozen_lake", [f"tenant={tenant}", f"name={name}"])
        directory = Home(tmp_path / "home").run(config) / "logs"
        directory.mkdir(parents=True)
        (directory / "trainer.log").write_text(f"the trainer of {tenant}/{name}")
    assert "the trainer of a/b-c" in good("logs", "a/b-c") and "the trainer of a-b/c" in good("logs", "a-b/c")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["status", "nobody", "--bucket", "runs-command"], "default/nobody"),
        (["logs", "nobody"], "nobody"),
        (["logs", "a/b/c"], "'a/b/c' is no name of a run"),
        (["logs", "../home"], "'../home' is no name of a run"),
        (["status", "Mine", "--bucket", "runs-command"], "'Mine' is no name of a run"),
        (["compare", "one", "a/b/c", "--bucket", "runs-command"], "'a/b/c' is no name of a run"),
        (["compare", "one", "two", "--plot", "nowhere/x.png", "--bucket", "runs-command"], "directory 'nowhere'"),
        (["stop", "default/"], "'default/' is no name of a run"),
        (["compare", "one", "--bucket", "runs-command"], "two or more"),
    ],
)
def test_a_run_that_is_not_there_is_one_line(store: ObjectStore, arguments: list[str], words: str) -> None:
    result = runs(*arguments)
    assert result.exit_code == 2 and words in result.output
    assert len(result.output.strip().splitlines()) == 1, result.output
