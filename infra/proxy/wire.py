"""What goes over the wire between the proxy and its clients; one place for both sides. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

from rl.placement import HardwareClass


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GenerateBody(_Body):
    """One turn of one trajectory."""

    trajectory: Annotated[str, Field(min_length=1, max_length=256)]
    request: Annotated[str, Field(min_length=1, max_length=256)]
    """Unique among what is in flight; the same one again (a client's retry) replaces the first."""
    tenant: Annotated[str, Field(max_length=127)]
    token_ids: Annotated[list[StrictInt], Field(min_length=1)]
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    max_new_tokens: Annotated[StrictInt, Field(ge=1)]
    stop_token_ids: list[StrictInt] = []
    seed: StrictInt | None = None
    start_version: Annotated[StrictInt, Field(ge=0)]
    evaluation: StrictBool = False
    """Exempt from staleness."""
    domain: Annotated[str, Field(max_length=63)] = ""
    """Whose turn it is, for the choice of an engine."""
    may_split: StrictBool = True
    """Whether one engine may compute the prompt and another the answer."""


class FenceBody(_Body):
    """A control call; `fence` is the lsn of the caller's fence record."""

    fence: Annotated[StrictInt, Field(ge=0)]


class PrefetchBody(FenceBody):
    version: Annotated[StrictInt, Field(ge=0)]


class UpdateBody(PrefetchBody):
    oldest_viable: Annotated[StrictInt, Field(ge=0)]
    """Generations of trajectories that started under an older version end, and later ones are refused."""


class ReportBody(_Body):
    """An engine's host says that it is there."""

    incarnation: Annotated[str, Field(min_length=1, max_length=64)]
    """Another one is another process."""
    url: Annotated[str, Field(pattern=r"^http://[^/]+$")]
    hardware: HardwareClass
    slots: Annotated[StrictInt, Field(ge=1)]
    """Sequences decoded together."""
    capacity: Annotated[StrictInt, Field(ge=1)]
    """Tokens whose keys and values have room."""
    capabilities: dict[str, StrictBool]
    """`Capabilities` of the engine."""


@dataclass(frozen=True, slots=True)
class Status:
    """The proxy's answer to `/status`."""

    serving: int | None
    """Version that generates; None before the first."""
    head: int | None
    """Newest version that the proxy saw in the log."""
    fence: int
    """Highest fence seen."""
    suspended: bool
    oldest_viable: int
    prefetched: int | None
    in_flight: int
    engine: dict[str, Any]
    """`Engine.stats()`."""


@dataclass(frozen=True, slots=True)
class TenantStatus:
    """What the proxy of a service says of one tenant's policy."""

    serving: int | None
    """Version that generates; None before the first."""
    head: int | None
    """Newest version that the proxy saw in the log."""
    suspended: bool
    in_flight: int
    trouble: str | None
    """Why its newest version could not be loaded, where the proxy found that out by itself."""


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The answer of a service's proxy to `/status`."""

    tenants: dict[str, TenantStatus]
    """By the name that a policy is served as."""
    engine: dict[str, Any]
    """`Engine.stats()`."""
