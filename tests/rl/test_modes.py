"""Mode and alpha never contradict each other, whichever of them is given."""

from __future__ import annotations

import pytest

from rl.config.load import validate
from rl.config.run import RunConfig
from rl.errors import ConfigError
from rl.modes import MODES, UNBOUNDED
from rl.redundancy import Mode as Redundancy
from rl.tail import LEAST, Tail


def config(staleness: dict | None = None, **rollout: object) -> RunConfig:
    tree = {
        "name": "t",
        "model": {"source": {"type": "pretrained", "path": "unused"}},
        "domains": [{"name": "d", "environment": "envs.frozen_lake:FrozenLake"}],
        "training": {"groups_per_step": 4, "group_size": 2, "dynamic_sampling": False},
        "rollout": rollout,
    }
    return validate(tree if staleness is None else tree | {"staleness": staleness}, "test")


@pytest.mark.parametrize(
    ("given", "mode", "alpha"),
    [
        (None, "rollart", 1),
        ({"alpha": 0}, "sync_plus", 0),
        ({"alpha": 3}, "rollart", 3),
        ({"mode": "sync"}, "sync", 0),
        ({"mode": "one_off"}, "one_off", 1),
        ({"mode": "areal"}, "areal", 1),
        ({"mode": "six_steps", "alpha": 2}, "six_steps", 2),
    ],
)
def test_either_says_what_the_other_one_is(given: dict | None, mode: str, alpha: int) -> None:
    section = config(given).staleness
    assert (section.mode, section.alpha) == (mode, alpha)


@pytest.mark.parametrize(
    "given", [{"mode": "sync", "alpha": 1}, {"mode": "one_off", "alpha": 2}, {"mode": "rollart", "alpha": 0}]
)
def test_a_contradiction_is_one_line_that_names_both(given: dict) -> None:
    with pytest.raises(ConfigError, match=rf"{given['mode']} takes alpha .*, not {given['alpha']}"):
        config(given)


def test_only_areal_trains_beyond_the_bound_of_its_start() -> None:
    for name, mode in MODES.items():
        policy = config({"mode": name}).policy
        assert policy.buffer_groups == (mode.alphas[0] + 1) * 4
        assert policy.viable(policy.admission + 1) == (name == "areal")
        assert not policy.viable(UNBOUNDED + 1)


def test_what_is_ended_and_forgotten_is_not_waited_for() -> None:
    first = {"mode": "first_finished", "extra_members": 1, "extra_groups": 2}
    assert config().waits and not config(redundancy=first).waits and not config({"alpha": 0}).waits
    assert config(redundancy=first).policy.examined_per_step == 6
    with pytest.raises(ConfigError, match="extra_members"):
        config(redundancy={"mode": "first_finished"})
    with pytest.raises(ConfigError, match="extra_groups"):
        config(redundancy={"extra_groups": 1})


def test_what_is_drawn_again_is_not_waited_for() -> None:
    assert not config({"alpha": 2, "late": "draw_again"}).waits
    with pytest.raises(ConfigError, match="no step is late"):
        config({"mode": "areal", "late": "draw_again"})


def test_spares_follow_from_the_failures_and_the_durations_that_were_seen() -> None:
    even, uneven = [10.0] * 94 + [11.0], [1.0] * 94 + [30.0]
    tail = Tail()
    tail.note(LEAST - 1, LEAST - 1, [])
    assert tail.spares(8, 8) == 0, "too few to say"
    for _ in range(100):
        tail.note(100, 0, even)
    assert tail.failure_rate == 0 and tail.spares(8, 8) == 0, "the old ones are forgotten"
    for _ in range(100):
        tail.note(100, 5, uneven)
    assert tail.failure_rate == 0.05 and tail.spares(8, 8) == 0, "a step waits for the long ones anyway"
    for _ in range(100):
        tail.note(100, 5, even)
    assert tail.spares(8, 8) == 2
    assert config(redundancy={}).rollout.redundancy.policy(tail.spares(8, 8)).extra_members == 2
    assert config(redundancy={"extra_members": 3}).rollout.redundancy.policy(1).extra_members == 3
    assert config().rollout.redundancy.policy().mode is Redundancy.REPLACE_FAILURES
