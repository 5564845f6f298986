"""A certificate for one cluster: made when it starts, known to its own machines only, gone with it.

Invariants: who has no copy of the key is not let in, as client or worker; the key lies in directories that only the
user may read, and in no command line; processes that this one starts find it by their environment; a machine that
stops answering costs `CONNECT_S` and `ACT_S`, when it is brought there and when it is taken away.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
from distributed.security import Security

from infra.compute.workers import ssh_options
from rl.config.pools import SSHPools
from rl.errors import RollmillError

ROLES = ("client", "scheduler", "worker")
FILES = ("ca.pem", "key.pem")
CONNECT_S = 20.0
ACT_S = 30.0
"""For bringing the files to a machine, and for taking them away."""


class MachineUnreachable(RollmillError):
    """A machine of `pools.machines` does not answer by SSH, refuses the user, or is not known."""


@dataclass(frozen=True)
class Certificate:
    """The files `ca.pem` and `key.pem`, at the same path on every machine of the cluster."""

    directory: Path

    @property
    def security(self) -> Security:
        ca, key = (str(self.directory / name) for name in FILES)
        roles = {f"tls_{role}_{part}": path for role in ROLES for part, path in (("cert", ca), ("key", key))}
        return Security(tls_ca_file=ca, require_encryption=True, **roles)

    @property
    def settings(self) -> dict[str, str]:
        """Dask's configuration that names the files."""
        ca, key = (str(self.directory / name) for name in FILES)
        found = {"distributed.comm.tls.ca-file": ca}
        for role in ROLES:
            found |= {f"distributed.comm.tls.{role}.cert": ca, f"distributed.comm.tls.{role}.key": key}
        return found


@contextmanager
def certificate(under: Path | None = None) -> Iterator[Certificate]:
    """For the duration of a cluster; in `under`, or where temporary files are. Dask of this process, and of those that
    it starts, uses it meanwhile."""
    root = Path(tempfile.gettempdir()) if under is None else under
    root.mkdir(parents=True, exist_ok=True)
    made = Certificate(root / f"rollmill-{uuid.uuid4().hex}")
    made.directory.mkdir(mode=0o700)
    variables = {f"DASK_{name.upper().replace('.', '__').replace('-', '_')}": v for name, v in made.settings.items()}
    try:
        temporary = Security.temporary()
        for name, text in zip(FILES, (temporary.tls_ca_file, temporary.tls_client_key), strict=True):
            (made.directory / name).touch(mode=0o600)
            (made.directory / name).write_text(text)
        os.environ.update(variables)
        with dask.config.set(made.settings):
            yield made
    finally:
        for name in variables:
            os.environ.pop(name, None)
        shutil.rmtree(made.directory, ignore_errors=True)


@contextmanager
def on_machines(pools: SSHPools, made: Certificate) -> Iterator[None]:
    """The files on every machine that is not this one, for the duration of a cluster. Raises MachineUnreachable."""
    hosts = sorted({machine.host for machine in pools.machines})
    try:
        asyncio.run(_everywhere(hosts, ssh_options(pools), made, _bring))
        yield
    finally:
        asyncio.run(_everywhere(hosts, ssh_options(pools), made, _take_away, quietly=True))


async def _everywhere(
    hosts: list[str], options: Mapping[str, Any], made: Certificate, act: Any, quietly: bool = False
) -> None:
    import asyncssh

    async def one(host: str) -> None:
        loop, late = asyncio.get_running_loop(), None
        try:
            async with asyncssh.connect(host, connect_timeout=CONNECT_S, **options) as connection:
                # this ends every wait on the connection; a cancelled one would still wait for SFTP to close
                late = loop.call_later(ACT_S, connection.abort)
                await act(connection, made)
        except (OSError, asyncssh.Error) as error:
            overdue = late is not None and loop.time() >= late.when()
            said = f"it did not answer within {ACT_S:g} s" if overdue else f"{type(error).__name__}: {error}"
            if not quietly:
                raise MachineUnreachable(
                    f"pools.machines: {host} can not be used by SSH: {said}; try "
                    f"`ssh -p {options['port']} {host} true` from here"
                ) from error
        finally:
            if late is not None:
                late.cancel()

    await asyncio.gather(*map(one, hosts))


async def _bring(connection: Any, made: Certificate) -> None:
    async with connection.start_sftp_client() as files:
        if await files.exists(str(made.directory)):
            return  # this very machine, or one that shares its file system
        await files.mkdir(str(made.directory))
        await files.chmod(str(made.directory), 0o700)
        for name in FILES:
            await files.put(str(made.directory / name), str(made.directory / name), preserve=True)


async def _take_away(connection: Any, made: Certificate) -> None:
    async with connection.start_sftp_client() as files:
        if await files.exists(str(made.directory)):
            await files.rmtree(str(made.directory), ignore_errors=True)
