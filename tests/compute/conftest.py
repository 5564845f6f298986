"""A tagged cluster in this process: quick to start, the same scheduler and worker code."""

from collections.abc import Iterator

import pytest
from distributed import Client, Scheduler, SpecCluster, Worker


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    def worker(**resources: int) -> dict:
        return {
            "cls": Worker,
            "options": {"nthreads": sum(resources.values()), "resources": resources, "dashboard": False},
        }

    spec = SpecCluster(
        workers={"cpu": worker(cpu=16), "lambda": worker(**{"lambda": 4})},
        scheduler={"cls": Scheduler, "options": {"protocol": "inproc", "port": 0, "dashboard": False}},
    )
    with spec, Client(spec, set_as_default=False) as connected:
        yield connected
