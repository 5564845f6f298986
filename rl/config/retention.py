"""How long versions and samples stay in the store, and what is shown of them on Prefect's server."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rl.config.base import Section


class RetentionSection(Section):
    """What garbage collection leaves. Whatever the values, the head, the newest full checkpoint, the samples that a
    resumed trainer replays, and pinned versions (`rollmill versions pin`) stay, and so does the log.

    By default the newest 20 versions stay with their optimizer state and their samples: 20 checkpoints on the disk.
    """

    newest: Annotated[int, Field(ge=1)] = 20
    """So many versions, counted back from the newest one, stay with their samples."""
    younger_than: Annotated[float, Field(ge=0)] = 0
    """Versions younger than so many seconds stay with their samples, too, however many they are."""
    every: Annotated[int, Field(ge=1)] | None = None
    """Every so many versions one stays for good, without its samples; None keeps none of the old ones."""
    grace: Annotated[float, Field(ge=0)] = 600
    """Seconds from the record that lets something go until it is deleted: longer than any reader takes to read what
    it has just found in the log."""
    collect_every: Annotated[int, Field(ge=1)] | None = 10
    """Versions between two collections while the run trains; None leaves it to `rollmill gc`."""
    task_runs: Annotated[int, Field(ge=100)] = 5000
    """So many ended task runs stay on Prefect's server while the run lives, at about 5 KB each."""
