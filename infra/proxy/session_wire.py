"""What goes over the wire about sessions; one place for both sides. Without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, TypeAdapter

from rl.sessions import Turn

Id = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[StrictInt, Field(ge=1)]


class SessionBody(BaseModel):
    """Opens a session for one trajectory. Opening it again ends the former one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trajectory: Id
    tenant: Annotated[str, Field(max_length=127)]
    domain: Annotated[str, Field(max_length=63)] = ""
    start_version: Annotated[StrictInt, Field(ge=0)]
    evaluation: StrictBool = False
    """Exempt from staleness."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Of every turn; a request that asks for another one is refused."""
    max_new_tokens: Count
    """Per turn."""
    max_tokens: Count
    """Of a branch, prompt included."""
    max_turns: Count
    """Of all branches together."""
    seed: StrictInt | None = None
    """With a seed turn k of the session is drawn with a seed made of it and k."""
    deadline_s: Annotated[float, Field(gt=0, le=7 * 86400)]
    """After which the session and what it recorded are gone."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A session as its agent sees it: for any client of OpenAI's API."""

    session: str
    base_url: str
    token: str = field(repr=False)
    model: str


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """What a session recorded so far."""

    session: str
    trajectory: str
    start_version: int
    ended: str | None
    """Why no turn is served any more: stale, cancelled, replaced."""
    limit: str | None
    """The limit that refused a turn: max_turns or max_tokens."""
    trouble: str | None
    """Why the newest turn could not be served, for a reason that says nothing of the agent."""
    turns: list[Turn]
    drift: dict[str, int]
    """How often a history differed from what was recorded, by kind."""


RECORD = TypeAdapter(SessionRecord)
