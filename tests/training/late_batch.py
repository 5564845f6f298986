"""One of two ranks for test_ranks: rank 0 waits for its batch for far longer than a follower waits for a message."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from infra.training import loop, ranks
from infra.training.batches import Batch
from tests.training.small import make_config, make_group

TIMEOUT_S, WAIT_S = 2.0, 6.0


def main(meeting: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    dist.barrier()  # processes may start at different times; from here on they are in step
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S), dist.group.WORLD)
    loop.BEAT_S = TIMEOUT_S / 4

    def next_batch() -> Batch:
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            feed.pause(0.1)
        return Batch(6, 7, [make_group(0, 2)], ["a"], [], [0])

    leader: Any = SimpleNamespace(next_batch=next_batch, begin=lambda: None, finish=lambda: None)
    feed = loop.Feed(make_config(), leader if rank == 0 else None)
    window = feed.next_window()
    assert (window.version, len(window.rows)) == (7, 2) and ranks.world() == 2
    feed.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
