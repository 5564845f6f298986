"""Mooncake Store as a shelf: versions in the memory of the trainer's machine, read over TCP.

One value per part, under `{key}@{offset}`; what was `put` lies at offset 0.

Invariants
- It is never the only copy: all is gone with the process that lends the memory (the trainer). Whoever finds a part
  missing reads the version from S3.
- What is put stays until it is forgotten by name: left to itself, a full Mooncake evicts what nobody has read yet, such
  as the first parts of the version that is just being put. Where there is no room a put fails.
- A key is written once: Mooncake keeps the first value without saying so. Values are verified by whoever pulls.
- A missing value is told from one that could not be read: Mooncake answers both with no bytes.
- A master that does not answer is a named error within `CONNECT_S`; a peer that hangs, within Mooncake's own 30 s.

The library listens on every interface of the machine for its peers, on two ports for each process, without
authentication, and nothing tells it otherwise: neither the address that it is given nor its `MC_TCP_BIND_ADDRESS`,
which are what it tells its peers. Each process warns of that when it joins.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

from infra.store.errors import NotFound, StoreError
from rl.config.infrastructure import MooncakeWeights

CONNECT_S = 3.0
NO_ROOM = -200
BUFFER_BYTES = 512 << 20
"""Of this process, for parts on their way."""
RDMA = Path(sys.prefix) / "share" / "rollmill" / "rdma"
"""Where `make rdma` puts libibverbs, which the library links to, also for TCP."""
OPEN = (
    "weights.type mooncake: this process listens on every interface of its machine, without authentication, and the "
    "library can not be told otherwise; let a firewall keep out all but the machines of the run, or set weights.type "
    "to s3"
)
_MEND = "start mooncake_master there, or set weights.type to s3 (`--set weights.type=s3 --resume` goes on)"

logger = logging.getLogger(__name__)


class MooncakeUnavailable(StoreError):
    """The master, or the process that holds a value, did not answer; or the package is not there."""


class MooncakeShelf:
    """See `infra.store.directories.Shelf`. `lend_bytes` of this process's memory hold what is put, by anybody."""

    def __init__(self, section: MooncakeWeights, lend_bytes: int = 0) -> None:
        """Raises MooncakeUnavailable."""
        self._master = section.master
        host = _own_address(section.master)
        library = _library()
        self._store, self._pinned = library.MooncakeDistributedStore(), library.ReplicateConfig()
        self._pinned.with_hard_pin = True
        # positional: host, metadata (peers find each other by handshake), lent, buffer, protocol, devices, master
        code = self._store.setup(host, "P2PHANDSHAKE", lend_bytes, BUFFER_BYTES, "tcp", "", section.master)
        if code != 0:
            raise MooncakeUnavailable(f"weights.master {section.master}: joining failed with code {code}; {_MEND}")
        logger.warning(OPEN)

    def put(self, key: str, body: bytes) -> None:
        self._put(key, 0, body)

    def upload(self, key: str, part_bytes: int) -> _Upload:
        return _Upload(self, key)

    def get(self, key: str) -> bytes:
        return self.get_range(key, 0, 0)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        value = self._store.get(f"{key}@{start}")
        if value:
            return value
        there = self._store.is_exist(f"{key}@{start}")
        if there == 0:
            raise NotFound("mooncake", f"{key}@{start}")
        raise MooncakeUnavailable(f"{key} at {start} can not be read from Mooncake {self._master} (code {there})")

    def forget(self, key_prefix: str) -> None:
        """Give back the room of a directory, and of one that broke off."""
        code = self._store.remove_by_regex(f"^{re.escape(key_prefix)}", True)  # also what was read just now
        if code < 0:
            raise MooncakeUnavailable(f"{key_prefix} can not be removed from Mooncake {self._master} (code {code})")

    def _put(self, key: str, start: int, body: bytes) -> None:
        if not body:  # Mooncake takes no empty value
            return
        code = self._store.put(f"{key}@{start}", body, self._pinned)
        if code != 0:
            why = "no room, raise weights.lend_mb" if code == NO_ROOM else f"code {code}"
            raise MooncakeUnavailable(f"{key} at {start} can not be put into Mooncake {self._master}: {why}")

    def close(self) -> None:
        """Give back the memory lent, and what it holds."""
        self._store.close()


class _Upload:
    """Nobody looks for parts before the manifest is there, so there is nothing to finish."""

    def __init__(self, shelf: MooncakeShelf, key: str) -> None:
        self._shelf, self._key = shelf, key

    def send(self, start: int, body: bytes) -> None:
        self._shelf._put(self._key, start, body)

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        """`forget` is the mend."""


def _library() -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    for name in ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1"):
        if (RDMA / name).exists():
            ctypes.CDLL(str(RDMA / name), mode=ctypes.RTLD_GLOBAL)
    try:
        from mooncake import store
    except ImportError as error:
        raise MooncakeUnavailable(
            f"weights.type is mooncake, but its library can not be loaded ({error}): pip install 'rollmill[mooncake]', "
            "and libibverbs of the system (Debian: apt install libibverbs1, or `make rdma`); or set weights.type to s3"
        ) from error
    return store


def _own_address(master: str) -> str:
    """The address by which this machine reaches the master, and by which its peers reach this process. The library
    itself would wait for a dead master for 90 s with the interpreter's lock in its hands."""
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S) as probe:
            return probe.getsockname()[0]
    except OSError as error:
        raise MooncakeUnavailable(f"weights.master {master} can not be reached: {error}; {_MEND}") from error
