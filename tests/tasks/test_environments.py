"""The environment manager: deadlines, names for failures, places, and every environment closed exactly once."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from envs.protocol import Needs, Step
from rl.config.load import validate
from rl.errors import (
    EnvironmentFailure,
    EnvironmentProtocolError,
    EnvironmentStartFailure,
    EnvironmentTimeout,
    InjectedFailure,
    StageFailure,
)
from rl.trajectory import Message, Problem
from tasks import environments
from tests.tasks.bad_environments import CLOSED, Answers, Constructed, Good, Opens, SlowlyConstructed

SEEDS = iter(range(10_000, 20_000))


def manager(
    kind: str, options: dict | None = None, domain: dict | None = None, **deadlines: float
) -> environments.EnvironmentManager:
    section = {
        "name": "d",
        "environment": f"tests.tasks.bad_environments:{kind}",
        "environment_options": options or {},
    }
    config = validate(
        {
            "name": "t",
            "model": {"source": {"type": "pretrained", "path": "unused"}},
            "domains": [section | (domain or {})],
            "deadlines": deadlines,
        },
        "test",
    )
    return environments.EnvironmentManager(config)


@contextmanager
def never(unwanted: threading.Event) -> Iterator[None]:
    """A run whose lease is always renewed."""
    yield


@pytest.fixture
def problem() -> Problem:
    return Problem(0, "d", 0, next(SEEDS))


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch):
    monkeypatch.setattr(environments, "BACKOFF_S", 0.0)
    monkeypatch.setattr(environments, "SWEEP_S", 0.01)
    monkeypatch.setattr(Constructed, "most", 0)
    for record in (
        Constructed.prepared, Constructed.made, Constructed.alive, Constructed.failing_preparations,
        SlowlyConstructed.made, SlowlyConstructed.closed,
    ):  # fmt: skip
        record.clear()
    SlowlyConstructed.go_on.clear()
    SlowlyConstructed.reached.clear()


async def test_a_parked_environment_is_claimed_once_and_closed_once(problem):
    m = manager("Good")
    await m.park("k", problem)
    live = await m.claim("k", problem)
    assert (await m.step(live, "a")).reward == 1.0
    await m.release(live)
    await m.close()
    assert CLOSED[problem.seed] == 1 and m.live == 0


async def test_claim_starts_it_here_when_it_was_parked_elsewhere(problem):
    m = manager("Good")
    live = await m.claim("never parked", problem)
    assert [message.content for message in live.opening] == ["go"]
    await m.release(live)
    assert m.live == 0


async def test_parking_again_replaces_the_former(problem):
    m = manager("Good")
    await m.park("k", problem)
    await m.park("k", problem)
    assert CLOSED[problem.seed] == 1 and m.live == 1
    await m.close()
    assert CLOSED[problem.seed] == 2 and m.live == 0


async def test_a_flaky_start_is_tried_again(problem):
    m = manager("Good", {"flaky_starts": environments.START_TRIES - 1})
    await m.park("k", problem)
    assert Good.starts[problem.seed] == environments.START_TRIES
    await m.close()
    assert m.live == 0


async def test_a_start_that_always_fails_is_a_named_failure_and_leaves_nothing(problem):
    m = manager("RaisesInReset")
    with pytest.raises(EnvironmentStartFailure, match="broken image"):
        await m.park("k", problem)
    assert m.live == 0 and CLOSED[problem.seed] == environments.START_TRIES


async def test_a_hanging_start_ends_at_its_deadline(problem):
    m = manager("HangsInReset", reset=0.02)
    with pytest.raises(EnvironmentTimeout, match="reset"):
        await m.park("k", problem)
    assert m.live == 0


@pytest.mark.parametrize("kind", ["HangsInStep", "BlocksInStep", "SwallowsCancellation"])
async def test_a_hanging_step_ends_at_its_deadline_and_others_go_on(problem, kind):
    m = manager(kind, environment_step=0.05)
    live = await m.claim("k", problem)
    ticks = 0

    async def others() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    beside = asyncio.create_task(others())
    with pytest.raises(EnvironmentTimeout, match="step"):
        await m.step(live, "a")
    beside.cancel()
    assert ticks > 0
    await m.release(live)
    assert m.live == 0


async def test_a_raising_step_is_a_named_failure_that_tells_the_problem(problem):
    m = manager("RaisesInStep")
    live = await m.claim("k", problem)
    with pytest.raises(EnvironmentFailure, match=str(problem.seed)):
        await m.step(live, "a")
    await m.release(live)


async def test_a_failing_close_does_not_fail_the_trajectory(problem):
    m = manager("RaisesInClose")
    live = await m.claim("k", problem)
    await m.release(live)
    assert m.live == 0 and CLOSED[problem.seed] == 1


async def test_an_unclaimed_environment_is_swept_when_its_lease_ends(problem):
    m = manager("Good", trajectory=0.02)
    m.start(never, ["d"])
    await m.park("k", problem)
    async with asyncio.timeout(5):
        while m.live:
            await asyncio.sleep(0.005)
    assert CLOSED[problem.seed] == 1
    await m.close()


async def test_the_smaller_of_own_and_configured_deadline_counts(problem):
    m = manager("ImpatientOfItself", environment_step=60)
    live = await m.claim("k", problem)
    with pytest.raises(EnvironmentTimeout, match=r"longer than 0\.05 s"):
        await m.step(live, "a")
    await m.release(live)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("RaisesInStep", "a bug of the environment"),
        ("ExitsInStep", "SystemExit"),
        ("CancelsItself", "cancelled itself"),
        ("TimesOutItself", "its own service was late"),
    ],
)
async def test_whatever_a_step_raises_has_the_name_of_a_failure(problem, kind, words):
    m = manager(kind)
    live = await m.claim("k", problem)
    with pytest.raises(EnvironmentFailure, match=words) as failure:
        await m.step(live, "a")
    assert failure.value.reason == "environment_error"
    await m.release(live)


GOOD = Message("user", "x")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "NoneType instead of a Step"),
        (Step("text"), "no user or tool message"),
        (Step(Message("assistant", "x")), "no user or tool message"),
        (Step(Message("user", None)), "must be text"),
        (Step(GOOD, reward=float("nan")), "neither None nor a finite number"),
        (Step(GOOD, reward="won"), "neither None nor a finite number"),
        (Step(GOOD, info={"x": object()}), "not JSON"),
        (Step(GOOD, info={"x": float("inf")}), "not JSON"),
    ],
)
async def test_an_answer_against_the_protocol_is_a_failure_not_a_reward(problem, answer, words):
    Answers.given.append(answer)
    m = manager("Answers")
    live = await m.claim("k", problem)
    with pytest.raises(EnvironmentProtocolError, match=words):
        await m.step(live, "a")
    await m.release(live)


@pytest.mark.parametrize(
    "opening", [None, [], ["text"], [Message("user", 3)], [Message("tool", "x")], [Message("system", "x")]]
)
async def test_an_opening_against_the_protocol_is_a_failure(problem, opening):
    Opens.given.append(opening)
    m = manager("Opens")
    with pytest.raises(EnvironmentProtocolError, match="reset gave"):
        await m.claim("k", problem)
    assert m.live == 0 and CLOSED[problem.seed] == environments.START_TRIES


async def test_what_can_not_be_constructed_is_a_named_failure(problem):
    m = manager("Unconstructible")
    with pytest.raises(EnvironmentStartFailure, match="no such host"):
        await m.claim("k", problem)
    assert m.live == 0


async def test_a_cancelled_start_leaves_nothing(problem):
    m = manager("HangsInReset")
    starting = asyncio.create_task(m.claim("k", problem))
    async with asyncio.timeout(5):
        while not m.live:
            await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert m.live == 0 and CLOSED[problem.seed] == 1


async def test_everything_is_closed_once_when_the_run_is_no_longer_wanted_and_it_can_go_on(problem):
    followed: list[threading.Event] = []

    @contextmanager
    def follow(unwanted: threading.Event) -> Iterator[None]:
        followed.append(unwanted)
        yield

    m = manager("Good", domain={"warm": 2})
    m.start(follow, ["d"])
    await m.park("parked", problem)
    claimed = await m.claim("claimed", problem)
    followed[0].set()
    async with asyncio.timeout(5):
        while m.live:
            await asyncio.sleep(0.005)
    assert CLOSED[problem.seed] == 2
    await m.release(claimed)
    assert CLOSED[problem.seed] == 2
    live = await m.claim("again", problem)  # a run that was resumed under the same name
    assert (await m.step(live, "a")).terminated and len(followed) == 2
    await m.release(live)
    await m.close()


async def test_instances_are_constructed_ahead_and_closed_if_never_taken(problem):
    m = manager("Constructed", {"label": "x"}, {"warm": 3})
    m.start(never, ["d"])
    async with asyncio.timeout(5):
        while len(Constructed.made) < 3:
            await asyncio.sleep(0.005)
    live = await m.claim("k", problem)
    assert live.environment is Constructed.made[0]
    async with asyncio.timeout(5):
        while len(Constructed.made) < 4:  # its place is filled again
            await asyncio.sleep(0.005)
    assert Constructed.prepared == [{"label": "x"}]
    await m.release(live)
    before = CLOSED[-1]
    await m.close()
    assert CLOSED[-1] == before + 3  # three that no problem was given


async def test_what_is_constructed_too_late_is_closed_then(problem):
    m = manager("SlowlyConstructed", reset=0.02)
    with pytest.raises(EnvironmentTimeout, match="construct took longer"):
        await m.claim("k", problem)
    assert m.live == 0
    before = CLOSED[-1]
    SlowlyConstructed.go_on.set()
    async with asyncio.timeout(5):
        while CLOSED[-1] < before + environments.START_TRIES:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("end", ["unwanted", "close"])
@pytest.mark.parametrize("start", ["park", "claim", "start"])
@pytest.mark.parametrize("stuck", ["prepare", "construct"])
async def test_what_is_being_constructed_when_the_run_ends_is_closed_and_nothing_more_is(problem, stuck, start, end):
    followed: list[threading.Event] = []

    @contextmanager
    def follow(unwanted: threading.Event) -> Iterator[None]:
        followed.append(unwanted)
        yield

    m = manager("SlowlyConstructed", {"stuck": stuck}, {"warm": 2})
    if start == "start":
        m.start(follow, ["d"])
        starting = None
    else:
        m._follow = follow
        starting = asyncio.create_task(getattr(m, start)("k", problem))
    async with asyncio.timeout(5):
        while not (SlowlyConstructed.reached.is_set() and followed):
            await asyncio.sleep(0.005)
        if end == "unwanted":
            followed[0].set()
            await m._sweeper
        else:
            await m.close()
    SlowlyConstructed.go_on.set()
    if starting is not None:
        with pytest.raises(EnvironmentStartFailure, match="the run is over"):
            await asyncio.wait_for(starting, 5)
    async with asyncio.timeout(5):
        while len(SlowlyConstructed.closed) < (stuck == "construct"):
            await asyncio.sleep(0.005)
    assert m.live == 0 and SlowlyConstructed.closed == SlowlyConstructed.made
    live = await m.claim("again", problem)  # a run that was resumed under the same name is warmed up again
    async with asyncio.timeout(5):
        while len(SlowlyConstructed.made) - len(SlowlyConstructed.closed) < 3:
            await asyncio.sleep(0.005)
    await m.release(live)
    await m.close()


async def test_what_instances_share_is_prepared_once_however_many_start_together(problem):
    m = manager("Constructed")
    lives = await asyncio.gather(*(m.claim(str(k), problem) for k in range(8)))
    assert len(Constructed.prepared) == 1
    for live in lives:
        await m.release(live)


async def test_a_failed_preparation_is_tried_again(problem):
    Constructed.failing_preparations.append(OSError("no index"))
    m = manager("Constructed")
    live = await m.claim("k", problem)
    assert len(Constructed.prepared) == 1
    await m.release(live)
    Constructed.failing_preparations += [OSError("no index")] * environments.START_TRIES
    with pytest.raises(EnvironmentStartFailure, match="prepare raised OSError"):
        await manager("Constructed").claim("k", problem)


@pytest.mark.parametrize("seed", range(5))
async def test_no_more_than_the_limit_are_alive_and_all_get_their_turn(problem, seed):
    rng = random.Random(seed)
    m = manager("Constructed", {"fails_every": 4}, {"concurrency": 3})

    async def episode(key: str) -> None:
        with suppress(EnvironmentStartFailure):
            await whole(key)

    async def whole(key: str) -> None:
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        if rng.random() < 0.7:
            await m.park(key, problem)
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        if rng.random() < 0.8:  # else its interact never comes
            live = await m.claim(key, problem)
            await asyncio.sleep(0)
            await m.step(live, "a")
            await m.release(live)

    async with asyncio.timeout(20):
        await asyncio.gather(*(episode(str(k)) for k in range(40)))
    assert 1 <= Constructed.most <= 3
    await m.close()
    assert m.live == 0 and not Constructed.alive


async def test_parked_environments_give_way_to_one_that_is_waited_for(problem):
    m = manager("Constructed", domain={"concurrency": 1})
    await m.park("parked", problem)
    await m.park("not parked", problem)  # no place, and no wait: it would hold a slot that others need
    assert m.live == 1
    live = await m.claim("waited for", problem)
    assert m.live == 1 and CLOSED[problem.seed] == 1
    await m.release(live)
    again = await m.claim("parked", problem)
    await m.release(again)


async def test_a_place_that_never_comes_is_a_named_failure(problem):
    m = manager("Good", domain={"concurrency": 1}, trajectory=0.05)
    live = await m.claim("k", problem)
    with pytest.raises(EnvironmentStartFailure, match=r"1 places were taken.*raise domains\[\]\.concurrency"):
        await m.claim("other", problem)
    await m.release(live)


async def test_the_memory_that_an_environment_needs_limits_how_many_are_alive(problem, monkeypatch):
    monkeypatch.setattr(Good, "needs", Needs(memory_mb=2**40))
    m = manager("Good")
    await m.park("a", problem)
    await m.park("b", problem)
    assert m.live == 1
    await m.close()


async def test_failures_on_purpose_have_a_name_of_their_own_and_real_ones_keep_theirs(problem):
    m = manager("Good", domain={"injection": {"step_failure": 1.0}})
    live = await m.claim("k", problem)
    with pytest.raises(InjectedFailure, match="on purpose") as failure:
        await m.step(live, "a")
    assert failure.value.reason == "injected"
    await m.release(live)
    m = manager("RaisesInStep", domain={"injection": {"step_latency": {"type": "constant", "seconds": 0.001}}})
    live = await m.claim("k", problem)
    with pytest.raises(EnvironmentFailure) as real:
        await m.step(live, "a")
    assert real.value.reason == "environment_error" and [span.stage for span in live.injected] == ["injected"]
    await m.release(live)


async def test_a_deadline_that_a_latency_on_purpose_ran_into_is_told_as_such(problem):
    slow = {"type": "constant", "seconds": 60}
    m = manager("Good", domain={"injection": {"step_latency": slow}}, environment_step=0.02)
    live = await m.claim("k", problem)
    with pytest.raises(InjectedFailure, match="delayed on purpose"):
        await m.step(live, "a")
    await m.release(live)
    m = manager("HangsInStep", domain={"injection": {"step_latency": {"type": "constant", "seconds": 0}}},
                environment_step=0.02)  # fmt: skip
    live = await m.claim("k", problem)
    with pytest.raises(EnvironmentTimeout):
        await m.step(live, "a")
    await m.release(live)


async def test_failures_on_purpose_depend_on_the_try_and_on_nothing_else(problem):
    async def fates() -> list[bool]:
        m = manager("Good", domain={"injection": {"step_failure": 0.5, "reset_failure": 0.3}})
        found = []
        for key in map(str, range(40)):
            try:
                live = await m.claim(key, problem)
            except InjectedFailure:
                found.append(False)
                continue
            try:
                await m.step(live, "a")
                found.append(True)
            except StageFailure:
                found.append(False)
            await m.release(live)
        return found

    first = await fates()
    assert first == await fates() and 8 < sum(first) < 32
