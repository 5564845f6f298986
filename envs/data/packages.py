"""Gets the files of Debian and npm packages without installing them, through the machine's own package clients.

Invariants
- The clients verify what they fetch: apt by the archive's signature, npm by the registry's checksum.
- Every command ends within `DEADLINE_S`; one that fails is a ConfigError that repeats its last words.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

from rl.errors import ConfigError

DEADLINE_S = 600.0
_PLAIN = {"LC_ALL": "C.UTF-8"}
"""So that what the clients print is not in the language of the user."""


def debian(directory: Path, *names: str) -> dict[str, str]:
    """Unpack Debian packages into `directory`; their versions by name."""
    try:
        run(directory, "apt-get", "download", *names)
    except ConfigError:  # lists that are missing, or older than the archive
        run(directory, "apt-get", "update", "-q")
        run(directory, "apt-get", "download", *names)
    versions = {}
    for file in sorted(directory.glob("*.deb")):
        name, version = run(directory, "dpkg-deb", "--show", "--showformat=${Package} ${Version}", file.name).split()
        run(directory, "dpkg-deb", "--extract", file.name, ".")
        file.unlink()
        versions[name] = version
    return versions


def catalogue(directory: Path) -> str:
    """What Debian's archive offers: the fields of every package."""
    text = run(directory, "apt-cache", "dumpavail")
    if text.count("\nTag: ") < 1000:
        run(directory, "apt-get", "update", "-q")
        text = run(directory, "apt-cache", "dumpavail")
    return text


def depends(directory: Path, name: str) -> list[str]:
    """The Debian packages that one depends on, from lists that `debian` made sure of."""
    found = re.findall(r"^ +Depends: ([a-z0-9.+-]+)$", run(directory, "apt-cache", "depends", name), re.MULTILINE)
    if not found:
        raise ConfigError(f"the lists of this machine's apt do not have {name}; run `apt-get update`")
    return found


def npm(directory: Path, name: str, version: str) -> dict[str, str]:
    """Unpack an npm package into `directory`/package; its version by name."""
    run(directory, "npm", "pack", "--silent", f"{name}@{version}")
    for file in directory.glob("*.tgz"):
        with tarfile.open(file) as archive:
            archive.extractall(directory, filter="data")
        file.unlink()
    return {name: version}


def run(directory: Path, program: str, *arguments: str) -> str:
    """What a command prints."""
    if shutil.which(program) is None:
        raise ConfigError(f"{program} is not installed: build this corpus on a Debian or Ubuntu, and with npm")
    command = (program, *arguments)
    try:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, encoding="utf-8", timeout=DEADLINE_S, env=os.environ | _PLAIN
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"`{' '.join(command)}` took longer than {DEADLINE_S:g} s") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise ConfigError(f"`{' '.join(command)}` failed: {last}")
    return done.stdout
