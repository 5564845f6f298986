"""The warm start: what it learns from, that it learns, and that it repeats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from envs.calculator import Calculator
from envs.frozen_lake import FrozenLake
from envs.protocol import Environment, Step
from envs.registry import make_environment
from infra.chat import ChatCodec
from infra.models.sources import materialise
from infra.models.tiny import END, TEMPLATE, make_tokenizer
from infra.training.episodes import Episode, demonstrate, play
from infra.training.warmstart import IGNORED, _dataset, warm_start
from rl.config.load import validate
from rl.config.run import RunConfig
from rl.errors import ConfigError
from rl.stream import ProblemStream
from rl.trajectory import Message, Problem

CODEC = ChatCodec(make_tokenizer(), TEMPLATE, {"eos_token": END, "unk_token": "<unk>"})
PROBLEM = ProblemStream(0, {"d": 1.0}).problem(3)


class Inexpert(Environment):
    """Has no demonstrator."""

    async def reset(self, problem: Problem) -> list[Message]:
        return [Message("user", "x")]

    async def step(self, action: str) -> Step:
        return Step(Message("user", "y"), terminated=True)


def config(environment: str = "frozen_lake", seed: int = 0, **warmstart: Any) -> RunConfig:
    size = {"hidden_size": 64, "layers": 2}
    return validate(
        {
            "name": "t",
            "seed": seed,
            "domains": [{"name": "d", "environment": environment, "max_turns": 8}],
            "model": {"source": {"type": "tiny", "size": size}, "warmstart": warmstart},
            "rollout": {"max_new_tokens": 8, "max_tokens": 256},
        },
        "test",
    )


async def test_a_demonstration_is_what_rollout_would_record() -> None:
    episode = await demonstrate(Calculator(), PROBLEM, CODEC, 10, 512)
    environment = Calculator()
    tokens, spoken = CODEC.open(await environment.reset(PROBLEM)), 0
    while True:
        text = environment.expert_action()
        tokens += CODEC.turn(text)
        spoken += len(CODEC.turn(text))
        step = await environment.step(text)
        if step.terminated:
            break
        tokens += CODEC.reply(step.observation)
    assert (episode.token_ids, sum(episode.mask), episode.reward) == (tokens, spoken, 1.0)
    assert episode.mask[-1] == 1 and episode.token_ids[-1] in CODEC.stop_token_ids


async def test_a_turn_that_was_cut_off_ends_the_episode_and_closes_the_environment() -> None:
    closed = []

    class Watched(Calculator):
        async def close(self) -> None:
            closed.append(True)

    async def cut(_: list[int]) -> None:
        return None

    episode = await play(Watched(), PROBLEM, CODEC, cut, 10, 512)
    assert (episode.reward, sum(episode.mask), closed) == (0.0, 0, [True])


def test_batches_hold_episodes_of_like_length_in_random_order_with_loss_on_the_expert_alone() -> None:
    episodes = [Episode(list(range(1, n + 1)), [0] * (n - 2) + [1, 1], 1.0) for n in range(3, 103)]
    data = _dataset(episodes, batch_size=10, steps=25, seed=0)
    lengths = [len(ids) for ids in data["input_ids"]]
    batches = [lengths[at : at + 10] for at in range(0, len(lengths), 10)]
    assert len(batches) >= 25
    assert all(max(batch) - min(batch) < 10 for batch in batches)
    assert sorted(lengths[:100]) == list(range(3, 103)), "an epoch shows every episode once"
    starts = [batch[0] for batch in batches[:10]]
    assert starts != sorted(starts) and starts != sorted(starts, reverse=True)
    for ids, labels in zip(data["input_ids"], data["labels"], strict=True):
        assert labels == [IGNORED] * (len(ids) - 2) + ids[-2:]


def test_without_an_expert_the_domain_is_named(tmp_path: Path) -> None:
    section = config(f"{__name__}:Inexpert")
    model = materialise(section.model, tmp_path, 0)
    with pytest.raises(ConfigError, match=r"domains\.d\.environment: Inexpert has no expert.*remove model\.warmstart"):
        warm_start(section, make_environment, model, tmp_path / "out", lambda _: None)


@pytest.mark.slow
def test_it_learns_stops_at_the_goal_repeats_bit_by_bit_and_sees_no_held_out_problem(tmp_path: Path) -> None:
    section = config(demonstrations=400, max_steps=60, stop_at_reward=0.25)
    model = materialise(section.model, tmp_path, section.seed)
    splits = set()

    class Watched(FrozenLake):
        async def reset(self, problem: Problem) -> list[Message]:
            splits.add(problem.split)
            return await super().reset(problem)

    looks: list[dict[str, float]] = []
    last = warm_start(section, lambda _: Watched(), model, tmp_path / "a", looks.append)
    assert looks[0]["reward"] < 0.2 and last == looks[-1]
    assert last["reward"] >= 0.25 and last["step"] <= 60
    assert splits == {"train"}
    assert ChatCodec.from_directory(tmp_path / "a").stop_token_ids == CODEC.stop_token_ids

    assert warm_start(section, make_environment, model, tmp_path / "b", looks.append)["step"] == last["step"]
    written = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert written[0] == written[1] != (model / "model.safetensors").read_bytes()
