"""The batch in lockstep: nobody takes a turn before all have taken theirs, and who is gone holds up nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from envs.protocol import Step
from infra.chat import UnfitConversation
from rl.config.load import validate
from rl.errors import EnvironmentFailure, StageFailure
from rl.trajectory import Problem, Trajectory, Uid
from tasks import runtime
from tasks.together import Lockstep, pick, together
from tests.tasks.bad_environments import Good
from tests.tasks.test_trajectories import CODEC, Says


@pytest.mark.parametrize("turns", [[3, 3, 3], [1, 5, 2], [0, 4], [1]])
def test_turns_come_together(turns: list[int]) -> None:
    taken: list[int] = []

    async def play(lockstep: Lockstep, mine: int) -> None:
        for turn in range(mine):
            await lockstep.turn()
            taken.append(turn)
            await asyncio.sleep(0)
        lockstep.leave()

    async def all_of_them() -> None:
        lockstep = Lockstep(len(turns))
        await asyncio.wait_for(asyncio.gather(*(play(lockstep, n) for n in turns)), 10)

    asyncio.run(all_of_them())
    assert taken == sorted(taken) and len(taken) == sum(turns)


class Uneven(Good):
    """Ends after a turn, but for the last problem, which breaks in the way of `how`."""

    def __init__(self, how: str):
        super().__init__()
        self._how = how

    def _break(self, how: str, error: Exception) -> None:
        if self._seed == 2 and self._how == how:
            raise error

    @property
    def tools(self) -> Sequence[dict[str, Any]]:  # type: ignore[override]
        self._break("tools", UnfitConversation("the chat template leaves out a message"))
        return ()

    @property
    def difficulty(self) -> str | None:  # type: ignore[override]
        self._break("difficulty", KeyError("level"))
        return None

    async def step(self, action: str) -> Step:
        self._break("step", ConnectionError("the host went away"))
        return await super().step(action)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("step", EnvironmentFailure, "went away"),
        ("tools", StageFailure, "UnfitConversation: the chat template leaves out"),
        ("difficulty", StageFailure, "KeyError: 'level'"),
    ],
)
def test_one_that_fails_is_its_own_result(
    how: str, kind: type[StageFailure], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    domain = {"name": "d", "environment": "tests.tasks.test_together:Uneven", "environment_options": {"how": how}}
    source = {"type": "pretrained", "path": "unused"}
    config = validate({"name": "t", "model": {"source": source}, "domains": [domain]}, "test")
    made = runtime.Runtime(config, "http://127.0.0.1:9", tmp_path)
    made.proxy, made.__dict__["codec"] = Says(), CODEC  # type: ignore[assignment]
    monkeypatch.setitem(runtime._RUNTIMES, "run", made)
    starts = [(Uid(n, 0), Problem(n, "d", n, n), 4, 2) for n in range(3)]

    async def play():  # type: ignore[no-untyped-def]
        try:
            return await asyncio.wait_for(together("run", starts), 30), made.environments.live
        finally:
            await made.environments.close()

    played, left = asyncio.run(play())
    assert left == 0 and len(played) == 6
    for n in range(2):
        one = pick("run", played, Uid(n, 0), 1)
        assert isinstance(one, Trajectory) and one.start_version == 4 and one.spans[0].stage == "reset"
    for member in range(2):
        with pytest.raises(kind, match=words):
            pick("run", played, Uid(2, 0), member)
