"""What starts or ends on machines and does not come to an end: it is named within its deadline, and nothing stays."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from time import monotonic, sleep

import dask
import psutil
import pytest
from distributed import Client
from distributed.deploy.spec import ProcessInterface

from infra.compute.certificate import certificate
from infra.compute.pools import _started, connect
from infra.compute.workers import Workers, local_workers, slurm_workers
from rl.config.infrastructure import LOOPBACK, LocalPools
from rl.config.pools import SlurmPools
from rl.errors import DeadlineExceeded

pytestmark = pytest.mark.timeout(120)


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o700)
    return path


def until_gone(pid: int) -> None:
    end = monotonic() + 30
    while psutil.pid_exists(pid):
        assert monotonic() < end, f"process {pid} is still there"
        sleep(0.05)


def one(pools: LocalPools, start_s: float, name: str) -> Workers:
    return {name: local_workers(pools, start_s)[name]}


@pytest.mark.slow
def test_a_worker_here_that_never_registers_is_named_and_ended(tmp_path: Path) -> None:
    hangs = tmp_path / "hangs.py"
    hangs.write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(1000)\n"
    )
    with (
        dask.config.set({"distributed.worker.preload": [str(hangs)]}),
        pytest.raises(DeadlineExceeded, match=r"worker 'cpu' of this machine did not register within 8 s .*start"),
        _started(one(LocalPools(cpu=1), 8, "cpu"), LOOPBACK, None, 60),
    ):
        pass
    until_gone(int((tmp_path / "pid").read_text()))


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which its commands are looked for."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "bin"


def test_a_submission_that_hangs_is_named_and_ended(slurm: Path, tmp_path: Path) -> None:
    script(slurm / "sbatch", f"#!/bin/sh\necho $$ > {tmp_path}/pid; exec sleep 1000\n")
    pools = SlurmPools(host=LOOPBACK, jobs=1, shared=str(tmp_path / "shared"))
    with (
        certificate(tmp_path / "shared") as made,
        pytest.raises(DeadlineExceeded, match=r"`sbatch` did not submit slurm-0 within 2 s \(deadlines\.start\)"),
        _started(slurm_workers(pools, made.security, 2), LOOPBACK, made.security, 60),
    ):
        pass
    until_gone(int((tmp_path / "pid").read_text()))


def test_a_cancelling_that_hangs_is_told_and_does_not_hide_how_the_run_ended(
    slurm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script(slurm / "sbatch", "#!/bin/sh\necho Submitted batch job 7\n")
    script(slurm / "scancel", f"#!/bin/sh\necho $$ > {tmp_path}/pid; exec sleep 1000\n")
    pools = SlurmPools(host=LOOPBACK, jobs=1, shared=str(tmp_path / "shared"))
    with (
        certificate(tmp_path / "shared") as made,
        pytest.raises(RuntimeError, match="the run's own"),
        _started(slurm_workers(pools, made.security, 2), LOOPBACK, made.security, 60),
    ):
        raise RuntimeError("the run's own")
    assert "`scancel 7` did not end within 2 s (deadlines.start)" in caplog.text
    until_gone(int((tmp_path / "pid").read_text()))


class Endless(ProcessInterface):
    """A worker that can not be closed."""

    async def close(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_cluster_that_closes_late_is_told_and_does_not_hide_how_the_run_ended(
    ends_well: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> str:
        with _started({"endless": {"cls": Endless}}, LOOPBACK, None, 1):
            if not ends_well:
                raise RuntimeError("the run's own")
            return "done"

    if ends_well:
        assert run() == "done"
    else:
        with pytest.raises(RuntimeError, match="the run's own"):
            run()
    assert "the Dask cluster did not close within 1 s (deadlines.start)" in caplog.text


def test_a_connection_that_closes_late_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed = []

    def late(client: Client, timeout: float) -> None:
        closed.append(client)
        raise TimeoutError

    with _started({}, LOOPBACK, None, 60) as address:
        with monkeypatch.context() as patched:
            patched.setattr(Client, "close", late)
            with connect(address, 30):
                pass
        closed[0].close()
    (record,) = (r for r in caplog.records if r.name == "infra.compute.pools")
    assert f"the connection to the Dask scheduler at {address} did not close" in record.message
