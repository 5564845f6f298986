"""Machines behind SSH, in the place of which stands a server on this one: they join, are refused, hang and freeze."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import asyncssh
import psutil
import pytest
from distributed import Client

from infra.compute.certificate import Certificate, MachineUnreachable, certificate, on_machines
from infra.compute.pools import cluster, connect, slots
from rl.config.pools import Here, SSHMachine, SSHPools
from rl.errors import DeadlineExceeded
from rl.placement import HardwareClass

SMALL = Here(compute_gpu=1, cpu=2, **{"lambda": 1})


def visible() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


class Files(asyncssh.SFTPServer):
    """The files of this machine, until it freezes."""

    def __init__(self, channel: asyncssh.SSHServerChannel, server: Server):
        super().__init__(channel)
        self._server = server

    async def stat(self, path: bytes) -> os.stat_result:
        if self._server.frozen:
            await asyncio.Event().wait()
        return super().stat(path)


class Server:
    """An SSH server of this machine, in a thread: it runs what it is told, as sshd does."""

    def __init__(self, directory: Path):
        self.frozen = False
        self.key = asyncssh.generate_private_key("ssh-ed25519")
        self.user = asyncssh.generate_private_key("ssh-ed25519")
        self.user.write_private_key(directory / "id")
        self.user.write_public_key(directory / "id.pub")
        self.commands: list[str] = []
        self.directory, self.loop = directory, asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.port = self._call(self._start())
        known = f"[127.0.0.1]:{self.port} {self.key.export_public_key().decode()}"
        (directory / "known_hosts").write_text(known)

    def _call(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    async def _start(self) -> int:
        self.server = await asyncssh.listen(
            "127.0.0.1",
            0,
            server_host_keys=[self.key],
            authorized_client_keys=str(self.directory / "id.pub"),
            process_factory=self._run,
            sftp_factory=lambda channel: Files(channel, self),
            encoding=None,
        )
        return self.server.get_port()

    async def _run(self, process: asyncssh.SSHServerProcess) -> None:
        self.commands.append(process.command or "")
        child = await asyncio.create_subprocess_shell(
            process.command or "true", stdin=-1, stdout=-1, stderr=-1, start_new_session=True
        )
        await process.redirect(stdin=child.stdin, stdout=child.stdout, stderr=child.stderr)
        closed = asyncio.create_task(process.channel.wait_closed())
        ended = asyncio.create_task(child.wait())
        await asyncio.wait({closed, ended}, return_when=asyncio.FIRST_COMPLETED)
        if child.returncode is None:
            os.killpg(child.pid, 15)
            await child.wait()
        process.exit(child.returncode or 0)

    def stop(self) -> None:
        async def close() -> None:
            self.server.close()
            await self.server.wait_closed()

        self._call(close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    try:
        yield made
    finally:
        made.stop()


def pools_of(server: Server, **more) -> SSHPools:
    return SSHPools(
        host="127.0.0.1",
        here=SMALL,
        machines=(SSHMachine(host="127.0.0.1", bandwidth_gpu=1, devices=((5,),)),),
        port=server.port,
        key_file=str(server.directory / "id"),
        known_hosts=str(server.directory / "known_hosts"),
        **more,
    )


@pytest.mark.slow
def test_engines_of_a_machine_behind_ssh_join_over_tls(server: Server) -> None:
    with cluster(pools_of(server), 60) as address:
        assert address.startswith("tls://")
        with connect(address, 60) as client:
            client.wait_for_workers(4, timeout=60)
            assert slots(client) == {
                HardwareClass.COMPUTE_GPU: 1, HardwareClass.BANDWIDTH_GPU: 1, HardwareClass.CPU: 2,
                HardwareClass.LAMBDA: 1,
            }  # fmt: skip
            assert client.submit(visible, resources={"bandwidth_gpu": 1}, pure=False).result(timeout=60) == "5"
        (started,) = (command for command in server.commands if "dask_spec" in command)
        assert sys.executable in started and "PRIVATE KEY" not in started
        with pytest.raises((DeadlineExceeded, OSError, TypeError, ValueError)):
            Client(address.replace("tls", "tcp"), timeout=3, set_as_default=False)
    assert not list(Path("/tmp").glob("rollmill-*/key.pem"))


@pytest.mark.slow
def test_a_machine_that_is_not_known_is_refused_by_name(server: Server, tmp_path: Path) -> None:
    (tmp_path / "known_hosts").write_text("")
    with pytest.raises(MachineUnreachable, match="can not be used by SSH"), cluster(pools_of(server), 60):
        pass


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_machine_whose_python_hangs_is_named_and_nothing_stays_on_it(server: Server, tmp_path: Path) -> None:
    hangs = tmp_path / "python"
    hangs.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid; exec sleep 1000\n")
    hangs.chmod(0o700)
    with (
        pytest.raises(DeadlineExceeded, match=r"/python started no worker on 127\.0\.0\.1 within 20 s"),
        cluster(pools_of(server, python=str(hangs)), 20),  # time for the workers here
    ):
        pass
    pid, end = int((tmp_path / "pid").read_text()), monotonic() + 30
    while psutil.pid_exists(pid):
        assert monotonic() < end, "the hanging python is still there"
        sleep(0.05)


@pytest.mark.timeout(120)
def test_a_machine_that_freezes_when_the_certificate_is_brought_is_named(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.compute.certificate.ACT_S", 0.5)
    server.frozen = True
    elsewhere = Certificate(tmp_path / "certificate")
    with (
        pytest.raises(MachineUnreachable, match=r"did not answer within 0\.5 s"),
        on_machines(pools_of(server), elsewhere),
    ):
        pass


@pytest.mark.timeout(120)
def test_a_machine_that_froze_meanwhile_does_not_hold_up_the_end(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with certificate(tmp_path) as made, on_machines(pools_of(server), made):
        monkeypatch.setattr("infra.compute.certificate.ACT_S", 0.5)
        server.frozen = True
