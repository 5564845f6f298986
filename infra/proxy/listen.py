"""Ports and HTTP servers of this process.

Invariants: a port is taken (`bind`) before anything is loaded, and opened when there is something to answer; a server
never touches signal handlers, so it runs in any thread.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from rl.errors import RollmillError

GRACE_S = 5
BACKLOG = 2048


class PortInUse(RollmillError):
    """Another process listens on the port."""


class Server(uvicorn.Server):
    """`serve(sockets=[...])` runs it until `should_exit` is set."""

    def __init__(self, app: ASGIApp):
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=GRACE_S,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the port (0: any free one) and does not listen yet. Raises PortInUse."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _named(error, host, port) from error
    return listener


def listen(listener: socket.socket) -> None:
    """Open it. Raises PortInUse."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port, *_ = listener.getsockname()
        raise _named(error, host, port) from error


def _named(error: OSError, host: str, port: int) -> RollmillError:
    if error.errno == errno.EADDRINUSE:
        return PortInUse(f"port {port} of {host} is in use by another process; stop it or choose another port")
    return RollmillError(f"{host}:{port} can not be bound: {error.strerror}")
