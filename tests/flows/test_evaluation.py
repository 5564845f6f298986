"""Evaluation in figures: samples per problem, pass@k, difficulties apart; and what is kept of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from flows.configure import load_config
from flows.evaluate import check_weights, evaluate_version
from flows.evaluation import summarise
from flows.evaluations import Evaluation, Share, keep, load, load_all
from flows.forms import EvaluateForm
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from rl.config.infrastructure import StoreSection
from rl.config.load import dumps
from rl.config.run import RunConfig
from rl.errors import ConfigError
from tasks.admit import Played
from tests.command_line import Rollmill
from tests.flows.conftest import Desk

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


def test_more_than_was_kept_is_played_anew(own_store: str) -> None:
    store = ObjectStore.connect(StoreSection())
    store.ensure_bucket()
    asked = config("name=kept-evaluations", "evaluation.problems=4")
    found = summarise(asked.evaluation, 3, "lake", PLAYED, missing=1)
    assert load(asked, store, 3) is None
    keep(asked, store, [found])
    assert load(asked, store, 3) == load_all(asked, store) == [found]
    less = config("name=kept-evaluations", "evaluation.problems=3", "evaluation.pass_at=[2]")
    assert load(less, store, 3) == [found]
    for more in ("evaluation.samples=4", "evaluation.problems=5", "evaluation.temperature=0.5"):
        assert load(config("name=kept-evaluations", "evaluation.problems=4", more), store, 3) is None


def told(desk: Desk, version: int) -> list[Evaluation]:
    """What the flow returns of a version that is kept; else it raises before it starts anything."""
    asked = desk_config(desk)
    desk.run.store.create(f"{asked.prefix}config.json", dumps(asked).encode(), "n")
    return evaluate_version.fn(desk.name, asked, version=version)


def desk_config(desk: Desk) -> RunConfig:
    return config(f"name={desk.name}", "evaluation.problems=4")


def test_a_version_that_is_not_there_is_refused_before_anything_starts(desk: Desk) -> None:
    desk.run.steps(6)
    desk.good("versions", "rollback", "frozen_lake", "3")
    desk.run.log = CommitLog(desk.run.store, desk.run.prefix, "trainer-2")
    desk.run.log.fence()
    desk.run.steps(2)
    for version in (-1, 9):
        with pytest.raises(ConfigError, match=rf"VERSION {version} of run .* does not exist; there are 0 to 7: name"):
            told(desk, version)
    with pytest.raises(ConfigError, match=r"VERSION 4 .* rolled back; the live line is 0 to 3 and 6 to 7: .*list`$"):
        told(desk, 4)


def test_a_version_whose_weights_are_gone_is_told_if_it_was_evaluated_and_refused_if_not(desk: Desk) -> None:
    desk.run.steps(6)
    desk.good("versions", "pin", "frozen_lake", "0")
    desk.good("versions", "delete", "frozen_lake", "3")
    desk.good("gc", "frozen_lake", sets=("retention.newest=2", "retention.grace=0"))
    asked = desk_config(desk)
    kept = summarise(asked.evaluation, 2, "lake", PLAYED, missing=1)
    keep(asked, desk.run.store, [kept])
    assert told(desk, 2) == [kept]
    for version in (1, 3):
        with pytest.raises(ConfigError, match=rf"VERSION {version} .* deleted; there are those of 0 and 4 to 5: name"):
            told(desk, version)
    log = CommitLog(desk.run.store, desk.run.prefix, "observer")
    log.sync()
    for version in (0, 4, 5):
        check_weights(asked, log, log.history(), version)


def test_the_form_names_a_version_or_none() -> None:
    assert EvaluateForm(configuration="frozen_lake", version=2).version == 2
    assert EvaluateForm(configuration="frozen_lake").version is None
    with pytest.raises(ValidationError, match="version"):
        EvaluateForm(configuration="frozen_lake", version=-1)


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
