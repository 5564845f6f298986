"""Full isolation: bubblewrap's namespaces, as an unprivileged user, under prlimit(1) and a filter of system calls.

What the program finds: user, process, network, IPC, host-name and cgroup namespaces of its own; no capability and no
way to get one; a read-only root that holds an interpreter, the shared libraries, a minimal /dev and nothing else (no
/proc, no /etc); one writable directory in memory, which is /tmp and its home.

Its life is bounded from outside: timeout(1) ends `bwrap` a little after the deadline, whether or not the process that
started it still lives; with `bwrap` ends process 1 of the namespace, and with that everything in it. (That a killed
driver should take `bwrap` with it at once is not asked for: one that dies in the middle of its setup leaves a child
that waits for ever.)

Invariants
- Nothing runs as root: a root that starts sandboxes becomes another user before it starts `bwrap`.
- `bwrap` reports its child and the program's exit code in a file of its own, so that a sandbox that could not be set
  up is never taken for a program that failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

from infra.sandbox import seccomp
from infra.sandbox.errors import SandboxFailure, SandboxUnavailable
from infra.sandbox.host import allow_namespaces, close_streams, find_interpreter, program, unprivileged
from infra.sandbox.limits import MB, Limits
from infra.sandbox.supervision import Broken, Isolation

WORK = "/tmp"
SLACK_S = 3.0
"""How long after the deadline a sandbox ends by itself, should nobody be left to end it."""
SETUP_S = 5.0
"""How long one that is to be killed may still take to be set up."""
ENVIRONMENT = {"HOME": WORK, "LANG": "C.UTF-8", "PATH": "/usr/bin", "TMPDIR": WORK}
_NAMESPACES = [f"--unshare-{what}" for what in ("user", "ipc", "pid", "net", "uts", "cgroup-try")]


class Bubblewrap:
    """Knows where everything is on this machine; one serves all runs. Raises SandboxUnavailable."""

    isolation: Isolation = "full"

    @property
    def mend(self) -> str:
        return f"{allow_namespaces()}, or ask for the lesser isolation 'rlimits' by name"

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise SandboxUnavailable(
                f"sandbox: {sys.platform} has no namespaces; use Linux, or ask for 'rlimits' by name"
            )
        self._bwrap, self._prlimit, self._timeout = program("bwrap"), program("prlimit"), program("timeout")
        self._as_user = unprivileged()
        self.interpreter = find_interpreter(self._as_user)
        self._filter = seccomp.program()

    def start(self, argv: list[str], files: Mapping[str, bytes], limits: Limits) -> Confined:
        """Start the program. The files lie in its working directory. Raises SandboxFailure."""
        fds = {f"{WORK}/{name}": _in_memory(content) for name, content in files.items()}
        status, filtered = _in_memory(b""), _in_memory(self._filter)
        command = [*self._as_user, self._timeout, "--foreground", "--signal=KILL", f"{limits.seconds + SLACK_S:f}"]
        command += [self._bwrap, *_NAMESPACES, "--disable-userns", "--die-with-parent", "--new-session"]
        command += ["--perms", "0700", "--size", str(limits.disk_mb * MB), "--tmpfs", WORK, "--chdir", WORK]
        for path in (*self.interpreter.paths, self._prlimit):
            command += ["--ro-bind", path, path]
        for path in self.interpreter.hidden:
            command += ["--tmpfs", path, "--remount-ro", path]
        for path, fd in fds.items():
            command += ["--file", str(fd), path]
        command += ["--dev", "/dev", "--remount-ro", "/dev", "--remount-ro", "/"]
        command += ["--seccomp", str(filtered), "--json-status-fd", str(status), "--"]
        command += [self._prlimit, *limits.prlimit(), *argv]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=ENVIRONMENT,
                cwd="/",
                pass_fds=[*fds.values(), filtered, status],
                start_new_session=True,
            )
        except OSError as error:
            os.close(status)
            raise SandboxFailure(f"sandbox: {self._bwrap} did not start: {error}") from error
        finally:
            for fd in (*fds.values(), filtered):
                os.close(fd)
        return Confined(process, status)


class Confined:
    """One running program with all its descendants."""

    def __init__(self, process: subprocess.Popen[bytes], status: int):
        self.process = process
        self._status = status

    def close(self) -> None:
        os.close(self._status)
        close_streams(self.process)

    def kill(self) -> None:
        """End process 1 of the namespace, and with it everything in the namespace; `bwrap` ends then, having waited
        for it. One that is still being set up is given time to report it: see above."""
        patience = monotonic() + SETUP_S
        while (child := self._child()) is None and self.process.poll() is None and monotonic() < patience:
            sleep(0.005)
        if child is None:
            return
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(child)
            try:
                if _parent(_parent(child)) == self.process.pid:  # else it has ended, and its number is another's
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)

    def exit_code(self) -> int | None:
        """Of the program (128 + n for signal n), once `bwrap` has ended; None if it never got to run it."""
        return self._report().get("exit-code")

    def bound_broken(self, limits: Limits) -> Broken | None:
        child = self._child()
        tree = _tree(child) if child else []
        if len(tree) < 2:  # the sandbox is still being set up: what it sees is the host
            return None
        if sum(map(_own_pages, tree)) * os.sysconf("SC_PAGE_SIZE") > limits.memory_mb * MB:
            return "memory"
        with suppress(OSError):
            work = os.statvfs(f"/proc/{child}/root{WORK}")
            if work.f_files - work.f_ffree > limits.disk_files:
                return "disk"
        return None

    def _child(self) -> int | None:
        return self._report().get("child-pid")

    def _report(self) -> dict[str, int]:
        lines = os.pread(self._status, 4096, 0).decode().splitlines(keepends=True)
        report: dict[str, int] = {}
        for line in lines:
            if line.endswith("\n"):
                report |= json.loads(line)
        return report


def _in_memory(content: bytes) -> int:
    fd = os.memfd_create("sandbox")
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _parent(pid: int | None) -> int | None:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _tree(pid: int) -> list[int]:
    """A process and its descendants, as far as they could be read."""
    found = [pid]
    for parent in found:  # grows as it goes
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                found += map(int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split())
    return found


def _own_pages(pid: int) -> int:
    """Pages in memory, those of files and shared libraries not counted."""
    with suppress(OSError, ValueError):
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        return resident - shared
    return 0
