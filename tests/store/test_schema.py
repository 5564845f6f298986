"""The segment format: exact round trips, plain readers, refusals by name."""

from __future__ import annotations

import io
import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.store import schema
from infra.store.errors import SchemaTooNew
from rl.trajectory import Group, Uid
from tests.store.samples import group, groups, member, tombstone, untold

segments = st.lists(groups(), max_size=4, unique_by=lambda g: g.uid)


@given(segments)
@settings(max_examples=60, deadline=None)
def test_round_trip_is_exact(sealed: list[Group]) -> None:
    body = schema.encode(sealed)
    assert schema.decode(body) == sealed
    assert schema.encode(sealed) == body


@given(segments, st.data())
@settings(max_examples=30, deadline=None)
def test_a_part_and_a_summary_agree_with_the_whole(sealed: list[Group], data: st.DataObject) -> None:
    body = schema.encode(sealed)
    wanted = data.draw(st.sets(st.sampled_from([g.uid for g in sealed]))) if sealed else set()
    assert schema.decode(body, wanted) == [g for g in sealed if g.uid in wanted]
    assert schema.Segment(body).groups(wanted, told=False) == [untold(g) for g in sealed if g.uid in wanted]
    found = schema.summarise(body)
    assert [(c.uid, c.version, c.informative, c.tombstone) for c in found] == [
        (g.uid, g.version, g.informative, g.tombstone) for g in sealed
    ]


def test_summary_names_the_newest_version_of_a_group_that_saw_an_update() -> None:
    late = group(3, version=5)
    late.members[1].versions[-1] = 6
    (updated, plain) = schema.summarise(schema.encode([late, group(4, version=5)]))
    assert (updated.version, updated.newest, plain.newest) == (5, 6, None)


def test_log_probs_are_float32_and_rewards_are_not() -> None:
    one = member(Uid(0, 0), 0, 0, reward=0.1)
    one.logprobs[-1] = -0.1
    (back,) = schema.decode(schema.encode([Group.of([one])]))
    assert back.members[0].logprobs[-1] == float(np.float32(-0.1)) != -0.1
    assert back.members[0].rewards == {"outcome": 0.1}


def test_pandas_reads_it_without_us() -> None:
    frame = pd.read_parquet(io.BytesIO(schema.encode([group(3, version=2), tombstone(4, version=2)])))
    assert frame["ordinal"].tolist() == [3, 3, 4]
    assert frame["token_ids"][0].tolist() == [11, 12, 13, 100, 101, 102, 103]
    assert frame["logprobs"][0].dtype == np.float32
    assert frame["reward"].tolist()[:2] == [0.0, 1.0]
    assert frame["messages"][1][1] == {"role": "assistant", "content": "north ↑"}
    assert frame["tombstone"].tolist()[2] == "reward_error"
    assert frame["token_ids"][2] is None


def test_encodings_are_as_documented() -> None:
    file = pq.ParquetFile(io.BytesIO(schema.encode([group(3)])))
    chunks = [file.metadata.row_group(0).column(i) for i in range(file.metadata.num_columns)]
    assert {c.path_in_schema for c in chunks if c.compression == "ZSTD"} == set(schema.WIDE)
    found = {c.path_in_schema.removesuffix(".list.element"): set(c.encodings) for c in chunks}
    assert "BYTE_STREAM_SPLIT" in found["token_ids"] & found["logprobs"]
    assert "RLE_DICTIONARY" in found["loss_mask"] & found["versions"]


def _as_version(rows: pa.Table, version: bytes | None) -> bytes:
    sink = io.BytesIO()
    pq.write_table(rows.replace_schema_metadata(version and {b"rollmill.schema": version}), sink)
    return sink.getvalue()


def test_a_newer_minor_version_is_read_without_the_columns_that_it_added() -> None:
    rows = schema.table([group(1), tombstone(2)])
    rows = rows.add_column(3, "new_column", pa.array(["?"] * len(rows)))
    newer = _as_version(rows, b"1.7")
    assert schema.decode(newer) == [group(1), tombstone(2)]
    assert [c.uid for c in schema.summarise(newer)] == [Uid(1, 0), Uid(2, 0)]


def test_an_older_file_gets_the_default_of_a_column_that_it_lacks() -> None:
    older = _as_version(schema.table([group(1)]).drop_columns(["spans", "retry", "info"]), b"1.0")
    (back,) = schema.decode(older)
    assert [(m.spans, m.retry, m.info) for m in back.members] == [([], 0, {})] * 2
    assert [m.token_ids for m in back.members] == [m.token_ids for m in group(1).members]


def test_a_file_without_a_column_that_has_no_default_is_refused() -> None:
    with pytest.raises(pa.ArrowInvalid, match="no column token_ids"):
        schema.decode(_as_version(schema.table([group(1)]).drop_columns(["token_ids"]), b"1.0"))


def test_a_newer_major_version_is_refused_by_name() -> None:
    rows = schema.table([group(1)])
    assert schema.decode(_as_version(rows, b"1.0")) == [group(1)]
    for read in (schema.decode, schema.summarise):
        with pytest.raises(SchemaTooNew, match=r"schema version 2\.0, this Rollmill reads up to 1\.0; upgrade it"):
            read(_as_version(rows, b"2.0"))


@pytest.mark.parametrize("body", [b"", b"PAR1 nonsense", _as_version(schema.table([group(1)]), None)])
def test_what_is_no_segment_is_refused(body: bytes) -> None:
    with pytest.raises(pa.ArrowInvalid):
        schema.decode(body)


def test_what_the_format_can_not_hold_is_refused() -> None:
    empty = Group(Uid(1, 0), group(1).problem, 0, [])
    with pytest.raises(ValueError, match="members or a tombstone"):
        schema.encode([empty])
    with pytest.raises(ValueError, match="once"):
        schema.encode([group(1), group(1)])
    odd = group(2)
    odd.members[0].info = {"score": float("nan")}
    with pytest.raises(ValueError, match=r"2\.0/0: info is not JSON"):
        schema.encode([odd])
    mixed = group(3)
    mixed.members[1].uid = Uid(3, 1)
    with pytest.raises(ValueError, match=r"is of 3\.1"):
        schema.encode([mixed])


def test_info_is_json() -> None:
    one = group(1)
    one.members[0].info = {"steps": 3, "path": ["a", "ü"]}
    frame = pd.read_parquet(io.BytesIO(schema.encode([one])))
    assert json.loads(frame["info"][0]) == {"steps": 3, "path": ["a", "ü"]}
