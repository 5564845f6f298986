"""The named errors of the embedded services.

Each carries `.mend`: one sentence that says what the reader can do about it. The command line prints message
and mend, never a traceback.
"""

from __future__ import annotations

import copyreg
from pathlib import Path
from typing import Any

from rl.errors import RollmillError


class ServiceError(RollmillError):
    """Base of everything that can go wrong with an embedded service; `.mend` says what to do about it."""

    def __init__(self, message: str, *, mend: str) -> None:
        super().__init__(message)
        self.message = message
        self.mend = mend

    def __str__(self) -> str:
        return f"{self.message} -> {self.mend}"

    def __reduce__(self) -> tuple[Any, ...]:
        # a subclass's arguments are not its message: what is pickled (by Dask) is restored without __init__
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class PortInUse(ServiceError):
    """A port that a service needs is held by a process that is not ours."""

    def __init__(self, service: str, port: int, holder: str | None, flag: str) -> None:
        by = f"by {holder}" if holder else "by a process that this user can not see"
        super().__init__(
            f"port {port}, wanted for {service}, is in use {by}",
            mend=f"stop that process, or choose another port with {flag} (0 picks a free one)",
        )
        self.service, self.port, self.holder = service, port, holder


class PortChanged(ServiceError):
    """A service runs already, on another port than the one asked for."""

    def __init__(self, service: str, running: int, asked: int, flag: str) -> None:
        super().__init__(
            f"{service} runs already on port {running}, but port {asked} was asked for",
            mend=f"run `rollmill down` first, or leave out {flag}",
        )
        self.service, self.running, self.asked = service, running, asked


class ServiceDidNotStart(ServiceError):
    """A service exited, or was not ready before its deadline. `.log_tail` holds the last lines of its log."""

    def __init__(self, service: str, reason: str, log: Path, log_tail: str) -> None:
        super().__init__(
            f"{service} did not start: {reason}\n--- end of {log} ---\n{log_tail}\n---",
            mend=f"read {log}; `rollmill doctor` checks ports, disk and memory",
        )
        self.service, self.reason, self.log, self.log_tail = service, reason, log, log_tail


class ServiceDidNotStop(ServiceError):
    """Processes of a service outlived SIGKILL (in practice: stuck in the kernel on a disk)."""

    def __init__(self, service: str, pids: list[int]) -> None:
        super().__init__(
            f"{service} did not stop: process(es) {', '.join(map(str, pids))} outlived SIGKILL",
            mend="look at them with `ps -o pid,stat,wchan,args -p PID`; a hanging disk is the usual cause",
        )
        self.service, self.pids = service, pids


class ServicesBusy(ServiceError):
    """Another `up` or `down` on the same data directory holds the lock past our deadline."""

    def __init__(self, lock: Path, waited_s: float) -> None:
        super().__init__(
            f"another `up` or `down` has held {lock} for {waited_s:.0f} s",
            mend="wait for it to end, or end that process (the lock is freed with it)",
        )
        self.lock = lock


class DiskFull(ServiceError):
    """The disk of the data directory has no space left, so nothing can be started."""

    def __init__(self, home: Path) -> None:
        super().__init__(
            f"no space left on the disk of {home}",
            mend="free some space, or set ROLLMILL_HOME to another disk for new runs; nothing stored is lost",
        )
        self.home = home


class BinaryMissing(ServiceError):
    """The program of a service is not installed in this environment."""

    def __init__(self, service: str, binary: str, package: str) -> None:
        super().__init__(
            f"{service} needs the program `{binary}`, which is not beside this Python and not on PATH",
            mend=f"install the package {package} (`make install` does)",
        )
        self.binary = binary


class IndexNotRebuilt(ServiceError):
    """The index of the S3 server's objects, which a restart of the machine may have cut short, was not rebuilt."""

    def __init__(self, home: Path, reason: str) -> None:
        super().__init__(
            f"the index of the objects in {home} was not rebuilt after a restart of the machine: {reason}",
            mend=f"see what `weed fix {home}` says, and start again",
        )
        self.home = home


class StateUnreadable(ServiceError):
    """A file of ours under the data directory can not be read as what it should be."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path} can not be read: {reason}", mend="run `rollmill down`, then remove that file"
        )
        self.path = path


class ServiceNotUp(ServiceError):
    """An address was asked of a service that is not running."""

    def __init__(self, service: str) -> None:
        super().__init__(f"{service} is not running", mend="start it with `rollmill up`")
        self.service = service
