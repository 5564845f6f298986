"""The lesser isolation: the same limits per process in a temporary directory, and nothing else.

The program sees the host's files and network as an unprivileged user does, may look into other processes of that user
(a grader's among them), and can leave processes behind that put themselves into a group of their own (each is still
bounded by its limits). Neither the number of its processes nor what they hold together is bounded. Use it where the
full sandbox can not be had and the code is clumsy, not hostile.

Invariant: nothing runs as root, here neither.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from infra.sandbox.errors import SandboxFailure
from infra.sandbox.host import UID, close_streams, find_interpreter, program, unprivileged
from infra.sandbox.limits import Limits
from infra.sandbox.supervision import Broken, Isolation


class Rlimits:
    """One serves all runs. Raises SandboxUnavailable where prlimit(1) is missing."""

    isolation: Isolation = "rlimits"
    mend = "install util-linux and the system's python3"

    def __init__(self) -> None:
        self._prlimit = program("prlimit")
        self._as_user = unprivileged()
        self.interpreter = find_interpreter(self._as_user)

    def start(self, argv: list[str], files: Mapping[str, bytes], limits: Limits) -> Group:
        """Start the program. The files lie in its working directory. Raises SandboxFailure."""
        work = TemporaryDirectory(prefix="rollmill-sandbox-", ignore_cleanup_errors=True)
        for name, content in files.items():
            path = Path(work.name, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if self._as_user:
            for path in (Path(work.name), *Path(work.name).rglob("*")):
                os.chown(path, UID, UID)
        environment = {"HOME": work.name, "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "TMPDIR": work.name}
        # Processes are counted per user and not per run here: a bound on them would hit bystanders.
        bounds = [argument for argument in limits.prlimit() if not argument.startswith("--nproc")]
        try:
            process = subprocess.Popen(
                [*self._as_user, self._prlimit, *bounds, *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=environment,
                cwd=work.name,
                start_new_session=True,
            )
        except OSError as error:
            work.cleanup()
            raise SandboxFailure(f"sandbox: {argv[0]} did not start: {error}") from error
        return Group(process, work)


class Group:
    """One running program with those of its descendants that stayed in its process group."""

    def __init__(self, process: subprocess.Popen[bytes], work: TemporaryDirectory[str]):
        self.process = process
        self._work = work

    def close(self) -> None:
        close_streams(self.process)
        self._work.cleanup()

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def exit_code(self) -> int:
        """128 + n for signal n."""
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def bound_broken(self, limits: Limits) -> Broken | None:
        return None
