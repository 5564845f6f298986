"""Whole trajectories through the real stages on a cluster; only what the policy says is scripted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from distributed import Client, Scheduler, SpecCluster, Worker

from envs.protocol import Mistake, Step
from infra.chat import ChatCodec
from infra.compute.graphs import GroupGraph, Placements, Stages
from infra.compute.pools import slots
from infra.engines.protocol import Generation
from infra.models.tiny import END, TEMPLATE, make_tokenizer
from rl.config.load import validate
from rl.errors import EnvironmentFailure, EnvironmentTimeout, InjectedFailure
from rl.placement import runs_on
from rl.trajectory import Group, Problem, Trajectory, Uid
from tasks import environments, runtime
from tasks.interact import interact
from tasks.reset import reset
from tasks.score import score
from tests.tasks.bad_environments import Good, HangsInStep

SIZE = 4
CODEC = ChatCodec(make_tokenizer(), TEMPLATE, {"eos_token": END, "unk_token": "<unk>"})


class Says:
    """In the place of the proxy and its engines: every turn is the same text."""

    def __init__(self, text: str = "hello"):
        self.tokens = CODEC.turn(text)

    async def generate(self, **_: Any) -> Generation:
        return Generation(list(self.tokens), [-0.5] * len(self.tokens), "stop", [(0, 0)])


class Patchy(Good):
    """The first `broken` instances of a problem break in their step, each in the way of `how`."""

    steps: ClassVar[Counter] = Counter()

    def __init__(self, broken: int, how: str):
        super().__init__()
        self._broken, self._how = broken, how

    async def step(self, action: str) -> Step:
        Patchy.steps[self._seed] += 1
        if Patchy.steps[self._seed] <= self._broken:
            if self._how == "hang":
                return await HangsInStep().step(action)
            raise ConnectionError("the host went away")
        return await super().step(action)


class Mistaken(Good):
    """Two mistakes of two kinds, then the end."""

    async def step(self, action: str) -> Step:
        self._turn = getattr(self, "_turn", 0) + 1
        step = await super().step(action)
        if self._turn == 3:
            return step
        kind = Mistake.INVALID if self._turn == 1 else Mistake.TOOL_ERROR
        return Step(step.observation, error=kind, info={"last": self._turn})


@runs_on("cpu")
def close_group(run: str, *members: Trajectory) -> Group:
    return Group.of(members)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    def worker(name: str, slots: int) -> dict:
        return {"cls": Worker, "options": {"nthreads": slots, "resources": {name: slots}, "dashboard": False}}

    spec = SpecCluster(
        workers={"cpu": worker("cpu", 4), "lambda": worker("lambda", 2)},
        scheduler={"cls": Scheduler, "options": {"protocol": "inproc", "port": 0, "dashboard": False}},
    )
    with spec, Client(spec, set_as_default=False) as connected:
        yield connected


@pytest.fixture
def played(client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(environments, "BACKOFF_S", 0.0)

    def play(environment: str, ordinal: int, options: dict | None = None, retries: int = 2, **domain: Any) -> Group:
        section = {"name": "d", "environment": f"tests.tasks.{environment}", "environment_options": options or {}}
        config = validate(
            {
                "name": "t",
                "model": {"source": {"type": "pretrained", "path": "unused"}},
                "domains": [section | domain],
                "deadlines": {"environment_step": 0.3},
            },
            "test",
        )
        made = runtime.Runtime(config, "http://127.0.0.1:9", tmp_path)
        made.proxy, made.__dict__["codec"] = Says(), CODEC  # type: ignore[assignment]
        monkeypatch.setitem(runtime._RUNTIMES, "run", made)
        placements = Placements(Stages(reset, interact, score, close_group), slots(client))
        problem = Problem(ordinal, "d", ordinal, 77_000 + ordinal)
        group = GroupGraph(client, placements, "run", Uid(ordinal, 0), problem, 0, SIZE, retries, 60).run()
        assert made.environments.live == 0
        return group

    return play


@pytest.mark.parametrize(("how", "ordinal"), [("raise", 1), ("hang", 2)])
def test_an_environment_that_breaks_costs_its_try_and_is_never_scored(played, how: str, ordinal: int) -> None:
    group = played("test_trajectories:Patchy", ordinal, {"broken": 2, "how": how})
    assert group.rewards == [1.0] * SIZE
    assert sum(member.retry for member in group.members) == 2


@pytest.mark.parametrize(
    ("how", "ordinal", "failure"), [("raise", 3, EnvironmentFailure), ("hang", 4, EnvironmentTimeout)]
)
def test_past_its_budget_the_group_is_given_up_by_name(played, how: str, ordinal: int, failure: type) -> None:
    with pytest.raises(failure, match="step"):
        played("test_trajectories:Patchy", ordinal, {"broken": 1000, "how": how}, retries=1)


def test_mistakes_of_the_policy_are_counted_beside_what_the_environment_says(played) -> None:
    for member in played("test_trajectories:Mistaken", 5).members:
        assert member.info == {"mistakes": {"invalid": 1, "tool_error": 1}} and member.turns == 3


def test_latencies_on_purpose_are_spans_of_their_own(played) -> None:
    injection = {"step_latency": {"type": "constant", "seconds": 0.001}}
    for member in played("bad_environments:Good", 6, injection=injection).members:
        injected, within = ([s for s in member.spans if s.stage == stage] for stage in ("injected", "environment"))
        assert len(injected) == 1 and within[0].start <= injected[0].start <= injected[0].end <= within[0].end
    assert not [s for m in played("bad_environments:Good", 7).members for s in m.spans if s.stage == "injected"]


def test_failures_on_purpose_are_tried_again_as_others_and_keep_their_name(played) -> None:
    group = played("bad_environments:Good", 8, retries=50, injection={"step_failure": 0.5})
    assert group.rewards == [1.0] * SIZE and any(member.retry for member in group.members)
    with pytest.raises(InjectedFailure):
        played("bad_environments:Good", 9, injection={"step_failure": 1.0})


def test_groups_are_whole_where_places_are_short(played) -> None:
    assert played("bad_environments:Good", 10, concurrency=1, warm=1).rewards == [1.0] * SIZE
