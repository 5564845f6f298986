"""Alerts: what they see, and that noise alone seldom raises one."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.alerts import Alert, HeldOut, Kind, Point, Rules, alerts, watched
from rl.config.alerts import AlertSection

RULES = Rules()


def run(**series: list[float]) -> list[Point]:
    steps = len(next(iter(series.values())))
    names = {name.replace("__", "/"): values for name, values in series.items()}
    return [Point(at + 1, {name: values[at] for name, values in names.items()}) for at in range(steps)]


def kinds(found: list[Alert]) -> set[Kind]:
    return {alert.kind for alert in found}


def wobbly(values: list[float], noise: float = 0.02, seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [v + chance.gauss(0, noise) for v in values]


LEARNS = [0.4 + 0.5 * min(1, at / 20) for at in range(40)]
FALLS = LEARNS[:30] + [0.9 - 0.5 * min(1, at / 6) for at in range(12)]


def test_a_run_that_learns_and_stays_raises_nothing() -> None:
    entropy = [2.0 * 0.9**at for at in range(40)]
    points = run(reward=wobbly(LEARNS), entropy=entropy, mismatch_kl=wobbly([0.001] * 40, 0.0005))
    assert alerts(points, [], RULES) == []


def test_a_reward_that_falls_far_from_its_best_is_a_collapse_and_says_from_where_to_where() -> None:
    (alert,) = alerts(run(reward=wobbly(FALLS)), [], RULES)
    assert alert.kind is Kind.REWARD_COLLAPSE and alert.version == len(FALLS)
    assert "from 0.906 to 0.398" in alert.what and "rollback" in alert.what


def test_no_entropy_is_a_collapse_only_where_the_reward_is_past_its_best() -> None:
    entropy = [2.0 * 0.8**at for at in range(40)]
    peaked = LEARNS[:25] + [0.8] * 15
    assert kinds(alerts(run(reward=LEARNS, entropy=entropy), [], RULES)) == set()
    assert Kind.ENTROPY_COLLAPSE in kinds(alerts(run(reward=peaked, entropy=entropy), [], RULES))


def test_held_out_reward_that_falls_while_training_reward_rises_is_suspicious() -> None:
    falls = [HeldOut(0, 0.4), HeldOut(10, 0.6), HeldOut(40, 0.3)]
    assert kinds(alerts(run(reward=wobbly(LEARNS)), falls, RULES)) == {Kind.REWARD_HACKING}
    rises = [HeldOut(0, 0.4), HeldOut(10, 0.6), HeldOut(40, 0.8)]
    assert alerts(run(reward=wobbly(LEARNS)), rises, RULES) == []


def test_a_part_that_falls_while_the_whole_rises_is_suspicious_but_a_domain_is_no_part() -> None:
    rising = [0.2 + 0.02 * at for at in range(40)]
    points = run(reward=rising, reward__style=[2 * r for r in rising], reward__solved=[0.8 - r for r in rising])
    (alert,) = alerts(points, [], RULES)
    assert alert.kind is Kind.REWARD_HACKING and "'solved'" in alert.what
    assert alerts(points, [], RULES, domains=("solved",)) == []


def test_log_probs_that_drift_apart_are_told() -> None:
    drifting = [0.002 * 1.2**at for at in range(40)]
    assert kinds(alerts(run(reward=LEARNS, mismatch_kl=drifting), [], RULES)) == {Kind.LOGPROB_MISMATCH}
    large_from_the_start = [0.2] * 40
    assert alerts(run(reward=LEARNS, mismatch_kl=large_from_the_start), [], RULES) == []


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_raises_nothing(seed: int) -> None:
    flat = {"reward": wobbly([0.5] * 60, 0.05, seed), "mismatch_kl": wobbly([0.01] * 60, 0.003, seed + 1)}
    for end in range(60):
        assert alerts(run(**{k: v[: end + 1] for k, v in flat.items()}), [], RULES) == []


VALUES = st.lists(st.floats(-1e100, 1e100) | st.sampled_from([math.nan, math.inf]), min_size=1, max_size=30)


@given(reward=VALUES, held=st.lists(st.floats(-1e6, 1e6), max_size=4))
def test_any_history_is_judged_and_too_short_a_one_raises_nothing(reward: list[float], held: list[float]) -> None:
    points = [Point(at, {"reward": r, "entropy": r, "mismatch_kl": abs(r)}) for at, r in enumerate(reward)]
    found = alerts(points, [HeldOut(at, r) for at, r in enumerate(held)], RULES)
    if sum(map(math.isfinite, reward)) < 2 * RULES.window:
        assert found == []
    assert len(kinds(found)) == len(found)


def test_the_section_holds_the_rules() -> None:
    assert AlertSection(window=7).rules == Rules(window=7)


@given(st.integers(0, 2**32))
def test_what_is_kept_of_a_step_is_all_that_a_rule_looks_at(seed: int) -> None:
    chance = random.Random(seed)
    names = ["reward", "entropy", "mismatch_kl", "reward/format", "reward/solved", "reward/d", "loss", "tokens_per_s"]
    points = [Point(at, {name: chance.random() ** 3 for name in names}) for at in range(1, 25)]
    held_out = [HeldOut(at, chance.random()) for at in (0, 8, 16, 24)]
    light = [Point(p.version, watched(p.metrics)) for p in points]
    assert "loss" not in light[0].metrics
    assert alerts(light, held_out, RULES, ["d"]) == alerts(points, held_out, RULES, ["d"])
