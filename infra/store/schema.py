"""The format of a segment: Parquet, one row per trajectory, readable by pandas, polars and datasets as it is.

Schema version 1.0 (file metadata `rollmill.schema`: major.minor).

| column | type | |
|---|---|---|
| ordinal, attempt | int64, int32 | the uid of the group |
| version | int64 | least start version of the group |
| tombstone | string | why the attempt was given up; such a group has one row without member columns |
| domain, problem_index, seed, split | string, int64, int64, string | the problem |
| member, start_version, prompt_length, turns, retry | int32 (start_version: int64) | |
| status | string | terminated, truncated |
| generated_tokens, newest_version | int32, int64 | tokens with mask 1; the newest version among `versions` |
| reward, environment_reward | float64 | `reward` is the sum of `rewards`, for the reader's convenience |
| rewards | list<struct<name: string, value: float64>> | named parts, in order |
| token_ids, loss_mask, logprobs, versions | list<int32>, list<uint8>, list<float32>, list<int64> | one length |
| messages | list<struct<role: string, content: string>> | the readable transcript, as chat libraries take it |
| spans | list<struct<stage: string, start: float64, end: float64>> | |
| info | string | JSON: the one column without a shape of its own |

Nested types rather than JSON where the shape is known: they keep floats exact and need no parsing. `rewards` is
a list of pairs, not a map, since datasets has no map type. What follows from other columns (`reward`,
`generated_tokens`, `newest_version`) is there for those who look without decoding: people, and `summarise`.

Versions: a minor one only adds columns, each with a default in `Trajectory`. A reader ignores columns that it does
not know, and where a column is missing it takes the default: so old readers read new files and new readers old ones.
Any other change is a new major version: a reader refuses a newer one by name, and brings an older one to its own as it
reads (`infra.store.upgrades`).

Invariants: rows of a group are adjacent, in the order of its members; `decode(encode(groups)) == groups`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from infra.store.columns import arrays, numbers
from infra.store.errors import SchemaTooNew
from infra.store.upgrades import upgraded
from rl.selection import Candidate
from rl.trajectory import PACKED, Group, Message, Problem, Span, Status, Trajectory, Uid

SCHEMA_VERSION = (1, 0)
_META = "rollmill.schema"

_PART = pa.struct([("name", pa.string()), ("value", pa.float64())])
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
_SPAN = pa.struct([("stage", pa.string()), ("start", pa.float64()), ("end", pa.float64())])
SCHEMA = pa.schema(
    [
        pa.field("ordinal", pa.int64(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("tombstone", pa.string()),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("problem_index", pa.int64(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("member", pa.int32()),
        pa.field("start_version", pa.int64()),
        pa.field("prompt_length", pa.int32()),
        pa.field("turns", pa.int32()),
        pa.field("retry", pa.int32()),
        pa.field("status", pa.string()),
        pa.field("generated_tokens", pa.int32()),
        pa.field("newest_version", pa.int64()),
        pa.field("reward", pa.float64()),
        pa.field("environment_reward", pa.float64()),
        pa.field("rewards", pa.list_(_PART)),
        pa.field("token_ids", pa.list_(pa.int32())),
        pa.field("loss_mask", pa.list_(pa.uint8())),
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("versions", pa.list_(pa.int64())),
        pa.field("messages", pa.list_(_MESSAGE)),
        pa.field("spans", pa.list_(_SPAN)),
        pa.field("info", pa.string()),
    ]
)
_OPTIONAL = {f.name for f in fields(Trajectory) if f.default is not MISSING or f.default_factory is not MISSING}
_DERIVED = {"reward", "generated_tokens", "newest_version"}
_SUMMARY = ("ordinal", "attempt", "version", "tombstone", "reward", "newest_version", "domain", "generated_tokens")
TOLD = ("messages", "spans", "info")
"""Columns for those who look at samples; training does without."""

WIDE = ("token_ids.list.element", "logprobs.list.element", "messages.list.element.content")
ENCODING: Mapping[str, Any] = {
    "compression": dict.fromkeys(WIDE, "zstd"),  # what is not named is not compressed; naming it has a price
    "use_dictionary": ["loss_mask.list.element", "versions.list.element"],
    "column_encoding": dict.fromkeys(WIDE[:2], "BYTE_STREAM_SPLIT"),
    "write_statistics": ["ordinal", "version"],
}
"""How columns are written, as `pyarrow.parquet.ParquetWriter` takes it; chosen by measurement (docs/store.md). A
column chunk has a price of its own, higher when compressed, and most hold a few bytes: only wide ones are worth it."""

_MEMBER: dict[str, Callable[[Trajectory], Any]] = {
    "member": lambda t: t.member,
    "start_version": lambda t: t.start_version,
    "prompt_length": lambda t: t.prompt_length,
    "turns": lambda t: t.turns,
    "retry": lambda t: t.retry,
    "status": lambda t: t.status.value,
    "generated_tokens": lambda t: bytes(t.loss_mask).count(1),
    "newest_version": lambda t: int(np.asarray(t.versions).max()) if len(t.versions) else None,
    "reward": lambda t: t.reward,
    "environment_reward": lambda t: t.environment_reward,
    "rewards": lambda t: list(t.rewards.items()),
    "messages": lambda t: [(m.role, m.content) for m in t.messages],
    "spans": lambda t: [(s.stage, s.start, s.end) for s in t.spans],
    "info": lambda t: _json(t) if t.info else "{}",
}
_GROUP: dict[str, Callable[[Group], Any]] = {
    "ordinal": lambda g: g.uid.ordinal,
    "attempt": lambda g: g.uid.attempt,
    "version": lambda g: g.version,
    "tombstone": lambda g: g.tombstone,
    "domain": lambda g: g.problem.domain,
    "problem_index": lambda g: g.problem.index,
    "seed": lambda g: g.problem.seed,
    "split": lambda g: g.problem.split,
}

_NARROW = pa.struct([SCHEMA.field(name) for name in (*_GROUP, *_MEMBER)])
"""The columns that are not packed. Converted together, in less time than one by one."""


def encode(groups: Sequence[Group]) -> bytes:
    """A segment's bytes; equal groups give equal bytes. Raises ValueError for what the format can not hold:
    a group that is neither whole nor a tombstone, a uid twice, `info` that is not JSON."""
    return write(table(groups), ENCODING)


def table(groups: Sequence[Group]) -> pa.Table:
    """The groups as rows. Raises as `encode`."""
    rows: list[tuple[Group, Trajectory | None]] = []
    for group in groups:
        _check(group)
        rows += [(group, member) for member in group.members] or [(group, None)]
    if len({group.uid for group in groups}) != len(groups):
        raise ValueError("a segment holds an attempt once")
    columns = dict(zip(_NARROW.names, pa.array([_narrow(*row) for row in rows], _NARROW).flatten(), strict=True))
    for name, code in PACKED.items():
        columns[name] = numbers([None if member is None else getattr(member, name) for _, member in rows], code)
    return pa.Table.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _narrow(group: Group, member: Trajectory | None) -> tuple[Any, ...]:
    """What is not packed, of one row."""
    if member is None:
        return (*(make(group) for make in _GROUP.values()), *(None for _ in _MEMBER))
    return (*(make(group) for make in _GROUP.values()), *(make(member) for make in _MEMBER.values()))


def write(rows: pa.Table, encoding: Mapping[str, Any]) -> bytes:
    """A table as a Parquet file with the schema version in its metadata."""
    sink = pa.BufferOutputStream()
    # Parquet's own types say all that Arrow's copy of the schema would say, in 2.7 kB less.
    with pq.ParquetWriter(sink, rows.schema, store_schema=False, **encoding) as writer:
        writer.write_table(rows)
        writer.add_key_value_metadata({_META: "{}.{}".format(*SCHEMA_VERSION)})
    return sink.getvalue().to_pybytes()


class Segment:
    """A segment's bytes, opened: what is wanted of it is read when it is asked for. Belongs to one thread at a time.

    Raises SchemaTooNew, or pyarrow's ArrowInvalid for bytes that are no segment; so do its methods.
    """

    def __init__(self, body: bytes) -> None:
        self.size = len(body)
        # From memory: fetching ahead, on threads of its own, would cost more than it saves.
        self._file = pq.ParquetFile(pa.BufferReader(body), pre_buffer=False)
        written = (self._file.metadata.metadata or {}).get(_META.encode())
        if written is None:
            raise pa.ArrowInvalid("not a segment: the schema version is missing from the file's metadata")
        self._major = int(written.partition(b".")[0])
        if self._major > SCHEMA_VERSION[0]:
            ours = "{}.{}".format(*SCHEMA_VERSION)
            raise SchemaTooNew(f"schema version {written.decode()}, this Rollmill reads up to {ours}; upgrade it")

    def groups(self, uids: Collection[Uid] | None = None, told: bool = True) -> list[Group]:
        """The groups, in order; only those of `uids`, if given. Without `told` the columns `TOLD` are not read, which
        is a third of the work: they are empty."""
        rows = self._read([name for name in SCHEMA.names if name not in _DERIVED and (told or name not in TOLD)])
        keys = list(map(Uid, rows["ordinal"].to_pylist(), rows["attempt"].to_pylist()))
        if uids is not None and not all(uid in uids for uid in keys):
            wanted = [at for at, uid in enumerate(keys) if uid in uids]
            rows, keys = rows.take(pa.array(wanted, pa.int64())), [keys[at] for at in wanted]
        columns: dict[str, list[Any]] = {
            name: arrays(column, PACKED[name]) if name in PACKED else column.to_pylist()
            for name, column in zip(rows.column_names, rows.columns, strict=True)
        }
        members = [name for name in columns if name not in _GROUP]
        groups = []
        for uid, adjacent in groupby(range(len(keys)), key=keys.__getitem__):
            at = list(adjacent)
            first = at[0]
            problem = Problem(
                uid.ordinal, *(columns[name][first] for name in ("domain", "problem_index", "seed", "split"))
            )
            whole = [
                _member(uid, problem, {name: columns[name][i] for name in members})
                for i in at
                if columns["member"][i] is not None
            ]
            groups.append(Group(uid, problem, columns["version"][first], whole, columns["tombstone"][first]))
        return groups

    def candidates(self) -> list[Candidate]:
        """What selection needs to know of the groups, from the narrow columns alone."""
        rows = self._read(_SUMMARY)
        found = []
        members = zip(*(rows[name].to_pylist() for name in _SUMMARY), strict=True)
        for (ordinal, attempt), adjacent in groupby(members, lambda member: member[:2]):
            _, _, versions, tombstones, rewards, newest, domains, tokens = zip(*adjacent, strict=True)
            parts = [reward for reward in rewards if reward is not None]
            informative = bool(parts) and max(parts) - min(parts) > 1e-9
            last = max((version for version in newest if version is not None), default=versions[0])
            later = last if last > versions[0] else None
            longest = max((n for n in tokens if n is not None), default=0)
            found.append(
                Candidate(Uid(ordinal, attempt), versions[0], informative, tombstones[0], later, domains[0], longest)
            )
        return found

    def _read(self, columns: Sequence[str]) -> pa.Table:
        """These columns, in the order of the file, without the optional ones that an older file lacks."""
        # one thread: callers read many segments side by side
        if self._major == SCHEMA_VERSION[0]:
            rows = self._file.read(columns, use_threads=False)
        else:
            rows = upgraded(self._file.read(use_threads=False), self._major, SCHEMA_VERSION[0])
            rows = rows.select([name for name in rows.column_names if name in columns])
        missing = set(columns).difference(rows.column_names, _OPTIONAL)
        if missing:
            raise pa.ArrowInvalid(f"not a segment: no column {min(missing)}")
        return rows


def decode(body: bytes, uids: Collection[Uid] | None = None) -> list[Group]:
    """The groups of a segment that is read once. Raises as `Segment`."""
    return Segment(body).groups(uids)


def summarise(body: bytes) -> list[Candidate]:
    """What selection needs to know of them. Raises as `Segment`."""
    return Segment(body).candidates()


def _check(group: Group) -> None:
    if bool(group.members) == (group.tombstone is not None):
        raise ValueError(f"group {group.uid}: either members or a tombstone")
    if group.problem.ordinal != group.uid.ordinal:
        raise ValueError(f"group {group.uid}: of problem {group.problem.ordinal}")
    for member in group.members:
        if member.uid != group.uid or member.problem != group.problem:
            raise ValueError(f"group {group.uid}: member {member.member} is of {member.uid}")


_JSON = json.JSONEncoder(allow_nan=False, ensure_ascii=False)


def _json(member: Trajectory) -> str:
    try:
        return _JSON.encode(member.info)
    except (TypeError, ValueError) as error:
        raise ValueError(f"trajectory {member.uid}/{member.member}: info is not JSON: {error}") from error


_FROM: dict[str, Callable[[Any], Any]] = {
    "messages": lambda messages: [Message(m["role"], m["content"]) for m in messages],
    "status": Status,
    "info": json.loads,
    "rewards": lambda parts: {part["name"]: part["value"] for part in parts},
    "spans": lambda spans: [Span(s["stage"], s["start"], s["end"]) for s in spans],
}


def _member(uid: Uid, problem: Problem, row: dict[str, Any]) -> Trajectory:
    made = {name: make(row[name]) for name, make in _FROM.items() if name in row}
    return Trajectory(uid=uid, problem=problem, **{"messages": []} | row | made)
