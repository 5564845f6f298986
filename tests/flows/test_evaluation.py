"""Evaluation in figures: samples per problem, pass@k, difficulties apart; and what is kept of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.configure import load_config
from flows.evaluation import summarise
from flows.evaluations import Share, keep, load, load_all
from infra.store.objects import ObjectStore
from rl.config.infrastructure import StoreSection
from rl.config.run import RunConfig
from rl.errors import ConfigError
from tasks.admit import Played
from tests.flows.conftest import Rollmill

PLAYED = [
    Played((1.0, 0.0), (2, 4), (False, False), 2),
    Played((0.0, 0.0), (4, 6), (False, True), 10),
    Played((1.0, 1.0), (1, 1), (False, False), 2),
]


def config(*sets: str) -> RunConfig:
    return load_config("frozen_lake", ["evaluation.samples=2", "evaluation.pass_at=[1, 2]", *sets])


def test_difficulties_are_told_apart_easiest_first() -> None:
    found = summarise(config().evaluation, 3, "lake", PLAYED, missing=1)
    assert (found.reward, found.problems, found.missing, found.turns) == (0.5, 3, 1, 3.0)
    assert found.truncated == pytest.approx(1 / 6)
    assert found.pass_at == {"1": 0.5, "2": pytest.approx(2 / 3)}
    assert found.by_difficulty == {"2": Share(2, 0.75, {"1": 0.75, "2": 1.0}), "10": Share(1, 0.0, {"1": 0, "2": 0})}
    assert list(found.by_difficulty) == ["2", "10"]
    assert str(found).splitlines()[1] == "  difficulty 2: reward 0.750 over 2 problems, pass@1 0.750, pass@2 1.000"


def test_more_samples_than_were_kept_are_played_anew(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", moto_url)
    store = ObjectStore.connect(StoreSection())
    store.ensure_bucket()
    asked = config("name=kept-evaluations")
    found = summarise(asked.evaluation, 3, "lake", PLAYED, missing=0)
    assert load(asked, store, 3) is None
    keep(asked, store, [found])
    assert load(asked, store, 3) == load_all(asked, store) == [found]
    assert load(config("name=kept-evaluations", "evaluation.pass_at=[2]"), store, 3) == [found]
    assert load(config("name=kept-evaluations", "evaluation.samples=4"), store, 3) is None


def test_pass_at_k_wants_k_samples() -> None:
    with pytest.raises(ConfigError, match=r"pass_at \(8\) .* set samples to 8"):
        config("evaluation.pass_at=[1, 8]")


@pytest.mark.full
@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_is_evaluated_with_several_samples(rollmill: Rollmill, tmp_path: Path) -> None:
    sets = ("evaluation.samples=4", "evaluation.pass_at=[1, 4]", "training.steps=1")
    code, output = rollmill.train("passes", *sets)
    assert code == 0, output
    kept = load_all(rollmill.config("passes"), rollmill.log("passes").store)
    assert [e.version for e in kept] == [0, 1] and all(e.samples == 4 for e in kept)
    for e in kept:
        assert e.pass_at["1"] == pytest.approx(e.reward) and e.pass_at["4"] >= e.pass_at["1"]
        assert sum(share.problems for share in e.by_difficulty.values()) == e.problems == 8
