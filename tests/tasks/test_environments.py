"""The environment manager: deadlines, names for failures, and every environment closed exactly once."""

import asyncio

import pytest

from rl.config.load import validate
from rl.errors import EnvironmentFailure, EnvironmentTimeout
from rl.trajectory import Problem
from tasks import environments
from tests.tasks.bad_environments import CLOSED, Good

SEEDS = iter(range(10_000, 20_000))


def manager(kind: str, options: dict | None = None, **deadlines: float) -> environments.EnvironmentManager:
    config = validate(
        {
            "name": "t",
            "model": {"source": {"type": "pretrained", "path": "unused"}},
            "domains": [
                {
                    "name": "d",
                    "environment": f"tests.tasks.bad_environments:{kind}",
                    "environment_options": options or {},
                }
            ],
            "deadlines": deadlines,
        },
        "test",
    )
    return environments.EnvironmentManager(config)


@pytest.fixture
def problem() -> Problem:
    return Problem(0, "d", 0, next(SEEDS))


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch):
    monkeypatch.setattr(environments, "BACKOFF_S", 0.0)


async def test_a_parked_environment_is_claimed_once_and_closed_once(problem):
    m = manager("Good")
    await m.park("k", problem)
    live = await m.claim("k", problem)
    assert (await m.step(live, "a", problem)).reward == 1.0
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
    with pytest.raises(EnvironmentFailure, match="broken image"):
        await m.park("k", problem)
    assert m.live == 0 and CLOSED[problem.seed] == environments.START_TRIES


async def test_a_hanging_start_ends_at_its_deadline(problem):
    m = manager("HangsInReset", reset=0.02)
    with pytest.raises(EnvironmentTimeout, match="reset"):
        await m.park("k", problem)
    assert m.live == 0


@pytest.mark.parametrize("kind", ["HangsInStep", "BlocksInStep"])
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
        await m.step(live, "a", problem)
    beside.cancel()
    assert ticks > 0
    await m.release(live)
    assert m.live == 0


async def test_a_raising_step_is_a_named_failure_that_tells_the_problem(problem):
    m = manager("RaisesInStep")
    live = await m.claim("k", problem)
    with pytest.raises(EnvironmentFailure, match=str(problem.seed)):
        await m.step(live, "a", problem)
    await m.release(live)


async def test_a_failing_close_does_not_fail_the_trajectory(problem):
    m = manager("RaisesInClose")
    live = await m.claim("k", problem)
    await m.release(live)
    assert m.live == 0 and CLOSED[problem.seed] == 1


async def test_an_unclaimed_environment_is_swept_when_its_lease_ends(problem):
    m = manager("Good", trajectory=0.02)
    m.start_sweeping()
    await m.park("k", problem)
    async with asyncio.timeout(5):
        while m.live:
            await asyncio.sleep(0.005)
    assert CLOSED[problem.seed] == 1
    await m.close()
