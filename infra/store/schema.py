"""The format of a segment: Parquet, one row per trajectory, readable by pandas, polars and datasets as it is.

Schema version 1 (file metadata `rollmill.schema`; a reader refuses newer ones by name):

| column | type | |
|---|---|---|
| ordinal, attempt | int64, int32 | the uid of the group |
| version | int64 | least start version of the group |
| tombstone | string | why the attempt was given up; such a group has one row without member columns |
| domain, problem_index, seed, split | string, int64, int64, string | the problem |
| member, start_version, prompt_length, turns, retry | int32 (start_version: int64) | |
| status | string | terminated, truncated |
| reward, environment_reward | float64 | `reward` is the sum of `rewards`, for the reader's convenience |
| rewards | list<struct<name: string, value: float64>> | named parts, in order |
| token_ids, loss_mask, logprobs, versions | list<int32>, list<uint8>, list<float32>, list<int64> | one length |
| messages | list<struct<role: string, content: string>> | the readable transcript, as chat libraries take it |
| spans | list<struct<stage: string, start: float64, end: float64>> | |
| info | string | JSON: the one column without a shape of its own |

Nested types rather than JSON where the shape is known: they keep floats exact and need no parsing. `rewards` is
a list of pairs, not a map, since datasets has no map type.

Invariants: rows of a group are adjacent, in the order of its members; `decode(encode(groups)) == groups`, where
log-probs are rounded to float32 (what engines compute in). Tokens, masks and versions are dictionary-encoded,
log-probs byte-stream-split, everything zstd: the smallest of what was measured.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from infra.store.errors import SchemaTooNew
from rl.selection import Candidate
from rl.trajectory import Group, Message, Problem, Span, Status, Trajectory, Uid

SCHEMA_VERSION = 1
_META = b"rollmill.schema"

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
    ],
    metadata={_META: str(SCHEMA_VERSION).encode()},
)
_NUMPY = {"token_ids": np.int32, "loss_mask": np.uint8, "logprobs": np.float32, "versions": np.int64}
_DICTIONARY = ["tombstone", "domain", "split", "status", "token_ids.list.element", "loss_mask.list.element",
               "versions.list.element", "rewards.list.element.name", "messages.list.element.role",
               "spans.list.element.stage"]  # fmt: skip
_ENCODING = {"logprobs.list.element": "BYTE_STREAM_SPLIT"}

_MEMBER: dict[str, Callable[[Trajectory], Any]] = {
    "member": lambda t: t.member,
    "start_version": lambda t: t.start_version,
    "prompt_length": lambda t: t.prompt_length,
    "turns": lambda t: t.turns,
    "retry": lambda t: t.retry,
    "status": lambda t: t.status.value,
    "reward": lambda t: t.reward,
    "environment_reward": lambda t: t.environment_reward,
    "rewards": lambda t: [{"name": name, "value": value} for name, value in t.rewards.items()],
    "messages": lambda t: [{"role": m.role, "content": m.content} for m in t.messages],
    "spans": lambda t: [{"stage": s.stage, "start": s.start, "end": s.end} for s in t.spans],
    "info": lambda t: _json(t),
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


def encode(groups: Sequence[Group]) -> bytes:
    """A segment's bytes; equal groups give equal bytes. Raises ValueError for what the format can not hold:
    a group that is neither whole nor a tombstone, a uid twice, `info` that is not JSON."""
    rows: list[tuple[Group, Trajectory | None]] = []
    for group in groups:
        _check(group)
        rows += [(group, member) for member in group.members] or [(group, None)]
    if len({group.uid for group in groups}) != len(groups):
        raise ValueError("a segment holds an attempt once")
    columns = []
    for field in SCHEMA:
        if field.name in _GROUP:
            columns.append(pa.array([_GROUP[field.name](group) for group, _ in rows], field.type))
        elif field.name in _NUMPY:
            lists = [None if member is None else getattr(member, field.name) for _, member in rows]
            columns.append(_numbers(lists, field.name))
        else:
            values = [None if member is None else _MEMBER[field.name](member) for _, member in rows]
            columns.append(pa.array(values, field.type))
    sink = io.BytesIO()
    pq.write_table(
        pa.Table.from_arrays(columns, schema=SCHEMA),
        sink,
        compression="zstd",
        use_dictionary=_DICTIONARY,
        column_encoding=_ENCODING,
        write_statistics=["ordinal", "version"],
    )
    return sink.getvalue()


def decode(body: bytes, uids: Collection[Uid] | None = None) -> list[Group]:
    """The groups of a segment, in order; only those of `uids`, if given.

    Raises SchemaTooNew, or pyarrow's ArrowInvalid for bytes that are no segment.
    """
    table = _read(body, None)
    keys = list(map(Uid, table["ordinal"].to_pylist(), table["attempt"].to_pylist()))
    if uids is not None:
        wanted = [at for at, uid in enumerate(keys) if uid in uids]
        table, keys = table.take(pa.array(wanted, pa.int64())), [keys[at] for at in wanted]
    columns: dict[str, list[Any]] = {
        f.name: _lists(table[f.name]) if f.name in _NUMPY else table[f.name].to_pylist() for f in SCHEMA
    }
    groups = []
    for uid, adjacent in groupby(range(len(keys)), key=keys.__getitem__):
        at = list(adjacent)
        row = {name: values[at[0]] for name, values in columns.items()}
        problem = Problem(uid.ordinal, row["domain"], row["problem_index"], row["seed"], row["split"])
        members = [
            _member(uid, problem, {name: values[i] for name, values in columns.items()})
            for i in at
            if columns["member"][i] is not None
        ]
        groups.append(Group(uid, problem, row["version"], members, row["tombstone"]))
    return groups


def summarise(body: bytes) -> list[Candidate]:
    """What selection needs to know of a segment's groups, without decoding their texts. Raises as `decode`."""
    table = _read(body, ["ordinal", "attempt", "version", "tombstone", "reward", "versions"])
    newest = [max(versions, default=None) if versions else None for versions in _lists(table["versions"])]
    names = ("ordinal", "attempt", "version", "tombstone", "reward")
    rows = list(zip(*(table[name].to_pylist() for name in names), newest, strict=True))
    found = []
    for (ordinal, attempt), adjacent in groupby(rows, key=lambda row: row[:2]):
        group = list(adjacent)
        rewards = [row[4] for row in group if row[4] is not None]
        versions = [row[5] for row in group if row[5] is not None]
        informative = bool(rewards) and max(rewards) - min(rewards) > 1e-9
        version, tombstone = group[0][2:4]
        newest_version = max(versions, default=version)
        found.append(
            Candidate(
                Uid(ordinal, attempt),
                version,
                informative,
                tombstone,
                newest_version if newest_version > version else None,
            )
        )
    return found


def _read(body: bytes, columns: list[str] | None) -> pa.Table:
    file = pq.ParquetFile(io.BytesIO(body))
    written = (file.schema_arrow.metadata or {}).get(_META)
    if written is None:
        raise pa.ArrowInvalid("not a segment: the schema version is missing from the file's metadata")
    if int(written) > SCHEMA_VERSION:
        raise SchemaTooNew(f"schema version {int(written)}, this Rollmill reads up to {SCHEMA_VERSION}; upgrade it")
    # One thread: callers read many segments side by side.
    return file.read(columns=columns, use_threads=False)


def _check(group: Group) -> None:
    if bool(group.members) == (group.tombstone is not None):
        raise ValueError(f"group {group.uid}: either members or a tombstone")
    if group.problem.ordinal != group.uid.ordinal:
        raise ValueError(f"group {group.uid}: of problem {group.problem.ordinal}")
    for member in group.members:
        if member.uid != group.uid or member.problem != group.problem:
            raise ValueError(f"group {group.uid}: member {member.member} is of {member.uid}")


def _json(member: Trajectory) -> str:
    try:
        return json.dumps(member.info, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"trajectory {member.uid}/{member.member}: info is not JSON: {error}") from error


def _numbers(lists: Sequence[Sequence[float] | None], name: str) -> pa.ListArray:
    """A list column from Python lists of numbers; an order of magnitude faster than pa.array on them."""
    dtype = _NUMPY[name]
    parts = [np.asarray(values or (), dtype=dtype) for values in lists]
    offsets = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int32)
    values = np.concatenate(parts) if parts else np.empty(0, dtype)
    missing = pa.array([values is None for values in lists], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), mask=missing)


def _lists(column: pa.ChunkedArray) -> list[list[Any] | None]:
    """Python lists from a list column of numbers."""
    found: list[list[Any] | None] = []
    for chunk in column.chunks:
        values, offsets = chunk.values.to_numpy(zero_copy_only=False), chunk.offsets.to_numpy()
        valid = chunk.is_valid().to_numpy(zero_copy_only=False)
        found += [values[offsets[i] : offsets[i + 1]].tolist() if valid[i] else None for i in range(len(chunk))]
    return found


def _member(uid: Uid, problem: Problem, row: dict[str, Any]) -> Trajectory:
    return Trajectory(
        uid=uid,
        member=row["member"],
        problem=problem,
        start_version=row["start_version"],
        prompt_length=row["prompt_length"],
        token_ids=row["token_ids"],
        loss_mask=row["loss_mask"],
        logprobs=row["logprobs"],
        versions=row["versions"],
        messages=[Message(**message) for message in row["messages"]],
        status=Status(row["status"]),
        turns=row["turns"],
        retry=row["retry"],
        environment_reward=row["environment_reward"],
        info=json.loads(row["info"]),
        rewards={part["name"]: part["value"] for part in row["rewards"]},
        spans=[Span(**span) for span in row["spans"]],
    )
