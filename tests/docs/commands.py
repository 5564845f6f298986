"""The commands that README and docs/ tell, as one would type them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WORDS = ("rollmill", "make", "python", "pip", "dask", "docker", "kubectl", "mooncake_master", "ssh", "prefect")
_INLINE = re.compile(rf"`((?:{'|'.join(WORDS)})(?: [^`]+)?)`")


@dataclass(frozen=True)
class Command:
    """`whole` commands stand on a line of their own and can be typed; others are mentions in a sentence."""

    page: str
    words: tuple[str, ...]
    whole: bool

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def ran(
    module: str, *words: str, cwd: Path, log: Path, timeout_s: float | None = None, **variables: str
) -> tuple[int, str]:
    """Exit code and output of `python -m module`; without `timeout_s` the test's own timeout ends it. The output goes
    to a file, and to no pipe, which a server that stays would hold open."""
    with log.open("w") as output:
        code = subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=cwd,
            env={**os.environ, **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
        ).returncode
    return code, log.read_text()


def commands() -> list[Command]:
    found: dict[Command, None] = {}
    for page in PAGES:
        for line, code in _lines(page.read_text()):
            if code:
                words = _words(line.removeprefix(".venv/bin/"))
                if words and words[0] in WORDS:
                    found[Command(page.name, words, True)] = None
            else:
                for text in _INLINE.findall(line):
                    found[Command(page.name, _words(text), False)] = None
    return list(found)


def _lines(text: str) -> list[tuple[str, bool]]:
    """Every line, and whether it is code: fenced, or indented by four."""
    found, fenced = [], False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        else:
            found.append((line.strip(), fenced or line.startswith("    ")))
    return found


def _words(line: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(line, comments=True))
    except ValueError:
        return ()
