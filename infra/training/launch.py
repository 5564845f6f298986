"""Starts the processes of a data-parallel trainer and returns the exit code of the one that failed first.

accelerate's launcher itself ends with 1 whatever its processes ended with. `--multi_gpu` is what makes it start
several processes (through torch's elastic launcher), on a CPU too: with `--cpu` accelerate 1.15 starts one.
"""

from __future__ import annotations

from collections.abc import Sequence

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def launch(processes: int, module: str, arguments: Sequence[str]) -> int:
    """Run `python -m module arguments` as `processes` ranks on this machine and wait for them."""
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
        launch_command(launch_command_parser().parse_args([*options, *exact, "-m", module, *arguments]))
    except ChildFailedError as error:
        return max(1, error.get_first_failure()[1].exitcode)
    return 0
