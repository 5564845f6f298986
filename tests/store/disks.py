"""Small disks of a test's own, which it may fill up or cut the power of. They need root and the right to mount."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def _call(*argv: str | Path) -> None:
    """Skips the test when that is not permitted here."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a disk of its own")
    answer = subprocess.run([str(a) for a in argv], capture_output=True, text=True, timeout=60, check=False)
    if answer.returncode != 0:
        pytest.skip(f"`{argv[0]}` is not possible here: {answer.stderr.strip()[-120:]}")


def _unmount(at: Path) -> None:
    """Raises CalledProcessError when something still runs there."""
    subprocess.run(["umount", str(at)], check=True, capture_output=True, timeout=60)


@contextmanager
def memory_disk(at: Path, megabytes: int) -> Iterator[Path]:
    """An empty file system of this size."""
    at.mkdir()
    _call("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", at)
    try:
        yield at
    finally:
        _unmount(at)


class Disk:
    """An ext4 disk in a file. Its power can be cut: what the kernel holds back in its page cache for it is lost."""

    def __init__(self, at: Path, megabytes: int):
        self.at = at
        self._image = at.with_suffix(".img")
        with self._image.open("wb") as file:
            file.truncate(megabytes << 20)
        at.mkdir()
        _call("mkfs.ext4", "-q", "-F", self._image)
        self._mount()

    def cut_power(self) -> None:
        """Go back to what has reached the disk. Nothing may run on it."""
        reached = self._image.with_suffix(".reached")
        shutil.copyfile(self._image, reached)  # before the kernel writes out the rest, at the unmounting
        self.close()
        reached.replace(self._image)
        self._mount()

    def close(self) -> None:
        _unmount(self.at)

    def _mount(self) -> None:
        _call("mount", "-o", "loop", self._image, self.at)
