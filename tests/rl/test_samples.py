"""Problems, trajectories, groups, advantages: what is refused, and what always holds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.advantages.registry import BUILT_IN, advantage_function
from rl.errors import ConfigError
from rl.selection import Candidate
from rl.stream import ProblemStream, derive_seed
from rl.trajectory import NO_VERSION, Group, Message, Problem, Status, Trajectory, Uid, mean_reward_parts

ROOT = Path(__file__).parents[2]
PROBLEM = Problem(4, "lake", 2, 99)


def trajectory(member: int = 0, start: int = 3, **changes: Any) -> Trajectory:
    """Two prompt tokens, two sampled ones (the second under the next version), one of the environment."""
    plain = Trajectory(
        uid=Uid(4, 1), member=member, problem=PROBLEM, start_version=start, prompt_length=2,
        token_ids=[5, 6, 7, 8, 9], loss_mask=[0, 0, 1, 1, 0], logprobs=[0.0, 0.0, -0.5, -1.0, 0.0],
        versions=[NO_VERSION, NO_VERSION, start, start + 1, NO_VERSION], messages=[Message("user", "go")],
        status=Status.TERMINATED, turns=1, rewards={"correct": float(member)},
    )  # fmt: skip
    return replace(plain, **changes)


def test_a_sound_trajectory_and_group_pass() -> None:
    group = Group.of([trajectory(1, start=5), trajectory(0, start=3), trajectory(2, start=4)])
    assert [m.member for m in group.members] == [0, 1, 2]
    assert group.version == 3, "the least start version"
    assert group.rewards == [0.0, 1.0, 2.0] and group.informative
    candidate = Candidate.of(group)
    assert (candidate.uid, candidate.version, candidate.newest) == (Uid(4, 1), 3, 6)


BROKEN = {
    "mask too short": {"loss_mask": [0, 0, 1, 1]},
    "log-probs too long": {"logprobs": [0.0, 0.0, -0.5, -1.0, 0.0, 0.0]},
    "versions too short": {"versions": [NO_VERSION]},
    "no prompt": {"prompt_length": 0},
    "prompt longer than all": {"prompt_length": 6},
    "a sampled token in the prompt": {"prompt_length": 3},
    "no tokens": {"token_ids": [], "loss_mask": [], "logprobs": [], "versions": []},
    "a log-prob above 0": {"logprobs": [0.0, 0.0, 0.5, -1.0, 0.0]},
    "a log-prob that is no number": {"logprobs": [0.0, 0.0, float("nan"), -1.0, 0.0]},
    "a log-prob of minus infinity": {"logprobs": [0.0, 0.0, float("-inf"), -1.0, 0.0]},
    "a version older than the start": {"versions": [NO_VERSION, NO_VERSION, 2, 4, NO_VERSION]},
    "a sampled token without a version": {"versions": [NO_VERSION, NO_VERSION, NO_VERSION, 4, NO_VERSION]},
    "a version where nothing was sampled": {"versions": [NO_VERSION, 3, 3, 4, NO_VERSION]},
    "a log-prob where nothing was sampled": {"logprobs": [0.0, 0.0, -0.5, -1.0, -0.1]},
    "a mask of 2": {"loss_mask": [0, 0, 1, 2, 0]},
    "a start before the first version": {"start_version": -1},
}


@pytest.mark.parametrize("changes", BROKEN.values(), ids=BROKEN)
def test_a_broken_trajectory_is_refused_also_in_a_group(changes: dict[str, Any]) -> None:
    broken = trajectory(**changes)
    with pytest.raises(ValueError, match=r"trajectory 4\.1/0"):
        broken.check()
    with pytest.raises(ValueError, match=r"4\.1"):
        Group.of([broken, trajectory(1)])


GROUPS: dict[str, Callable[[], list[Trajectory]]] = {
    "empty": list,
    "a member twice": lambda: [trajectory(0), trajectory(0)],
    "a member missing": lambda: [trajectory(0), trajectory(2)],
    "another attempt": lambda: [trajectory(0), trajectory(1, uid=Uid(4, 2))],
    "another problem": lambda: [trajectory(0), trajectory(1, problem=replace(PROBLEM, seed=1))],
    "another ordinal than its problem's": lambda: [trajectory(0, uid=Uid(5, 0)), trajectory(1, uid=Uid(5, 0))],
    "not scored": lambda: [trajectory(0), trajectory(1, rewards={})],
    "a reward that is no number": lambda: [trajectory(0), trajectory(1, rewards={"a": float("nan")})],
    "an infinite reward": lambda: [trajectory(0), trajectory(1, rewards={"a": 1.0, "b": float("inf")})],
}


@pytest.mark.parametrize("members", GROUPS.values(), ids=GROUPS)
def test_a_group_of_other_than_whole_scored_tries_is_refused(members: Callable[[], list[Trajectory]]) -> None:
    with pytest.raises(ValueError, match="group"):
        Group.of(members())


def test_a_tombstone_has_no_members_and_no_signal() -> None:
    tombstone = Group.give_up(Uid(4, 1), PROBLEM, 7, "stale")
    assert tombstone.members == [] and not tombstone.informative
    assert Candidate.of(tombstone) == Candidate(Uid(4, 1), 7, False, "stale", domain=PROBLEM.domain)


def test_equal_rewards_carry_no_signal() -> None:
    same = {"a": 0.1, "b": 0.2}
    assert not Group.of([trajectory(0, rewards=same), trajectory(1, rewards={"a": 0.3})]).informative


def test_reward_parts_are_averaged_over_all_members() -> None:
    members = [trajectory(0, rewards={"a": 1.0, "b": 1.0}), trajectory(1, rewards={"a": 0.0})]
    assert mean_reward_parts(members) == {"a": 0.5, "b": 0.5}


@given(st.integers(0, 10**12), st.integers(0, 10**6))
def test_uids_are_read_back(ordinal: int, attempt: int) -> None:
    assert Uid.parse(str(Uid(ordinal, attempt))) == Uid(ordinal, attempt)


@pytest.mark.parametrize("text", ["", "1", "1.", ".1", "1.2.3", "-1.0", "a.b", "1.0 "])
def test_what_is_no_uid_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="uid"):
        Uid.parse(text)


# -- the problem stream --------------------------------------------------------------------------------

WEIGHTS = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=3), st.sampled_from([0.1, 0.3, 1.0, 2.0, 3.0, 7.5, 50.0]),
    min_size=1, max_size=9,
)  # fmt: skip


@given(WEIGHTS, st.integers(0, 2**40), st.lists(st.integers(0, 300), min_size=1, max_size=20))
def test_the_stream_is_a_function_of_its_configuration(weights: dict[str, float], seed: int, asked: list[int]) -> None:
    one, other = ProblemStream(seed, weights), ProblemStream(seed, dict(reversed(weights.items())))
    assert {n: one.problem(n) for n in asked} == {n: other.problem(n) for n in sorted(asked)}


@given(WEIGHTS)
def test_every_domain_stays_within_one_problem_of_its_share(weights: dict[str, float]) -> None:
    exact = {name: Fraction(weight) for name, weight in weights.items()}
    stream, total = ProblemStream(0, weights), sum(exact.values())
    counts = dict.fromkeys(weights, 0)
    for n in range(1, 250):
        problem = stream.problem(n - 1)
        assert (problem.ordinal, problem.index) == (n - 1, counts[problem.domain])
        counts[problem.domain] += 1
        assert all(abs(counts[name] - n * weight / total) < 1 for name, weight in exact.items())


def test_the_stream_is_the_same_in_another_process() -> None:
    code = (
        "from rl.stream import ProblemStream, derive_seed\n"
        "s = ProblemStream(7, {'b': 2.0, 'a': 0.7})\n"
        "print([s.problem(n) for n in range(40)], s.held_out('a', 3), derive_seed('x', 1))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={"PYTHONHASHSEED": "1"}, capture_output=True, text=True,
        timeout=60, check=True,
    ).stdout  # fmt: skip
    s = ProblemStream(7, {"a": 0.7, "b": 2.0})
    here = ([s.problem(n) for n in range(40)], s.held_out("a", 3), derive_seed("x", 1))
    assert out.strip() == f"{here[0]} {here[1]} {here[2]}"


def test_seeds_are_pinned_for_ever() -> None:
    """Stored runs name problems by ordinal alone: these numbers may never change."""
    assert derive_seed(7, "train", "lake", 0) == 9103382804994620046
    assert derive_seed("heldout", "lake", 0) == 8332858309797137525


def test_training_and_held_out_problems_share_no_seed_and_seeds_differ_between_runs() -> None:
    stream = ProblemStream(3, {"lake": 1.0, "math": 1.0})
    train = {stream.problem(n).seed for n in range(4000)}
    held_out = {p.seed for name in ("lake", "math") for p in stream.held_out(name, 1000)}
    assert len(train) == 4000 and len(held_out) == 2000 and not train & held_out
    assert all(0 <= seed < 2**63 for seed in train | held_out)
    assert {p.split for p in stream.held_out("lake", 3)} == {"heldout"}
    other = ProblemStream(4, {"lake": 1.0})
    assert other.held_out("lake", 5) == stream.held_out("lake", 5)
    assert other.problem(0).seed not in train


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": -1.0, "b": 2.0}])
def test_impossible_weights_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        ProblemStream(0, weights)


# -- advantages ----------------------------------------------------------------------------------------

REWARDS = st.lists(st.floats(-5, 5, allow_subnormal=False), min_size=2, max_size=12)


@pytest.mark.parametrize("name", BUILT_IN)
@given(rewards=REWARDS, shift=st.floats(-10, 10))
def test_advantages_sum_to_zero_keep_the_order_and_ignore_a_shift(
    name: str, rewards: list[float], shift: float
) -> None:
    found = advantage_function(name)(rewards)
    assert len(found) == len(rewards)
    assert sum(found) == pytest.approx(0, abs=1e-6)
    assert advantage_function(name)([r + shift for r in rewards]) == pytest.approx(found, abs=1e-4)
    ranked = sorted(range(len(rewards)), key=rewards.__getitem__)
    assert all(found[a] <= found[b] + 1e-9 for a, b in pairwise(ranked))


@given(rewards=REWARDS, scale=st.floats(0.5, 4))
def test_only_grpo_divides_by_the_deviation(rewards: list[float], scale: float) -> None:
    scaled = [r * scale for r in rewards]
    for name in ("dr_grpo", "rloo"):
        expected = [a * scale for a in advantage_function(name)(rewards)]
        assert advantage_function(name)(scaled) == pytest.approx(expected, abs=1e-6)
    if max(rewards) - min(rewards) > 0.5:
        grpo = advantage_function("grpo")
        assert grpo(scaled) == pytest.approx(grpo(rewards), abs=5e-3)


def test_grpo_divides_by_the_sample_deviation() -> None:
    assert advantage_function("grpo")([0.0, 1.0]) == pytest.approx([-0.5 / (0.5**0.5 + 1e-4), 0.5 / (0.5**0.5 + 1e-4)])


@given(rewards=REWARDS)
def test_rloo_is_dr_grpo_with_the_others_baseline(rewards: list[float]) -> None:
    n = len(rewards)
    expected = [a * n / (n - 1) for a in advantage_function("dr_grpo")(rewards)]
    assert advantage_function("rloo")(rewards) == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_grpo_agrees_with_trl() -> None:
    """TRL's own lines (trainer/grpo_trainer.py, `scale_rewards="group"`), with its own `nanstd`."""
    torch = pytest.importorskip("torch")
    from trl.trainer.utils import nanstd

    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(16, 8, generator=generator, dtype=torch.float64)
    rewards[3] = 0.25
    expected = (rewards - rewards.mean(1, keepdim=True)) / (nanstd(rewards, dim=1).unsqueeze(1) + 1e-4)
    found = [advantage_function("grpo")(row) for row in rewards.tolist()]
    assert torch.allclose(torch.tensor(found, dtype=torch.float64), expected, atol=1e-9)


@pytest.mark.parametrize("name", BUILT_IN)
def test_degenerate_groups_have_no_advantage(name: str) -> None:
    function = advantage_function(name)
    assert function([]) == [] and function([3.0]) == [0.0]
    assert function([0.7] * 5) == pytest.approx([0.0] * 5, abs=1e-9)


def test_own_advantages_are_found_by_module_and_attribute() -> None:
    assert advantage_function("rl.advantages.rloo:advantages") is advantage_function("rloo")
    for name in ("ppo", "no_such_module:f", "rl.advantages.rloo:missing", ":f"):
        with pytest.raises(ConfigError, match=r"training\.advantage"):
            advantage_function(name)
