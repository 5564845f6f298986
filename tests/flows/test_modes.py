"""Whole runs in the modes that are not the default: what the mode promises shows in what the run left behind."""

from __future__ import annotations

import pytest

from infra.store.buffer import SampleBuffer
from rl.trajectory import Span, Trajectory
from tests.command_line import Rollmill
from tests.flows.test_runs import audit

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.full]

SLOW = "domains.0.injection={step_latency: {type: normal, mean: 0.05, deviation: 0.05}}"


def trained(rollmill: Rollmill, name: str) -> dict[int, list[Trajectory]]:
    """The trained members, by the version that they started under."""
    config, log = rollmill.config(name), rollmill.log(name)
    found: dict[int, list[Trajectory]] = {}
    for group in SampleBuffer(log.store, config.prefix).history(1000):
        found.setdefault(group.version, []).extend(group.members)
    return found


def by_stage(member: Trajectory) -> dict[str, list[Span]]:
    return {kind: [s for s in member.spans if s.stage == kind] for kind in ("generate", "environment", "score")}


def test_in_lockstep_no_turn_and_no_reward_comes_before_all_are_there(rollmill: Rollmill) -> None:
    sets = ("staleness.mode=sync", "training.dynamic_sampling=false", "training.steps=2", "evaluation.problems=0", SLOW)
    code, output = rollmill.train("lockstep", *sets)
    assert code == 0, output
    assert {s.metrics["lag_max"] for s in audit(rollmill, "lockstep", 2)[1:]} == {0}
    for members in trained(rollmill, "lockstep").values():
        turns = max(m.turns for m in members)
        spans = [by_stage(m) for m in members]
        for turn in range(turns):
            playing = [s for s in spans if len(s["environment"]) > turn]
            generated = max(s["generate"][turn].end for s in playing)
            assert min(s["environment"][turn].start for s in playing) >= generated
        assert min(s["score"][0].start for s in spans) >= max(s["generate"][-1].end for s in spans)


def test_of_a_group_with_spares_the_first_finished_are_trained_and_the_rest_is_surplus(rollmill: Rollmill) -> None:
    wish = "rollout.redundancy={mode: first_finished, extra_members: 2, extra_groups: 3}"
    code, output = rollmill.train("first", wish, "rollout.unit=trajectory", "evaluation.problems=0", SLOW)
    assert code == 0, output
    audit(rollmill, "first", 4)
    for members in trained(rollmill, "first").values():
        assert {m.member for m in members} == set(range(4))
    assert set(rollmill.log("first").ledger.dropped_groups) <= {"surplus", "equal_reward"}


def test_a_bound_on_the_start_alone_trains_on_and_says_how_old_it_was(rollmill: Rollmill) -> None:
    sets = ("staleness.mode=areal", "training.dynamic_sampling=false", "evaluation.problems=0", SLOW)
    code, output = rollmill.train("areal", *sets)
    assert code == 0, output
    assert rollmill.log("areal").ledger.head == 4 and not rollmill.log("areal").ledger.dropped_groups
