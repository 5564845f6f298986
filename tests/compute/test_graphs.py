"""The group graph: one failed or slow member costs itself, and every end has a name."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from distributed import get_worker

from infra.compute.graphs import GroupGraph, Placements, Stages, play_together
from infra.compute.pools import slots
from infra.compute.staged import STAGES, StagedGraph
from rl.errors import EnvironmentFailure, PlacementError, StageFailure, StaleTrajectory
from rl.placement import HardwareClass, runs_on
from rl.redundancy import Mode, RedundancyPolicy
from rl.trajectory import Problem, Uid

SIZE = 4
STARTS: Counter = Counter()
BLOCK = threading.Event()


@runs_on("cpu")
async def reset(run, uid, member, retry, problem, version):
    STARTS[(uid.ordinal, member)] += 1
    return uid.ordinal, member, retry


@runs_on("cpu")
async def interact(run, handle):
    ordinal, member, retry = handle
    if run == "flaky" and member == 2 and retry < 2:
        raise EnvironmentFailure("a chance failure")
    if run == "broken" and member == 1:
        raise EnvironmentFailure("always")
    if run == "bug" and member == 1:
        raise KeyError("not a named failure")
    if run == "stale" and member == 3:
        raise StaleTrajectory("too old")
    return ordinal, member, retry


@runs_on("lambda")
def score(run, trajectory):
    if run == "hangs" and trajectory[1] == 0:
        BLOCK.wait(30)
    return trajectory


@runs_on("cpu")
def admit(run, *members):
    return sorted(members)


def graph(
    client,
    run: str,
    ordinal: int,
    deadline_s: float = 30,
    retries: int = 2,
    kind: type[GroupGraph] = GroupGraph,
    **more,
) -> GroupGraph:
    placements = Placements(Stages(reset, interact, score, admit), slots(client))
    return kind(
        client,
        placements,
        run,
        Uid(ordinal, 0),
        Problem(ordinal, "d", ordinal, 1),
        0,
        SIZE,
        retries,
        deadline_s,
        **more,
    )


def complete(this: GroupGraph, unit: str) -> list:
    """What the group admitted, watched as a whole or member by member."""
    if unit == "group":
        return this.run()
    if unit == "stage":
        assert isinstance(this, StagedGraph)
        with ThreadPoolExecutor(len(this.members)) as threads:
            list(threads.map(lambda member: [this.watch(member, stage) for stage in STAGES], this.members))
        return this.close()
    with ThreadPoolExecutor(len(this.members)) as threads:
        (admitted,) = [r for r in threads.map(this.run_member, this.members) if r is not None]
    return admitted


def test_stages_that_are_watched_one_by_one_give_what_they_made_and_close_the_group_once(client):
    this = graph(client, "fine", 50, kind=StagedGraph)
    watched = {stage: this.watch(2, stage) for stage in STAGES}
    assert watched == {"reset": (50, 2, 0), "interact": (50, 2, 0), "score": (50, 2, 0)}
    assert this.close() is None, "three members are not scored yet"
    assert complete(this, "stage") == [(50, m, 0) for m in range(SIZE)]


def test_a_member_that_fails_in_a_watched_stage_is_started_again_alone(client):
    STARTS.clear()
    this = graph(client, "flaky", 51, kind=StagedGraph)
    assert complete(this, "stage") == [(51, 0, 0), (51, 1, 0), (51, 2, 2), (51, 3, 0)]
    assert STARTS == {(51, 0): 1, (51, 1): 1, (51, 2): 3, (51, 3): 1}


def test_past_its_budget_a_watched_stage_fails_by_the_name_of_the_cause(client):
    this = graph(client, "broken", 52, kind=StagedGraph)
    with pytest.raises(EnvironmentFailure):
        complete(this, "stage")
    assert this.close() is None


@pytest.mark.parametrize("unit", ["group", "trajectory", "stage"])
def test_a_spare_takes_the_place_of_what_fails_and_only_of_that(client, unit):
    STARTS.clear()
    number, kind = 30 + ("group", "trajectory", "stage").index(unit), StagedGraph if unit == "stage" else GroupGraph
    this = graph(client, "broken", number, kind=kind, redundancy=RedundancyPolicy(extra_members=2))
    assert [member for _, member, _ in complete(this, unit)] == [0, 2, 3, 4]
    assert (this.tries, this.failures) == (SIZE + 2, 1)


@pytest.mark.parametrize("unit", ["group", "trajectory"])
def test_of_first_finished_the_slow_one_loses_and_is_named(client, unit):
    BLOCK.clear()
    try:
        policy = RedundancyPolicy(Mode.FIRST_FINISHED, extra_members=1)
        this = graph(client, "hangs", 40 + (unit == "group"), redundancy=policy)
        assert [member for _, member, _ in complete(this, unit)] == [1, 2, 3, 4]
        assert this.losers == [(0, 0)]
    finally:
        BLOCK.set()


def test_a_group_is_admitted_with_every_member_once(client):
    assert graph(client, "fine", 1).run() == [(1, m, 0) for m in range(SIZE)]


def test_a_failing_member_is_started_again_alone(client):
    STARTS.clear()
    assert graph(client, "flaky", 2).run() == [(2, 0, 0), (2, 1, 0), (2, 2, 2), (2, 3, 0)]
    assert STARTS == {(2, 0): 1, (2, 1): 1, (2, 2): 3, (2, 3): 1}


def test_past_its_budget_the_group_fails_by_the_name_of_the_cause(client):
    with pytest.raises(EnvironmentFailure) as failure:
        graph(client, "broken", 3).run()
    assert failure.value.reason == "environment_error"


def test_an_unnamed_exception_is_an_infrastructure_failure_that_tells_what_it_was(client):
    with pytest.raises(StageFailure, match="KeyError") as failure:
        graph(client, "bug", 4).run()
    assert failure.value.reason == "stage_failure"


def test_a_stale_member_is_not_tried_again(client):
    STARTS.clear()
    with pytest.raises(StaleTrajectory):
        (this := graph(client, "stale", 5)).run()
    assert STARTS[(5, 3)] == 1 and this.failures == 0, "it is no failure that a spare could make good"


@pytest.mark.parametrize("unit", ["group", "trajectory"])
def test_a_hanging_reward_ends_at_the_deadline_by_name(client, unit):
    BLOCK.clear()
    late = graph(client, "hangs", 6 if unit == "group" else 60, deadline_s=0.5)
    try:
        with pytest.raises(StageFailure, match=r"deadlines\.trajectory"):
            late.run() if unit == "group" else late.run_member(0)
    finally:
        BLOCK.set()


def test_the_unit_trajectory_closes_the_group_with_the_last_member(client):
    this = graph(client, "flaky", 7)
    results = [None] * SIZE
    threads = [threading.Thread(target=lambda m=m: results.__setitem__(m, this.run_member(m))) for m in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    closed = [r for r in results if r is not None]
    assert closed == [[(7, 0, 0), (7, 1, 0), (7, 2, 2), (7, 3, 0)]]


@pytest.mark.parametrize("unit", ["group", "trajectory"])
def test_whoever_comes_late_to_a_cancelled_group_starts_nothing(client, unit):
    STARTS.clear()
    this = graph(client, "broken", 8)
    this.cancel()
    with pytest.raises(StageFailure, match="cancelled"):
        this.run() if unit == "group" else this.run_member(1)
    assert not STARTS[(8, 1)]


def test_a_spare_that_comes_late_to_a_complete_group_does_not_play_it_again(client):
    this = graph(client, "fine", 9, redundancy=RedundancyPolicy(Mode.FIRST_FINISHED, 1))
    with ThreadPoolExecutor(SIZE) as threads:
        list(threads.map(this.run_member, range(SIZE)))
    tries = this.tries
    assert this.run_member(SIZE) is None and this.tries == tries


def test_a_class_without_a_pool_is_an_error_at_once_and_lambda_falls_back_to_cpu():
    stages = Stages(reset, interact, score, admit)
    assert Placements(stages, {HardwareClass.CPU: 4}).resources("score", "d") == {"cpu": 1}
    with pytest.raises(PlacementError, match="cpu"):
        Placements(stages, {HardwareClass.LAMBDA: 4}).resources("reset", "d")


def test_a_failing_admit_is_a_named_failure_too(client):
    @runs_on("cpu")
    def full(run, *members):
        raise OSError("the disk is full")

    placements = Placements(Stages(reset, interact, score, full), slots(client))
    this = GroupGraph(client, placements, "fine", Uid(9, 0), Problem(9, "d", 9, 1), 0, SIZE, 2, 30)
    with pytest.raises(StageFailure, match="the disk is full"):
        this.run()


def test_every_stage_runs_on_a_worker_of_its_class(client):
    @runs_on("cpu")
    async def start(run, uid, member, retry, problem, version):
        return [get_worker().name]

    @runs_on("cpu")
    async def play(run, so_far):
        return [*so_far, get_worker().name]

    @runs_on("lambda")
    def judge(run, so_far):
        return [*so_far, get_worker().name]

    @runs_on("cpu")
    def close(run, *members):
        return [[*member, get_worker().name] for member in members]

    placements = Placements(Stages(start, play, judge, close), slots(client))
    for ordinal in range(20, 25):
        this = GroupGraph(client, placements, "where", Uid(ordinal, 0), Problem(ordinal, "d", 0, 1), 0, SIZE, 0, 30)
        assert this.run() == [["cpu", "cpu", "lambda", "cpu"]] * SIZE


@pytest.mark.parametrize("unit", ["group", "trajectory"])
def test_what_was_played_together_is_taken_and_only_what_failed_is_played_again(client, unit):
    @runs_on("cpu")
    async def together(run, starts):
        return {(uid, member): (uid.ordinal, member, 0) for uid, _, _, size in starts for member in range(size)}

    @runs_on("cpu")
    def pick(run, played, uid, member):
        if member == 2:
            raise EnvironmentFailure("it broke in lockstep")
        return played[uid, member]

    STARTS.clear()
    stages = Stages(reset, interact, score, admit, together, pick)
    placements = Placements(stages, slots(client))
    starts = [(Uid(n, 0), Problem(n, "d", n, 1)) for n in (50 + 2 * (unit == "group"), 51 + 2 * (unit == "group"))]
    played = play_together(client, placements, "fine", starts, SIZE, 0)
    for uid, problem in starts:
        this = GroupGraph(client, placements, "fine", uid, problem, 0, SIZE, 2, 30, played=played)
        assert complete(this, unit) == [(uid.ordinal, m, int(m == 2)) for m in range(SIZE)]
    assert {(uid.ordinal, 2): 1 for uid, _ in starts} == STARTS
