"""Child processes that can not outlive their parent, and that can tell it in one line why they ended.

Invariant: a process started by `spawn` ends when its parent does, whatever kills the parent: it holds the read
end of a pipe whose only write end is the parent's, and `die_with_parent` exits on end of file. This needs no
operating-system feature beyond pipes, so it holds on Linux and macOS alike.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

DONE, CRASHED, FENCED, NAMED = 0, 1, 3, 4
"""Exit codes: done; died without a word; fenced by another trainer; ended by a named error."""
LIFELINE = "ROLLMILL_LIFELINE"
LAST_WORDS = "ROLLMILL_LAST_WORDS"


def spawn(argv: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start `python -m argv...` in its own session, its output appended to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    _words_file(log).unlink(missing_ok=True)
    env = {**os.environ, **(environment or {}), LIFELINE: "1", LAST_WORDS: str(_words_file(log))}
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *argv],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )


def die_with_parent() -> None:
    """Call first in the child's `main`: exits hard (code 70) once the parent is gone. Without a lifeline (the
    module was started by hand) it does nothing."""
    if os.environ.pop(LIFELINE, None) != "1":
        return
    pipe = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def watch() -> None:
        while os.read(pipe, 1):
            pass
        os.killpg(os.getpgid(0), signal.SIGKILL) if os.getpgid(0) == os.getpid() else os._exit(70)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def stop(process: subprocess.Popen[bytes], grace_s: float = 10.0) -> int:
    """End a spawned process and everything in its session: SIGTERM, then SIGKILL after `grace_s`."""
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    _signal(process, signal.SIGKILL)
    code = process.wait(grace_s)
    if process.stdin is not None:
        process.stdin.close()
    return code


def last_words(who: str, error: BaseException) -> None:
    """In a child: say in one line, on stderr and to the parent, by what named error it ends."""
    line = f"{who}: {' '.join(str(error).split())}"
    print(line, file=sys.stderr, flush=True)
    if (path := os.environ.get(LAST_WORDS)) is not None:
        Path(path).write_text(line)


def reason(log: Path) -> str:
    """In the parent: the child's last words, else the end of its log."""
    words = _words_file(log)
    return words.read_text() if words.exists() else f"the end of {log}:\n{tail(log)}"


def tail(log: Path, lines: int = 5) -> str:
    """The last lines of a log, for an error message."""
    if not log.exists():
        return "(no log)"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _words_file(log: Path) -> Path:
    return log.with_suffix(".error")
