"""What earlier versions of Rollmill wrote is read for ever.

`golden/` holds segments, records and configurations as they were written when their format was new. Files are added to
it and never changed: whoever breaks one of these tests writes an upgrade (docs/store.md, "Changing a format").
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pydantic import BaseModel

from flows.reference import models_in
from infra.store import schema, upgrades
from infra.store.errors import NotFound
from infra.store.jobs import JobBook
from infra.store.reader import LogReader
from rl import records
from rl.config import upgrades as config_upgrades
from rl.config.load import loads, loads_as
from rl.config.run import RunConfig
from rl.config.tenants import Job, ServiceConfig
from rl.errors import ConfigTooNew, LogTooNew
from rl.jobs import EVENT, Submitted
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


def test_every_golden_service_and_job_can_be_gone_on_with() -> None:
    for file in sorted(GOLDEN.glob("service-*.json")):
        service = loads_as(ServiceConfig, file.read_text())
        assert (service.prefix, service.trainers, service.threads) == ("services/golden/", 2, 3), file.name
    for file in sorted(GOLDEN.glob("submitted-*.json")):
        event = EVENT.validate_json(file.read_text())
        assert isinstance(event, Submitted) and (event.job.id, event.job.quota) == ("ann/golden", 64), file.name


def test_a_field_that_is_gone_from_the_configuration_is_upgraded_from() -> None:
    golden = GOLDEN / f"fields-{config_upgrades.FORMAT}.txt"
    assert golden.is_file(), f"a new format of configurations: write {golden.name}, by `stored_fields`"
    gone = sorted(set(golden.read_text().split()) - stored_fields())
    assert not gone, f"runs have these stored: raise rl.config.upgrades.FORMAT and add to UPGRADES: {', '.join(gone)}"
    assert sorted(config_upgrades.UPGRADES) == list(range(1, config_upgrades.FORMAT))


def stored_fields() -> set[str]:
    """Where every field of a stored configuration is, with the `type` of the sections that have one."""
    found: set[str] = set()

    def walk(model: type[BaseModel], path: str) -> None:
        tag = f"[{model.model_fields['type'].default}]" if "type" in model.model_fields else ""
        for name, field in model.model_fields.items():
            here = f"{path}{tag}.{field.alias or name}"
            if here not in found:
                found.add(here)
                for inner in models_in(field.annotation):
                    walk(inner, here)

    for kind in (RunConfig, ServiceConfig, Job):
        walk(kind, kind.__name__)
    return found


def test_a_job_of_an_older_release_is_read_and_one_of_a_newer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job.model_validate({"tenant": "ann", "name": "a", "domains": ["lake"], "budget": 9})
    written = EVENT.dump_json(Submitted(time=1.0, job=job))
    older = written.replace(b'"budget"', b'"tokens"')
    book = JobBook(Bodies(older), "golden")  # type: ignore[arg-type]
    with pytest.raises(LogTooNew, match=r"jobs/0000000000\.json: this Rollmill does not know .*tokens"):
        book.sync()
    monkeypatch.setattr(config_upgrades, "FORMAT", 2)
    monkeypatch.setattr(
        config_upgrades,
        "UPGRADES",
        {1: lambda tree: {("budget" if name == "tokens" else name): value for name, value in tree.items()}},
    )
    assert book.sync().entries["ann/a"].job == job
    newest = EVENT.dump_json(Submitted(time=1.0, job=job))
    assert JobBook(Bodies(newest), "golden").sync().entries["ann/a"].job == job  # type: ignore[arg-type]
    newer = newest.replace(b'"format":2', b'"format":3')
    with pytest.raises(ConfigTooNew, match=r"0\.json: a submitted job is of format 3, this Rollmill reads up to 2"):
        JobBook(Bodies(newer), "golden").sync()  # type: ignore[arg-type]


class Bodies:
    """A store with these objects, by number."""

    def __init__(self, *bodies: bytes) -> None:
        self._bodies = bodies

    def get(self, key: str) -> bytes:
        number = int(key.rpartition("/")[2].removesuffix(".json"))
        if number >= len(self._bodies):
            raise NotFound("bucket", key)
        return self._bodies[number]


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
