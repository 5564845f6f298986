"""SkyRL-Gym's own environments on problems in its own format."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from envs.adapters.skyrl_gym import SkyRLGym
from envs.check import Subject, examine
from envs.episodes import play
from rl.errors import ConfigError
from rl.trajectory import Message


@pytest.fixture
def problems(tmp_path: Path) -> str:
    """Sums, as rows of a SkyRL data set."""
    rng = random.Random(0)
    rows = []
    for _ in range(60):
        a, b = rng.randint(1, 99), rng.randint(1, 99)
        prompt = [
            {"role": "system", "content": "End with '#### ANSWER'."},
            {"role": "user", "content": f"What is {a} + {b}?"},
        ]
        rows.append({"prompt": prompt, "reward_spec": {"ground_truth": str(a + b)}, "extra_info": {"max_turns": 3}})
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def answer(_: Any, messages: list[Message]) -> str:
    """What a good policy would say at its second try."""
    if len(messages) < 4:
        return "Perhaps #### 1"
    a, b = messages[1].content.removeprefix("What is ").removesuffix("?").split(" + ")
    return f"It is #### {int(a) + int(b)}"


async def test_transcript(problems: str) -> None:
    environment = SkyRLGym("gsm8k_multi_turn", problems)
    episode = await play(environment, Subject.problem(0), answer, 5)
    assert [message.role for message in episode.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert episode.messages[3].content.startswith("Please provide your step-by-step reasoning")
    assert [step.reward for step in episode.steps] == [pytest.approx(0.2 / 3), 1.0]
    assert episode.steps[-1].terminated
    assert episode.steps[-1].info == {"metrics": {"steps": 2}}


async def test_it_keeps_the_promises_of_an_environment(problems: str) -> None:
    findings = await examine(Subject(lambda: SkyRLGym("gsm8k_multi_turn", problems), problems=20))
    assert [f for f in findings if not f.ok] == []


async def test_mistakes_are_named(problems: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"id \('gsm9k'\)"):
        SkyRLGym("gsm9k", problems)
    with pytest.raises(ValueError, match=r"problems .* is no file"):
        SkyRLGym("gsm8k", "/nowhere")
    few = tmp_path / "few.jsonl"
    few.write_text(Path(problems).read_text().splitlines()[0])
    environment = SkyRLGym("gsm8k", str(few))
    with pytest.raises(ConfigError, match="has 1 rows and none for the split"):
        for split in ("train", "heldout"):
            await environment.reset(Subject.problem(0, split))
