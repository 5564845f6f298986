"""The records of the commit log: the only truth of a run.

Invariants
- Record `lsn` exists at most once; a reader folds them in order without gaps (`rl.ledger`).
- A step record binds one new version to its state, the attempts it trained and the attempts it dropped.
- Every record that carries a snapshot can start a fold: a reader never needs older ones.
- Serialised as one JSON object, unknown fields refused. An object of an older format is brought to this one as it is
  read (`UPGRADES`), one of a newer format is refused by name. Nothing is ever rewritten.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from rl.errors import LogTooNew
from rl.trajectory import Uid

FORMAT = 1
"""Of the records that are written. Raised by every change that the code before would not read, a new field included."""
Upgrade = Callable[[dict[str, Any]], dict[str, Any]]
UPGRADES: Mapping[int, Upgrade] = {}
"""From the JSON object of each older format to that of the next one."""


class Reason(StrEnum):
    """Why an attempt was dropped."""

    STALE = "stale"
    TOO_LONG = "too_long"
    """It took longer than a held version was held: no staleness bound fits this problem."""
    EQUAL_REWARD = "equal_reward"
    DUPLICATE = "duplicate"
    ROLLED_BACK = "rolled_back"
    ENVIRONMENT_ERROR = "environment_error"
    ENVIRONMENT_TIMEOUT = "environment_timeout"
    ENVIRONMENT_START = "environment_start"
    ENVIRONMENT_PROTOCOL = "environment_protocol"
    INJECTED = "injected"
    """A failure that the run's configuration asked for."""
    REWARD_ERROR = "reward_error"
    GENERATION_ERROR = "generation_error"
    STAGE_FAILURE = "stage_failure"
    SURPLUS = "surplus"
    """More were started than needed, and others finished first (`rl.redundancy`)."""


class Mark(StrEnum):
    """What an operator says of a version's state."""

    PIN = "pin"
    """Keep it, whatever the retention policy says."""
    UNPIN = "unpin"
    """Leave it to the retention policy again."""
    DELETE = "delete"
    """Nobody needs it: it may be deleted."""


class Outcome(StrEnum):
    """What becomes of the ordinal whose attempt was dropped."""

    RETRY = "retry"
    """The next attempt is granted."""
    ABANDON = "abandon"
    """The ordinal is settled without having been trained."""


class _Model(BaseModel):
    # A metric that is not a number must not make a record that can not be read back: JSON has no NaN.
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, ser_json_inf_nan="strings"
    )


class Drop(_Model):
    """One dropped attempt."""

    uid: str
    reason: Reason
    outcome: Outcome


class StateRef(_Model):
    """Where the state of a version lies, and what it must hash to."""

    prefix: str
    """Key prefix below the run, `state/{lsn}-{nonce}/`."""
    manifest_sha256: str
    """Of the manifest object, which names every file with its own sha256 and size."""
    full: bool
    """Whether optimizer, scheduler and RNG are there too: a point to resume from."""


class Snapshot(_Model):
    """The whole folded state after the record that carries it."""

    head: int | None
    """Newest version of the live line; None before the first step record."""
    next_version: int
    """The number of the next step record; never reused, not even after a rollback."""
    line: tuple[int, ...]
    """The newest versions of the live line, oldest first (see `rl.ledger.LINE`)."""
    states: dict[int, StateRef]
    """State of each version in `line`, and of the newest full one."""
    low_water: int
    """Every ordinal below is settled."""
    settled_above: tuple[int, ...]
    attempts: dict[int, int]
    """Attempt granted to an outstanding ordinal, where it is not 0."""
    strikes: dict[int, dict[str, int]]
    """Dropped attempts of outstanding ordinals, by reason."""
    alpha: int | None
    fence: int
    """lsn of the newest fence."""
    gc_floor: int = 0
    pins: dict[int, StateRef] = {}
    """Pinned versions, each with its state."""
    deleted: tuple[int, ...] = ()
    """Versions marked for deletion."""
    granted: dict[int, int] = {}
    """Head at the time when the open attempt of an outstanding ordinal was granted, where `attempts` has it."""
    trained_groups: int
    dropped_groups: dict[str, int]


class _Record(_Model):
    format: int = FORMAT
    lsn: int = Field(ge=1)
    nonce: str
    """Unique per create, so that a writer recognises its own success after a lost acknowledgement."""
    writer: str
    time: float
    """Seconds since the epoch; for people and plots, never for decisions."""
    snapshot: Snapshot | None = None


class Fence(_Record):
    """A trainer took over; records of an older one lose from here on."""

    kind: Literal["fence"] = "fence"


class Step(_Record):
    """One optimizer step: publishes the version and consumes its samples in one creation. The first one
    (`base` None) publishes the initial policy and consumes nothing."""

    kind: Literal["step"] = "step"
    version: int
    base: int | None
    state: StateRef
    weights_sha256: str
    """Hash over names and bytes of the trained weights: what a replay must reproduce."""
    alpha: int
    trained: tuple[str, ...] = ()
    """Uids, in the order of the batch."""
    segments: tuple[str, ...] = ()
    """Key, below the run, of the segment that each of `trained` was read from: an attempt may have been
    sealed more than once, and a replay must read the same copy."""
    dropped: tuple[Drop, ...] = ()
    metrics: dict[str, float] = {}
    """Small summary for people: a projection of what MLflow has."""


class Settle(_Record):
    """Drops attempts between steps, so that their replacements need not wait for a step."""

    kind: Literal["settle"] = "settle"
    dropped: tuple[Drop, ...]


class Rollback(_Record):
    """Makes `to` the head again; what was trained after it is outstanding once more, as fresh attempts.
    Always carries the snapshot that holds afterwards."""

    kind: Literal["rollback"] = "rollback"
    to: int


class GcFloor(_Record):
    """Objects of versions below `version` may be deleted after the grace period. Only rises."""

    kind: Literal["gc_floor"] = "gc_floor"
    version: int


class Retain(_Record):
    """An operator pins a version, lets it go, or deletes it."""

    kind: Literal["retain"] = "retain"
    version: int
    mark: Mark
    state: StateRef | None = None
    """Of a pinned version: a reader of the log need not look for its step."""


Record = Annotated[Fence | Step | Settle | Rollback | GcFloor | Retain, Field(discriminator="kind")]
_ADAPTER: TypeAdapter[Record] = TypeAdapter(Record)


def encode(record: Record) -> bytes:
    """The JSON body of a log object."""
    return record.model_dump_json().encode()  # the adapter's own dump ignores the models' ser_json_inf_nan


def decode(body: bytes) -> Record:
    """The record of a log object, of this or an older format. Raises LogTooNew, pydantic's ValidationError on anything
    else."""
    try:
        tree = json.loads(body)
    except ValueError:
        return _ADAPTER.validate_json(body)  # which says what is wrong with it
    written = tree.get("format", FORMAT) if isinstance(tree, dict) else FORMAT
    if not isinstance(written, int) or written == FORMAT:
        return _ADAPTER.validate_json(body)
    if written > FORMAT:
        raise LogTooNew(f"a record of format {written}, this Rollmill reads up to {FORMAT}; upgrade it")
    for older in range(written, FORMAT):
        tree = UPGRADES[older](tree) | {"format": older + 1}
    return _ADAPTER.validate_python(tree)


def uids(texts: tuple[str, ...]) -> list[Uid]:
    return [Uid.parse(text) for text in texts]
