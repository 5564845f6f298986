"""`rollmill samples` on a run in a store."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from datasets import Dataset

from rl.records import Drop, Outcome, Reason
from rl.trajectory import NO_VERSION, Group, Message
from tests.flows.conftest import Desk
from tests.store.samples import group, tombstone


@pytest.fixture
def full(desk: Desk) -> Desk:
    """Two groups trained (0.0 by version 1, 1.0 by 2), one dropped, one given up, one open, one copy."""
    run = desk.run
    run.steps(3)
    run.buffer.seal([group(7, version=1, rewards=(0.0, 0.5))], "g0000000007", 0)
    run.buffer.seal([tombstone(8, version=1)], "t0000000008", 0)
    run.buffer.seal([group(9, version=2, rewards=(1.0, 1.0))], "g0000000009", 0)
    run.buffer.seal([group(0, version=2)], "zombie", 0)
    run.log.append_settle([Drop(uid="7.0", reason=Reason.STALE, outcome=Outcome.RETRY)])
    return desk


def uids(output: str) -> list[str]:
    return [
        line.split()[0]
        for line in output.splitlines()
        if line[:1].isspace() or line[:1].isdecimal()
        if "." in line.split()[0]
    ]


def test_ls_shows_what_became_of_every_group(full: Desk) -> None:
    listed = full.good("samples", "ls", "frozen_lake")
    assert uids(listed) == ["9.0", "8.0", "7.0", "1.0", "0.0"]
    for words in ("trained v1", "trained v2", "dropped stale", "open (given up: reward_error)"):
        assert words in listed
    assert "5 groups, 8 trajectories, mean reward 0.562, 32 of 56 tokens generated" in listed


@pytest.mark.parametrize(
    "filters, expected",
    [
        (["--trained"], ["1.0", "0.0"]),
        (["--dropped"], ["7.0"]),
        (["--open"], ["9.0", "8.0"]),
        (["--open", "--dropped"], ["9.0", "8.0", "7.0"]),
        (["--version", "1"], ["8.0", "7.0"]),
        (["--min-reward", "0.9"], ["9.0"]),
        (["--max-reward", "0.25"], ["7.0"]),
        (["--min-reward", "0.3", "--max-reward", "0.6"], ["1.0", "0.0"]),
        (["--domain", "maze", "--limit", "2"], ["9.0", "8.0"]),
    ],
)
def test_filters(full: Desk, filters: list[str], expected: list[str], tmp_path: Path) -> None:
    assert uids(full.good("samples", "ls", "frozen_lake", *filters)) == expected
    if "--limit" not in filters:
        to = tmp_path / "some.jsonl"
        full.good("samples", "export", "frozen_lake", "--to", str(to), *filters)
        rows = [json.loads(line) for line in to.read_text().splitlines()]
        assert list(dict.fromkeys(f"{row['ordinal']}.{row['attempt']}" for row in rows)) == expected


def test_a_trajectory_is_shown_token_by_token(full: Desk) -> None:
    one = group(20, version=2)
    member = one.members[1]
    member.token_ids = [11, 12, 13, 101, 102, 55, 103]
    member.loss_mask = [0, 0, 0, 1, 1, 0, 1]
    member.logprobs = [0.0, 0.0, 0.0, -0.5, -1.5, 0.0, -0.25]
    member.versions = [NO_VERSION] * 3 + [2, 2, NO_VERSION, 3]
    member.messages = [Message("user", "go\nsouth"), Message("assistant", "north [red]"), Message("tool", "wall")]
    member.rewards = {"outcome": 1.0, "format": 0.25}
    full.run.buffer.seal([Group.of(one.members)], "g0000000020", 0)

    said = full.good("samples", "show", "frozen_lake", "20.0", "--member", "1")
    assert "member 1 of 2: terminated after 1 turns, started under version 2" in said
    assert "reward 1.250: outcome 1, format 0.25" in said
    assert "7 tokens: 3 prompt, 1 environment, 3 generated; log-prob mean -0.750, least -1.500" in said
    assert "> assistant  north [red]" in said and "  user       go\n             south" in said
    table = [line.split() for line in said.splitlines()[-4:]]
    assert table == [
        ["0", "2", "3", "0", "-", "-", "-", "prompt"],
        ["3", "4", "2", "1", "2", "-1.000", "-1.500", "the", "model"],
        ["5", "5", "1", "0", "-", "-", "-", "environment"],
        ["6", "6", "1", "1", "3", "-0.250", "-0.250", "the", "model"],
    ]
    short = full.good("samples", "show", "frozen_lake", "20.0")
    assert "outcome 1, format 0.25" in short and "2, 3" in short and "groups/0000000002/g0000000020-000000" in short


def test_the_copy_that_was_trained_is_shown(full: Desk) -> None:
    assert "trained v1" in full.good("samples", "show", "frozen_lake", "0.0")
    assert "given up: reward_error" in full.good("samples", "show", "frozen_lake", "8.0")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["show", "frozen_lake", "nine"], ["UID 'nine'", "ordinal.attempt"]),
        (["show", "frozen_lake", "99.0"], ["UID 99.0", "open", "samples ls"]),
        (["show", "frozen_lake", "9.0", "--member", "5"], ["--member 5", "0 to 1"]),
        (["show", "frozen_lake", "8.0", "--member", "0"], ["given up", "reward_error"]),
        (["show", "frozen_lake", "9.0", "--tokens"], ["--tokens", "base"]),
        (["ls", "frozen_lake", "--domain", "lake"], ["--domain 'lake'", "maze"]),
        (["ls", "frozen_lake", "--version", "77"], ["no such samples"]),
        (["export", "frozen_lake", "--to", "x.csv"], ["--to 'x.csv'", ".parquet", ".jsonl"]),
        (["export", "frozen_lake", "--to", "no/such/x.jsonl"], ["no/such", "does not exist"]),
    ],
)
def test_a_mistake_is_one_line(full: Desk, arguments: list[str], words: list[str]) -> None:
    said = full.bad("samples", *arguments)
    for word in words:
        assert word in said


def test_what_was_collected_is_told_so(full: Desk) -> None:
    full.run.steps(6)
    full.good("gc", "frozen_lake", sets=("retention.newest=1", "retention.grace=0"))
    said = full.bad("samples", "show", "frozen_lake", "0.0")
    assert "not any more" in said and "trained v1" in said


def test_an_export_opens_in_pandas_and_datasets(full: Desk, tmp_path: Path) -> None:
    for name in ("all.parquet", "all.jsonl"):
        to = tmp_path / name
        assert "5 groups, 8 trajectories" in full.good("samples", "export", "frozen_lake", "--to", str(to))
        frame = pd.read_parquet(to) if to.suffix == ".parquet" else pd.read_json(to, lines=True)
        assert len(frame) == 9  # the group that was given up has a row, too
        assert frame.groupby("ordinal")["fate"].first().to_dict() == {
            0: "trained", 1: "trained", 7: "dropped", 8: "open", 9: "open"
        }  # fmt: skip
        trained = frame[frame.fate == "trained"]
        assert sorted(trained.trained_version) == [1, 1, 2, 2]
        assert list(frame[frame.ordinal == 7].drop_reason) == ["stale", "stale"]
        assert list(trained.iloc[0].token_ids) == [11, 12, 13, 100, 101, 102, 103]
        kind = Dataset.from_parquet if to.suffix == ".parquet" else Dataset.from_json
        rows = kind(str(to), cache_dir=str(tmp_path / "cache"))
        assert rows.num_rows == 9 and rows[0]["messages"][1]["content"] == "north ↑"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["all.jsonl", "all.parquet"]


@pytest.mark.slow
def test_tokens_are_decoded_by_the_runs_own_tokenizer(full: Desk, tmp_path: Path) -> None:
    from infra.store.directories import push_directory
    from tests.training.small import make_base

    base = make_base(tmp_path / "base")
    push_directory(full.run.store, f"{full.run.prefix}base/", base)
    from transformers import AutoTokenizer

    text = AutoTokenizer.from_pretrained(base).decode([11, 12, 13])
    assert repr(text) in full.good("samples", "show", "frozen_lake", "9.0", "--tokens")
