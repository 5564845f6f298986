"""Finding, starting and ending the processes of a service.

Invariants: a process is only ever signalled when it is provably ours: its pid *and* start time are the
recorded ones, or its environment carries our mark for this data directory and service. So a reused pid is
never touched, and a child that left its process group, or whose parent was killed, is still found.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from infra.services.errors import ServiceDidNotStop
from infra.services.service import HOST, Launch

MARK = "ROLLMILL_SERVICE"
# Below Linux's range for outgoing connections (32768 and up): no client socket sits on a port we chose.
_AUTO_PORTS = range(15_000, 32_000)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LOG_LIMIT_BYTES = 16 * 1024 * 1024
# Held so that a child of this process is reaped (and no ResourceWarning is given) when it ends before us.
_children: dict[int, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True)
class Identity:
    """A process for certain: pid alone is reused by the kernel."""

    pid: int
    began: float
    """Seconds from the machine's start on Linux, whose kernel counts so, and psutil adds a clock that may be set since,
    as when a laptop wakes up; elsewhere since the epoch."""
    boot: str
    """Of which start of the machine."""

    @classmethod
    def of(cls, process: psutil.Process) -> Identity:
        """Of one that was just looked up: psutil keeps its time. Raises psutil.NoSuchProcess."""
        began = process.create_time()
        return cls(process.pid, began - psutil.boot_time() if psutil.LINUX else began, boot())

    def process(self) -> psutil.Process | None:
        """The living process, or None if it is gone (or the pid is another's now)."""
        try:
            process = psutil.Process(self.pid)
            now = Identity.of(process)
        except psutil.NoSuchProcess:
            return None
        same = now.boot == self.boot and abs(now.began - self.began) < 0.05
        return process if same and alive(process) else None


def boot() -> str:
    """What no other start of this machine has; empty where the system does not tell."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def alive(process: psutil.Process) -> bool:
    """Running, and not merely an unreaped exit status.

    A process whose main thread is gone shows as a zombie while its other threads still run (and hold ports).
    """
    child = _children.get(process.pid)
    try:
        if not process.is_running():
            return False
        if process.status() != psutil.STATUS_ZOMBIE:
            return True
        return child.poll() is None if child is not None else process.num_threads() > 1
    except psutil.NoSuchProcess:
        return False


def mark(data_dir: Path, name: str) -> str:
    return f"{name}@{data_dir}"


def spawn(launch: Launch, *, data_dir: Path, name: str, log: Path) -> Identity:
    """Start the command in its own session and process group, with its output appended to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > _LOG_LIMIT_BYTES:
        log.replace(log.with_suffix(".old.log"))
    with log.open("ab") as out:
        out.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} starting {name}\n".encode())
        out.flush()
        child = subprocess.Popen(
            launch.argv,
            env=launch.env | {MARK: mark(data_dir, name)},
            cwd=launch.cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _children[child.pid] = child
    try:
        return Identity.of(psutil.Process(child.pid))
    except psutil.NoSuchProcess:  # already gone; the caller's wait finds out and shows the log
        return Identity(child.pid, 0.0, "")


def mark_of(process: psutil.Process) -> str | None:
    """Of the service that it is, or was started by; None for any other process."""
    try:
        return process.environ().get(MARK)
    except (psutil.Error, OSError):  # not ours to read, or gone
        return None


def family(data_dir: Path, name: str, leader: Identity | None) -> list[psutil.Process]:
    """All living processes of a service: its leader, the leader's descendants, all that bear its mark."""
    found: dict[int, psutil.Process] = {}
    process = leader.process() if leader else None
    if process is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {p.pid: p for p in [process, *process.children(recursive=True)]}
    wanted = mark(data_dir, name)
    for process in psutil.process_iter():
        if mark_of(process) == wanted:
            found[process.pid] = process
    found.pop(os.getpid(), None)  # a service's own child may call us
    return [p for p in found.values() if alive(p)]


def end(data_dir: Path, name: str, leader: Identity | None, *, grace_s: float) -> bool:
    """SIGTERM, up to `grace_s` seconds, SIGKILL, until no process of the service is left; False if none was.

    Raises ServiceDidNotStop when some outlive SIGKILL by 10 s.
    """
    members = family(data_dir, name, leader)
    if not members:
        return False
    lead = leader.process() if leader else None
    # The leader first and alone: servers with workers shut them down in order themselves.
    _signal([lead] if lead else members, signal.SIGTERM)
    _signal(members, signal.SIGCONT)  # one that is stopped hears SIGTERM only then
    _wait_gone(members, grace_s)
    deadline = time.monotonic() + 10.0
    while members := family(data_dir, name, leader):  # asked anew: a dying parent may have started another
        _signal(members, signal.SIGKILL)
        _wait_gone(members, 1.0)
        if time.monotonic() > deadline:
            raise ServiceDidNotStop(name, [p.pid for p in members])
    for pid, child in list(_children.items()):
        if child.poll() is not None:
            del _children[pid]
    return True


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)  # psutil checks the start time again


def _wait_gone(processes: list[psutil.Process], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(alive(p) for p in processes) and time.monotonic() < deadline:
        time.sleep(0.05)


def rss_bytes(processes: list[psutil.Process]) -> int:
    """Resident memory over all of them, in bytes (shared pages are counted once per process)."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total


def port_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_port(taken: set[int]) -> int:
    """A port that is free now and not in `taken`, which it joins. Raises OSError after 1,000 vain draws."""
    draw = random.SystemRandom()  # the global generator belongs to the caller's experiment
    for _ in range(1000):
        port = draw.choice(_AUTO_PORTS)
        if port not in taken and port_free(port):
            taken.add(port)
            return port
    raise OSError("no free port on loopback")


def port_holder(port: int) -> str | None:
    """`name (pid N)` of the process that listens on the port, if this user may see it."""
    try:
        connections = psutil.net_connections(kind="inet")
    except psutil.Error:  # macOS wants root for this
        return None
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
            with contextlib.suppress(psutil.Error):
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return None
