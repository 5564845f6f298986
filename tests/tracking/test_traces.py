"""Trajectories as traces: on a real MLflow server, with what was said in each turn."""

from __future__ import annotations

import pytest

from infra.services.endpoints import Endpoints
from infra.tracking.run import Tracker
from infra.tracking.server import MlflowRun
from infra.tracking.traces import of_several_turns, sampled
from rl.trajectory import Group, Message, Problem, Span, Status, Trajectory, Uid
from tests.tracking.test_run import DEADLINE, config

PROBLEM = Problem(4, "lake", 4, 11)
SAID = [
    Message("system", "Walk."),
    Message("user", "You see ice."),
    Message("assistant", "left"),
    Message("user", "You see a hole."),
    Message("assistant", "up"),
    Message("user", "You are there."),
]


def trajectory(member: int = 0, turns: int = 2) -> Trajectory:
    return Trajectory(
        uid=Uid(4, 1), member=member, problem=PROBLEM, start_version=3, prompt_length=2, token_ids=[1, 2, 3, 4],
        loss_mask=[0, 0, 1, 1], logprobs=[0.0, 0.0, -0.5, -0.5], versions=[-1, -1, 3, 4], messages=SAID,
        status=Status.TERMINATED, turns=turns, rewards={"solved": 1.0},
        spans=[
            Span("reset", 100.0, 100.1), Span("generate", 100.2, 100.5), Span("environment", 100.5, 100.6),
            Span("generate", 100.6, 100.9), Span("environment", 100.9, 101.0), Span("score", 101.1, 101.2),
        ],
    )  # fmt: skip


def test_about_the_share_of_problems_is_traced_and_always_the_same_ones() -> None:
    problems = [Problem(at, "lake", at, 7 * at) for at in range(4000)]
    chosen = [p for p in problems if sampled(p, 0.05)]
    assert 130 <= len(chosen) <= 270
    assert chosen == [p for p in problems if sampled(p, 0.05)]
    assert not any(sampled(p, 0.0) for p in problems) and all(sampled(p, 1.0) for p in problems)


def test_only_a_member_of_several_turns_stands_for_its_group() -> None:
    group = Group(Uid(4, 1), PROBLEM, 3, [trajectory(0, turns=1), trajectory(1, turns=2)])
    chosen = of_several_turns(group)
    assert chosen is not None and chosen.member == 1
    assert of_several_turns(Group(Uid(4, 1), PROBLEM, 3, [trajectory(0, turns=1)])) is None


@pytest.mark.server
@pytest.mark.slow
def test_a_trace_shows_every_turn_and_is_there_once_and_tags_say_what_calls_for_a_look(services: Endpoints) -> None:
    settings = config("traced", uri=services.mlflow_uri)
    tracker = Tracker.start(settings, "rollout")
    for _ in range(2):
        tracker.log_trace(trajectory())
    tracker.tag("alert.reward_collapse", "version 9: it fell")
    assert tracker.close(DEADLINE)
    assert settings.tracking.uri is not None
    run = MlflowRun(settings, settings.tracking.uri, owner=False)
    known = run.known()
    assert known is not None
    (trace,) = run.client.search_traces(locations=[known[0]], run_id=known[1])
    root = next(s for s in trace.data.spans if s.parent_id is None)
    assert root.name == "trajectory 4.1/0"
    assert [m["content"] for m in root.inputs] == ["Walk.", "You see ice."]
    assert root.outputs["reward"] == 1.0 and root.attributes["rollmill.versions"] == [3, 4]
    turns = sorted((s for s in trace.data.spans if s.parent_id), key=lambda s: s.start_time_ns)
    assert [s.name for s in turns] == ["reset", "generate", "environment", "generate", "environment", "score"]
    assert turns[1].outputs["content"] == "left" and turns[2].outputs["content"] == "You see a hole."
    assert turns[3].inputs[0]["content"] == "You see a hole." and turns[3].span_type == "LLM"
    assert turns[5].outputs == {"solved": 1.0}
    assert round((turns[1].end_time_ns - turns[1].start_time_ns) / 1e9, 3) == 0.3
    assert run.client.get_run(known[1]).data.tags["alert.reward_collapse"] == "version 9: it fell"


@pytest.mark.server
@pytest.mark.slow
def test_the_load_of_the_machine_is_logged_until_the_end(services: Endpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    settings = config("system", uri=services.mlflow_uri)
    assert settings.tracking.uri is not None
    run = MlflowRun(settings, settings.tracking.uri, owner=True)
    run.watch_system()
    for _ in range(200):
        if any(name.startswith("system/cpu") for name in run.client.get_run(run.run_id).data.metrics):
            break
        run.set_tag("looked", "yes")
    run.finish()
    metrics = run.client.get_run(run.run_id).data.metrics
    assert {"system/cpu_utilization_percentage", "system/system_memory_usage_percentage"} <= metrics.keys()
