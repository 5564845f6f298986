"""The resource plane: Dask workers tagged with hardware classes.

Invariants
- Every stage runs on a worker that carries its class as a Dask resource; nothing runs untagged.
- What no worker can run is refused before the run starts (`preflight`), because Dask itself would wait for ever.
- Plain tcp only on loopback: tasks travel pickled, so a cluster that is reached over a network is TLS.
- What is late at its end is told, and left: it never hides how the run ended.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic, sleep
from urllib.parse import urlsplit

import dask
from distributed import Client, Scheduler, SpecCluster
from distributed.security import Security

from infra.compute.certificate import certificate, on_machines
from infra.compute.kubernetes import engine_pods
from infra.compute.workers import Workers, local_workers, slurm_workers, ssh_workers
from rl.config.infrastructure import LocalPools, SchedulerPools
from rl.config.pools import KubernetesPools, Pools, SlurmPools, SSHPools
from rl.errors import ConfigError, DeadlineExceeded
from rl.placement import HardwareClass

SETTINGS = {
    "distributed.scheduler.allowed-failures": 3,
    # stages are pinned by class, and an environment lives where it was reset
    "distributed.scheduler.work-stealing": False,
    # hundreds of slots are hundreds of threads: without this each brings a heap of its own
    "distributed.nanny.pre-spawn-environ.MALLOC_ARENA_MAX": 2,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.limit": "30s",
    "distributed.comm.retry.count": 2,
}

logger = logging.getLogger(__name__)


@contextmanager
def cluster(pools: Pools, start_s: float) -> Iterator[str]:
    """The scheduler address of these pools; a cluster that is not there yet is started for the duration. Raises
    ConfigError, MachineUnreachable, KubernetesRefused, DeadlineExceeded."""
    if isinstance(pools, SchedulerPools):
        check_address(pools.address)
        yield pools.address
        return
    logging.getLogger("distributed").setLevel(logging.ERROR)  # its INFO is one line per connection
    with ExitStack() as stack:
        stack.enter_context(dask.config.set(SETTINGS))
        if isinstance(pools, LocalPools):
            workers, security = local_workers(pools, start_s), None
        else:
            made = stack.enter_context(certificate(Path(pools.shared) if isinstance(pools, SlurmPools) else None))
            security = made.security
            workers = local_workers(pools.here, start_s, pools.host, security)
            if isinstance(pools, SSHPools):
                workers |= ssh_workers(pools, start_s)
                stack.enter_context(on_machines(pools, made))
            elif isinstance(pools, SlurmPools):
                workers |= slurm_workers(pools, security, start_s)
        address = stack.enter_context(_started(workers, pools.host, security, start_s))
        if isinstance(pools, KubernetesPools):
            stack.enter_context(engine_pods(pools, made, address))
        yield address


@contextmanager
def _started(workers: Workers, host: str, security: Security | None, start_s: float) -> Iterator[str]:
    """The address of a scheduler in this process, with these workers."""
    options = {"host": host, "port": 0, "dashboard_address": "127.0.0.1:0"}
    secure = {} if security is None else {"security": security, "protocol": "tls://"}
    scheduler = {"cls": Scheduler, "options": options | secure}
    try:
        cluster = SpecCluster(workers=workers, scheduler=scheduler, security=security, silence_logs=logging.ERROR)
    except TimeoutError as error:
        raise DeadlineExceeded(f"pools: the Dask cluster did not start within {start_s:.0f} s") from error
    try:
        yield cluster.scheduler_address
    finally:
        _end("the Dask cluster", cluster.close, start_s)


@contextmanager
def connect(address: str, start_s: float) -> Iterator[Client]:
    """A client of a running scheduler. Raises DeadlineExceeded when it does not answer."""
    check_address(address)
    with dask.config.set(SETTINGS):
        try:
            client = Client(address, timeout=start_s, set_as_default=False)
        except OSError as error:
            raise DeadlineExceeded(
                f"pools.address: no Dask scheduler answers at {address} within {start_s:.0f} s; is it running?"
            ) from error
        try:
            yield client
        finally:
            _end(f"the connection to the Dask scheduler at {address}", client.close, start_s)


def _end(what: str, close: Callable[..., object], within_s: float) -> None:
    try:
        close(timeout=within_s)
    except TimeoutError:
        logger.error(  # Dask silences what is less
            "pools: %s did not close within %g s (deadlines.start); what is left of it ends with this process, workers "
            "on other machines without their scheduler",
            what,
            within_s,
        )


def slots(client: Client) -> dict[HardwareClass, float]:
    """Slots of each hardware class over all workers."""
    known = {c.value for c in HardwareClass}
    total: Counter[HardwareClass] = Counter()
    for worker in client.scheduler_info(n_workers=-1)["workers"].values():
        for name, amount in worker["resources"].items():
            if name in known:
                total[HardwareClass(name)] += amount
    return dict(total)


def wait_for_slots(client: Client, classes: set[HardwareClass], deadline_s: float) -> dict[HardwareClass, float]:
    """Wait until every class has a worker. Raises DeadlineExceeded naming the missing ones."""
    end = monotonic() + deadline_s
    while missing := classes - set(found := slots(client)):
        if monotonic() > end:
            raise DeadlineExceeded(
                f"pools: no worker carries {', '.join(sorted(missing))} after {deadline_s:.0f} s (there are: "
                f"{dict(found)}); start workers with --resources, such as --resources 'cpu=64'"
            )
        sleep(0.1)
    return found


def check_address(address: str) -> None:
    """Raise ConfigError for plain tcp to another machine."""
    parts = urlsplit(address)
    if parts.scheme == "tls" or parts.scheme == "inproc":
        return
    try:
        loopback = all(
            ipaddress.ip_address(info[4][0]).is_loopback for info in socket.getaddrinfo(parts.hostname, None)
        )
    except OSError as error:
        raise ConfigError(f"pools.address: {address!r} can not be resolved: {error}") from error
    if not loopback:
        raise ConfigError(
            f"pools.address: {address!r} is plain tcp to another machine; use tls:// with Dask's TLS settings"
        )
