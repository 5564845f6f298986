"""What earlier versions of Rollmill wrote is read for ever.

`golden/` holds segments, records and configurations as they were written when their format was new. Files are added to
it and never changed: whoever breaks one of these tests writes an upgrade (docs/store.md, "Changing a format").
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from infra.store import schema, upgrades
from infra.store.errors import NotFound
from infra.store.reader import LogReader
from rl import records
from rl.config.load import loads
from rl.errors import LogTooNew
from rl.ledger import Ledger
from rl.records import Step
from rl.trajectory import Uid
from tests.store.samples import group, tombstone

GOLDEN = Path(__file__).parent / "golden"


def test_every_golden_segment_is_read_as_it_was_written() -> None:
    files = sorted(GOLDEN.glob("segment-*.parquet"))
    assert f"segment-{schema.SCHEMA_VERSION[0]}.{schema.SCHEMA_VERSION[1]}.parquet" in {file.name for file in files}, (
        "a new version of the schema: add a file that it wrote"
    )
    for file in files:
        assert schema.decode(file.read_bytes()) == [group(3, version=2), tombstone(4, version=2)], file.name
        assert [c.uid for c in schema.summarise(file.read_bytes())] == [Uid(3, 0), Uid(4, 0)]


def test_every_golden_log_is_folded_to_the_same_end() -> None:
    files = sorted(GOLDEN.glob("log-*.jsonl"))
    assert f"log-{records.FORMAT}.jsonl" in {file.name for file in files}, "a new format: add a log that it wrote"
    for file in files:
        ledger = Ledger()
        for line in file.read_text().splitlines():
            ledger.apply(records.decode(line.encode()))
        assert (ledger.head, ledger.next_version, ledger.trained_groups, ledger.gc_floor) == (2, 4, 2, 1), file.name
        assert ledger.dropped_groups == {"equal_reward": 1} and set(ledger.pins) == {1}


def test_every_golden_configuration_is_a_run_that_can_be_joined() -> None:
    for file in sorted(GOLDEN.glob("config-*.json")):
        config = loads(file.read_text())
        assert (config.prefix, config.training.steps, config.staleness.alpha) == ("default/golden/", 7, 2), file.name


def test_an_older_format_is_brought_to_this_one_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "FORMAT", 3)
    monkeypatch.setattr(
        records,
        "UPGRADES",
        {
            1: lambda tree: {**{k: v for k, v in tree.items() if k != "author"}, "wrote": tree["author"]},
            2: lambda tree: {**{k: v for k, v in tree.items() if k != "wrote"}, "writer": tree["wrote"]},
        },
    )
    old = {"format": 1, "kind": "fence", "lsn": 1, "nonce": "n", "author": "me", "time": 0.0}
    read = records.decode(json.dumps(old).encode())
    assert (read.writer, read.format) == ("me", 3)
    with pytest.raises(LogTooNew, match="format 4, this Rollmill reads up to 3; upgrade it"):
        records.decode(json.dumps(old | {"format": 4}).encode())


def test_a_log_of_a_newer_rollmill_is_refused_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        def get(self, key: str) -> bytes:
            if not key.endswith("0000000001.json"):
                raise NotFound("bucket", key)
            return b'{"format": 2, "kind": "something", "lsn": 1}'

    with pytest.raises(LogTooNew, match=r"log/0000000001\.json: a record of format 2"):
        LogReader(Store(), "default/run/").read(1)  # type: ignore[arg-type]


def test_an_older_major_version_of_segments_is_read_by_upgrades(monkeypatch: pytest.MonkeyPatch) -> None:
    written = schema.encode([group(3, version=2), tombstone(4, version=2)])
    monkeypatch.setattr(schema, "SCHEMA_VERSION", (3, 0))
    with pytest.raises(pa.ArrowInvalid, match="never was a schema version 1"):
        schema.decode(written)
    renamed: list[str] = []

    def rename(rows: pa.Table) -> pa.Table:
        renamed.append("1 to 2")
        return rows.rename_columns([{"tombstone": "gone"}.get(name, name) for name in rows.column_names])

    def rename_again(rows: pa.Table) -> pa.Table:
        return rows.rename_columns([{"gone": "tombstone"}.get(name, name) for name in rows.column_names])

    monkeypatch.setattr(upgrades, "UPGRADES", {1: rename, 2: rename_again})
    assert schema.decode(written) == [group(3, version=2), tombstone(4, version=2)]
    assert [c.uid for c in schema.summarise(written)] == [Uid(3, 0), Uid(4, 0)] and renamed == ["1 to 2"] * 2


def test_records_say_their_format() -> None:
    state = records.StateRef(prefix="state/0000000001-x/", manifest_sha256="m", full=True)
    stamp = {"lsn": 1, "nonce": "n", "writer": "w", "time": 0.0}
    step = Step(**stamp, version=0, base=None, state=state, weights_sha256="w", alpha=1)
    assert json.loads(records.encode(step))["format"] == records.FORMAT
