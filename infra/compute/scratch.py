"""Directories that belong to one process.

Invariant: they are gone with their process, by itself when it ends in order, else by the next one that makes one of
the same name there. Processes that share a parent directory must share a machine: it is their ids that are looked
up.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


@contextmanager
def scratch(parent: Path, name: str) -> Iterator[Path]:
    """The new and empty directory `parent/{name}-{pid}`, for the block; those of dead processes are removed."""
    for old in parent.glob(f"{name}-*"):
        pid = old.name.removeprefix(f"{name}-")
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(old, ignore_errors=True)
    own = parent / f"{name}-{os.getpid()}"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)
