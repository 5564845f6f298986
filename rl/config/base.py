"""The base of every configuration model: unknown fields are errors, docstrings document fields, values are
frozen after validation."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


YEAR = 31_536_000
Seconds = Annotated[float, Field(gt=0, le=YEAR)]
"""With an end: the system's own waits take no infinity, and nothing that is told to take a year is waited for."""
NAME = r"^[a-z0-9][a-z0-9_-]{0,62}$"
Name = Annotated[str, Field(pattern=NAME)]
