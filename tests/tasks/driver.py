"""The driver of a run that installs it, parks one environment, says so and then does nothing until it is killed.

python -m tests.tasks.driver SCHEDULER SEED CACHE
"""

import signal
import sys
from pathlib import Path

from distributed import Client

from infra.compute.signals import wanted
from rl.config.load import validate
from rl.trajectory import Problem, Uid
from tasks.reset import reset
from tasks.runtime import install

TREE = {
    "name": "killed",
    "model": {"source": {"type": "pretrained", "path": "unused"}},
    "domains": [{"name": "d", "environment": "tests.tasks.bad_environments:Good", "warm": 1}],
}


def main(scheduler: str, seed: int, cache: Path) -> None:
    with Client(scheduler, set_as_default=False) as client:
        key = install(client, validate(TREE, "test"), "http://127.0.0.1:9", cache)
        with wanted(client, key):
            problem = Problem(0, "d", 0, seed)
            client.submit(reset, key, Uid(0, 0), 0, 0, problem, 0, resources={"cpu": 1}).result(timeout=60)
            print("parked", flush=True)
            signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
