"""Problems from a dataset: every row once an epoch, prompts on one side, answers where rewards look for them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from envs.check import Subject, examine
from envs.dataset import Dataset, table
from envs.registry import make_environment
from rewards.protocol import TrajectoryView
from rewards.registry import score
from rl.config.work import DomainSection
from rl.errors import ConfigError
from rl.trajectory import Message, Problem, Status

pytestmark = pytest.mark.slow  # opening the library takes seconds
ROWS = [
    {"question": f"What is {a} plus {b}?", "answer": f"{a} + {b}\n#### {a + b}", "level": a}
    for a in range(6)
    for b in range(8)
]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, ROWS[0]]))
    return str(path)


def options(file: str, **more: Any) -> dict[str, Any]:
    return {"path": file, "prompt": "{question}", "answer_after": "####", "difficulty": "level"} | more


def opening(chosen: dict[str, Any], index: int, split: str = "train") -> str:
    environment = Dataset(**chosen)
    return asyncio.run(environment.reset(Problem(index, "sums", index, 0, split)))[-1].content


def test_an_epoch_has_every_row_once_and_the_next_one_another_order(file: str) -> None:
    chosen = options(file)
    places = table(Dataset(**chosen)._source).places
    count = len(places["train"])
    first, second = ([opening(chosen, e * count + at) for at in range(count)] for e in (0, 1))
    assert Counter(first) == Counter(second) and first != second
    assert len(places["train"]) + len(places["heldout"]) == len(ROWS) + 1
    held_out = {opening(chosen, at, "heldout") for at in range(len(places["heldout"]))}
    assert not held_out & set(first) and len(held_out | set(first)) == len(ROWS)


def test_it_keeps_what_an_environment_promises(file: str) -> None:
    findings = asyncio.run(examine(Subject(lambda: Dataset(**options(file)), 1, problems=8)))
    assert [finding for finding in findings if not finding.ok] == []


def test_rewards_find_the_answer_and_evaluation_the_difficulty(file: str) -> None:
    section = DomainSection(
        name="sums", environment="dataset", environment_options=options(file, system="Add."), reward="math"
    )
    environment, problem = make_environment(section), Problem(3, "sums", 3, 0)
    opened = asyncio.run(environment.reset(problem))
    assert opened[0] == Message("system", "Add.")
    step = asyncio.run(environment.step(environment.expert_action() + ".0"))
    assert step.reward == 1 and step.terminated and environment.difficulty in range(6)
    said = [*opened, Message("assistant", rf"so \boxed{{{step.info['answer']}}}"), step.observation]
    assert score(section, TrajectoryView(problem, said, Status.TERMINATED, 1, 9, 1.0, step.info)) == {"math": 1.0}


def test_a_directory_with_a_split_of_its_own_and_a_prompt_of_messages(tmp_path: Path) -> None:
    import datasets

    system = {"role": "system", "content": "s"}
    chats = [{"chat": [system, {"role": "user", "content": f"q{i}"}], "answer": i} for i in range(9)]
    parts = {"train": datasets.Dataset.from_list(chats[:6]), "test": datasets.Dataset.from_list(chats[5:])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    chosen = {"path": str(tmp_path / "saved"), "prompt": "{chat}", "held_out_split": "test"}
    assert {opening(chosen, at) for at in range(5)} == {"q0", "q1", "q2", "q3", "q4"}, "q5 is held out"
    assert {opening(chosen, at, "heldout") for at in range(4)} == {"q5", "q6", "q7", "q8"}


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"prompt": "{quest}"}, ["no column 'quest'", "question"]),
        ({"answer": "solution"}, ["no column 'solution'"]),
        ({"path": "nobody/nothing"}, ["nobody/nothing", "env prepare"]),
    ],
)
def test_what_is_not_there_is_named(file: str, wrong: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        Dataset.prepare(options(file) | wrong)
    assert all(word in str(error.value) for word in words), error.value


def test_options_are_checked_before_anything_is_opened() -> None:
    for wrong, words in (
        ({"path": "no.parquet"}, "is no file"),
        ({"path": "x", "prompt": "all"}, "names no column"),
        ({"path": "x", "prompt": "{} {question}"}, "names no column"),
        ({"path": "x", "answer_after": ""}, "leave it away"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_environment(DomainSection(name="d", environment="dataset", environment_options=wrong))
