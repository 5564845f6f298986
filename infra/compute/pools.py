"""The resource plane: Dask workers tagged with hardware classes.

Invariants
- Every stage runs on a worker that carries its class as a Dask resource; nothing runs untagged.
- What no worker can run is refused before the run starts (`preflight`), because Dask itself would wait for ever.
- Plain tcp only on loopback: tasks travel pickled, so a cluster that is reached over a network is TLS.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from urllib.parse import urlsplit

import dask
from distributed import Client, Nanny, Scheduler, SpecCluster

from rl.config.infrastructure import LocalPools, SchedulerPools
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


@contextmanager
def cluster(pools: LocalPools | SchedulerPools, start_s: float) -> Iterator[str]:
    """The scheduler address of these pools; a local cluster is started for the duration."""
    if isinstance(pools, SchedulerPools):
        check_address(pools.address)
        yield pools.address
        return
    logging.getLogger("distributed").setLevel(logging.ERROR)  # its INFO is one line per connection
    with dask.config.set(SETTINGS):
        try:
            local = SpecCluster(
                workers=_local_workers(pools),
                scheduler={
                    "cls": Scheduler,
                    "options": {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0"},
                },
                silence_logs=logging.ERROR,
            )
        except TimeoutError as error:
            raise DeadlineExceeded(f"pools: the local Dask cluster did not start within {start_s:.0f} s") from error
        try:
            yield local.scheduler_address
        finally:
            local.close(timeout=start_s)


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
            client.close(timeout=start_s)


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


def _local_workers(pools: LocalPools) -> dict[str, dict]:
    """One process per hardware class: a class is a kind of machine, and its stages share that process."""
    amounts = {
        HardwareClass.COMPUTE_GPU: pools.compute_gpu,
        HardwareClass.BANDWIDTH_GPU: pools.bandwidth_gpu,
        HardwareClass.CPU: pools.cpu,
        HardwareClass.LAMBDA: pools.lambda_,
    }
    return {
        name.value: {
            "cls": Nanny,
            "options": {
                "host": "127.0.0.1",
                "nthreads": amount,
                "resources": {name.value: amount},
                "memory_limit": 0,
                "dashboard": False,
                # A failed stage is told by name where it is watched; Dask would print its traceback here as well.
                "silence_logs": logging.CRITICAL,
                "env": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            },
        }
        for name, amount in amounts.items()
        if amount
    }
