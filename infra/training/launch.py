"""Starts the processes of a data-parallel trainer and returns the exit code of the one that failed first.

accelerate's launcher itself ends with 1 whatever its processes ended with. `--multi_gpu` is what makes it start
several processes (through torch's elastic launcher), on a CPU too: with `--cpu` accelerate 1.15 starts one.

Invariant: no rank outlives the launcher, whatever kills it. The elastic launcher gives each rank a session of its
own, so a signal to the launcher's does not reach them: each holds a lifeline (`infra.compute.lifeline`) instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from infra.compute.lifeline import LIFELINE


def launch(processes: int, module: str, arguments: Sequence[str]) -> int:
    """Run `python -m module arguments` as `processes` ranks on this machine and wait for them. The module calls
    `die_with_parent`."""
    options = [
        "--multi_gpu",
        "--num_processes",
        str(processes),
        "--num_machines",
        "1",
        "--main_process_port",
        "0",
    ]
    exact = ["--mixed_precision", "no", "--dynamo_backend", "no"]
    try:
        with _lifeline():
            launch_command(launch_command_parser().parse_args([*options, *exact, "-m", module, *arguments]))
    except ChildFailedError as error:
        return max(1, error.get_first_failure()[1].exitcode)
    return 0


@contextmanager
def _lifeline() -> Iterator[None]:
    """What is started inside inherits, as its stdin, a pipe that ends with this process or with the block."""
    before = os.dup(0)
    read, write = os.pipe()  # neither is inherited: only the copy on 0 is
    os.dup2(read, 0)
    os.close(read)
    os.environ[LIFELINE] = "1"
    try:
        yield
    finally:
        del os.environ[LIFELINE]
        os.close(write)
        os.dup2(before, 0)
        os.close(before)
