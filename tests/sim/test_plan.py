"""Planning: a plan is read with clear errors, searched within its budget, measured runs come in, pictures come out."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from flows.cli import app
from rl.errors import ConfigError
from rl.trajectory import Group, Message, Problem, Span, Status, Trajectory, Uid
from sim.config import PoolSection
from sim.measured import measured_domains, seconds_per_token
from sim.plan import load_plan, plan_names
from sim.search import SearchSection, score, search
from sim.simulate import hourly_price
from tests.sim.scenes import VARIED, scenario

TINY = """
scenario:
  domains: [{name: d, turns: [2, 3], response_tokens: 100}]
  pools: [{hardware: H800, gpus: 2, hardware_class: compute_gpu}]
  trainer: {gpus: 2}
  groups_per_step: 2
  group_size: 2
  steps: 4
"""


def test_every_plan_that_ships_can_be_read():
    assert plan_names() and all(load_plan(name).scenario.gpus > 0 for name in plan_names())


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("gpus: 2,", "gpus: 3, tensor_parallel: 2,", ["pools.0", "tensor_parallel (2)", "(3)"]),
        ("hardware: H800", "hardware: H900", ["H900", "H800"]),
        ("steps: 4", "stepps: 4", ["stepps", "Extra inputs"]),
        ("steps: 4", "steps: 4\n  mode: one_off\n  alpha: 2", ["one_off", "alpha", "2"]),
    ],
)
def test_a_mistake_names_field_value_and_mend(tmp_path, old, new, words):
    path = tmp_path / "plan.yaml"
    path.write_text(TINY.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_plan(str(path))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_search_stays_within_its_budget_and_finds_no_worse():
    pools = (
        PoolSection(hardware="H800", gpus=2, hardware_class="compute_gpu"),
        PoolSection(hardware="H20", gpus=4, hardware_class="bandwidth_gpu"),
    )
    base = scenario(VARIED, pools=pools, steps=4, warmup=1)
    section = SearchSection(rounds=1, alphas=(2,), spares=(0,))
    tried = search(base, section)
    scores = [score(plan, section) for plan in tried]
    assert len(tried) > 2 and scores == sorted(scores, reverse=True)
    assert all(hourly_price(plan.scenario) <= hourly_price(base) * 1.001 for plan in tried)
    assert any(plan.scenario == base for plan in tried)
    with pytest.raises(ConfigError, match="budget"):
        search(base, SearchSection(budget=1.0))


def test_a_run_is_measured():
    def member(number: int) -> Trajectory:
        spans = [Span("reset", 0, 1 + number), *(Span("generate", t, t + 2) for t in (5, 9)), Span("environment", 7, 8)]
        return Trajectory(
            Uid(0, 0), number, Problem(0, "lake", 0, 0), 0, 3, [1] * 13, [0] * 3 + [1] * 6 + [0] * 4,
            [0.0] * 13, [-1] * 3 + [0] * 6 + [-1] * 4, [Message("user", "x")], Status.TERMINATED, 2,
            rewards={"r": 1.0}, spans=spans,
        )  # fmt: skip

    groups = [Group.of([member(0), member(1)])]
    (domain,) = measured_domains(groups)
    assert (domain.name, domain.turns, domain.prompt_tokens) == ("lake", (2, 2), 3)
    assert (domain.response_tokens, domain.observation_tokens) == (3.0, 2.0)
    assert (domain.reset.mean, domain.reset.sd, domain.step.mean, domain.score.mean) == (1.5, 0.5, 1.0, 0.0)
    assert seconds_per_token(groups) == pytest.approx(4 / 6)
    with pytest.raises(ConfigError, match="no trajectories"):
        measured_domains([])


def test_the_command_writes_its_report_and_pictures(tmp_path, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    path = tmp_path / "plan.yaml"
    path.write_text(TINY)
    arguments = ["simulate", str(path), "--directory", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "alpha 1, 2 H800, trainer 2 H800" in done.output
    (plan,) = json.loads((tmp_path / "out" / "plan.json").read_text())["plans"]
    assert plan["step_s"] > 0 and plan["scenario"]["alpha"] == 1
    assert all((tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG") for name in ("steps.png", "plans.png"))
    wrong = CliRunner().invoke(app, ["simulate", "no-such-plan"])
    assert wrong.exit_code == 2 and "cluster" in wrong.output
