"""What a directory in the store is: the object `manifest.json`,
`{"part_bytes": N, "files": {name: {"size", "parts"}}}`, where `parts` are the sha256 of the file's consecutive pieces
of N bytes.

Invariants: the parts cover a file without gap or overlap; an empty file has one; equal manifests are equal bytes.
"""

from __future__ import annotations

import json
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

MANIFEST = "manifest.json"


class Part(NamedTuple):
    """A piece of a file. Key and offset name it, whatever the shelf."""

    start: int
    length: int
    sha256: str


class FileEntry(BaseModel):
    """What one file must be."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    size: Annotated[int, Field(ge=0)]
    parts: Annotated[tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...], Field(min_length=1)]


class Manifest(BaseModel):
    """The files of a directory, by POSIX path."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    part_bytes: Annotated[int, Field(ge=1)]
    files: dict[str, FileEntry]

    @model_validator(mode="after")
    def _cover(self) -> Manifest:
        for name, entry in self.files.items():
            if len(entry.parts) != len(spans(entry.size, self.part_bytes)):
                raise ValueError(f"{name}: {len(entry.parts)} parts of {self.part_bytes} for {entry.size} bytes")
        return self

    def parts(self, name: str) -> list[Part]:
        """The parts of one file, in order; an empty file has one."""
        entry = self.files[name]
        pieces = zip(spans(entry.size, self.part_bytes), entry.parts, strict=True)
        return [Part(start, length, sha) for (start, length), sha in pieces]

    def body(self) -> bytes:
        """The manifest object; equal manifests have equal ones."""
        return json.dumps(self.model_dump(), sort_keys=True).encode()


def spans(size: int, part_bytes: int) -> list[tuple[int, int]]:
    """Start and length of the parts of a file."""
    return [(start, min(part_bytes, size - start)) for start in range(0, max(size, 1), part_bytes)]
