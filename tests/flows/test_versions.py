"""`rollmill versions` and `rollmill gc` on a run in a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.records import Retain, Rollback
from tests.flows.conftest import Desk

NOW = ("retention.newest=3", "retention.grace=0")


def line_of(output: str, version: int) -> str:
    return next(line for line in output.splitlines() if line.split()[:1] == [str(version)])


def test_the_list_says_what_is_there_and_why(desk: Desk) -> None:
    desk.run.steps(8)
    desk.good("versions", "pin", "frozen_lake", "1")
    desk.good("versions", "delete", "frozen_lake", "4")
    listed = desk.good("versions", "list", "frozen_lake", sets=NOW)
    assert "the head" in line_of(listed, 7) and "needed to go on" in line_of(listed, 6)
    assert "among the newest" in line_of(listed, 5) and "pinned" in line_of(listed, 1)
    assert "marked to be deleted" in line_of(listed, 4) and "goes after" in line_of(listed, 2)
    assert " B " in line_of(listed, 2)

    desk.good("gc", "frozen_lake", sets=NOW)
    listed = desk.good("versions", "list", "frozen_lake", sets=NOW)
    assert [v for v in range(8) if "deleted" in line_of(listed, v)] == [0, 2, 3, 4]
    assert len(listed.splitlines()) == 10


def test_gc_by_hand_tells_what_it_does_and_a_dry_run_does_nothing(desk: Desk) -> None:
    desk.run.steps(6)
    before = desk.run.names()
    said = desk.good("gc", "frozen_lake", "--dry-run", sets=NOW)
    assert "gc floor 0 -> 3" in said and "would delete" in said and desk.run.names() == before

    said = desk.good("gc", "frozen_lake", sets=("retention.newest=3",))
    assert "gc floor 0 -> 3" in said and "versions 0 to 2 wait for retention.grace (600 s)" in said
    assert desk.run.states() == list(range(6))

    said = desk.good("gc", "frozen_lake", "--dry-run", sets=NOW)
    assert "would delete the states of versions 0, 1, 2" in said and desk.run.states() == list(range(6))
    said = desk.good("gc", "frozen_lake", sets=NOW)
    assert "deleted the states of versions 0, 1, 2, 0 states that no record names" in said
    assert desk.run.states() == [3, 4, 5]


def test_marks_go_into_the_log_and_what_may_not_be_is_refused_with_its_reason(desk: Desk) -> None:
    desk.run.steps(6)
    desk.good("versions", "pin", "frozen_lake", "2")
    assert "pinned" in desk.bad("versions", "delete", "frozen_lake", "2")
    desk.good("versions", "unpin", "frozen_lake", "2")
    desk.good("versions", "delete", "frozen_lake", "2")
    assert [r.mark for r in desk.run.log.records() if isinstance(r, Retain)] == ["pin", "unpin", "delete"]
    assert "needed" in desk.bad("versions", "delete", "frozen_lake", "head")
    desk.good("gc", "frozen_lake", sets=NOW)
    assert "gc floor is 3" in desk.bad("versions", "pin", "frozen_lake", "1")


def test_show_tells_of_one_version(desk: Desk) -> None:
    desk.run.steps(3)
    said = desk.good("versions", "show", "frozen_lake", "head")
    for words in ("version 2 of default/", "on version 1", "trained: 1.0", "model/weights", "full state in state/"):
        assert words in said
    desk.run.steps(4)
    desk.good("gc", "frozen_lake", sets=NOW)
    assert "deleted" in desk.good("versions", "show", "frozen_lake", "1", sets=NOW)


@pytest.mark.parametrize("version", ["99", "newest", "1.0", ""])
def test_a_version_that_is_not_there_is_one_line(desk: Desk, version: str) -> None:
    desk.run.steps(3)
    said = desk.bad("versions", "show", "frozen_lake", version)
    assert repr(version) in said and "0 to 2" in said


@pytest.mark.parametrize(
    "command",
    [
        ("versions", "list"),
        ("versions", "show"),
        ("versions", "pin"),
        ("versions", "rollback"),
        ("gc",),
        ("samples", "ls"),
        ("samples", "show"),
    ],
)
def test_a_run_without_a_version_is_one_line(desk: Desk, command: tuple[str, ...]) -> None:
    more = ("0",) if command[-1] in ("show", "pin", "rollback") else ()
    assert "has no version yet" in desk.bad(*command, "frozen_lake", *more, sets=("name=mistyped",))
    if command[0] != "samples":  # samples may be there before the first version
        assert "has no version yet" in desk.bad(*command, "frozen_lake", *more)


def test_an_export_is_verified_and_never_over_something(desk: Desk, tmp_path: Path) -> None:
    desk.run.steps(5)
    to = tmp_path / "out" / "v3"
    desk.good("export", "frozen_lake", "3", "--to", str(to))
    assert [path.name for path in to.iterdir()] == ["weights"] and (to / "weights").read_bytes() == b"w3"
    assert [path.name for path in to.parent.iterdir()] == ["v3"], "nothing is left beside it"
    assert "not an empty directory" in desk.bad("export", "frozen_lake", "3", "--to", str(to))

    desk.run.store.put(f"{desk.run.prefix}{desk.run.committed[4]}model/weights", b"w5")
    said = desk.bad("export", "frozen_lake", "4", "--to", str(tmp_path / "v4"))
    assert "model/weights" in said and not (tmp_path / "v4").exists()

    desk.good("gc", "frozen_lake", sets=("retention.newest=1", "retention.grace=0"))
    said = desk.bad("export", "frozen_lake", "0", "--to", str(tmp_path / "v0"))
    assert "was deleted (the gc floor is 3)" in said


def test_a_rollback_makes_an_earlier_version_the_head(desk: Desk) -> None:
    desk.run.steps(6)
    assert "version 3 is the head" in desk.good("versions", "rollback", "frozen_lake", "3")
    ledger = desk.run.log.ledger
    with pytest.raises(Exception, match="took over"):
        desk.run.log.sync()
    assert ledger.head == 3 and ledger.next_version == 6
    assert any(isinstance(record, Rollback) for record in desk.run.log.records())
    assert "not on the live line" in desk.bad("versions", "rollback", "frozen_lake", "5")
    listed = desk.good("versions", "list", "frozen_lake", sets=("retention.newest=2", "retention.grace=0"))
    assert "rolled back" in line_of(listed, 5) and "the head" in line_of(listed, 3)


@pytest.mark.slow
def test_an_exported_version_loads_anywhere(desk: Desk, tmp_path: Path) -> None:
    from infra.store.directories import push_directory
    from tests.engines.tiny_models import load, prompt, save_adapter, save_model, teacher_forced

    base = save_model(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base, seed=1)
    push_directory(desk.run.store, f"{desk.run.prefix}base/", base)
    desk.run.model = adapter
    desk.run.steps(2)
    for version, to in (("base", tmp_path / "b"), ("head", tmp_path / "a")):
        desk.good("export", "frozen_lake", version, "--to", str(to))
    ours = teacher_forced(load(tmp_path / "b", tmp_path / "a"), prompt(5), prompt(4, 1), 1.0)
    assert ours == teacher_forced(load(base, adapter), prompt(5), prompt(4, 1), 1.0)
    (base / "tokenizer.json").write_text("{}")
    push_directory(desk.run.store, f"{desk.run.prefix}base/", base)
    desk.good("export", "frozen_lake", "--merged", "--to", str(tmp_path / "m"))
    whole = teacher_forced(load(tmp_path / "m"), prompt(5), prompt(4, 1), 1.0)
    assert whole == pytest.approx(ours, abs=1e-4)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (tmp_path / "m").iterdir()}
    desk.run.model = base
    desk.run.steps(1)
    said = desk.good("export", "frozen_lake", "2", "--to", str(tmp_path / "c"))
    assert "AutoModelForCausalLM" in said
    assert teacher_forced(load(tmp_path / "c"), prompt(5), prompt(4, 1), 1.0)


def test_a_training_run_collects_by_its_own_configuration(desk: Desk) -> None:
    from flows.configure import load_config
    from flows.learn import collector

    desk.run.steps(6)
    config = load_config("frozen_lake", [f"name={desk.name}", "retention={newest: 2, every: 3, grace: 0}"])
    collector(config).collect()
    assert desk.run.states() == [0, 3, 4, 5] and desk.run.segments() == []
