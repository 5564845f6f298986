"""The trainer's process: `python -m infra.training.main CONFIG.json --proxy-url URL`.

    fence -> build on base/ -> version 0, if there is none -> restore the newest full checkpoint -> replay -> steps

With `training.processes` above 1 it launches that many of itself (or is launched so by `accelerate launch`). Rank
0 alone talks to the store and the proxy, and fills the work directory, which all ranks read (so they share a
machine or a file system).

Invariants: exit code 0 done, 3 fenced by another trainer (memory is discarded), 4 a named error (one line on
stderr); whatever the moment of its death, the next trainer goes on from the log.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from infra.compute.lifeline import die_with_parent, last_words
from infra.compute.scratch import scratch
from infra.proxy.secret import control_key
from infra.store.directories import pull_directory
from infra.store.objects import ObjectStore
from infra.store.weights import WeightStore
from infra.training import grpo, ranks, setup, state
from infra.training.adapters import policy_of
from infra.training.launch import launch
from infra.training.loop import Feed, Stopped, exit_code
from infra.training.publish import Checkpoints
from infra.training.snapshot import Snapshots
from infra.training.takeover import Takeover
from rl.config.run import RunConfig
from rl.errors import ConfigError, RollmillError

SLACK_S = 600.0
"""What a follower waits beyond the deadlines of rank 0: training the slowest window."""


@dataclass(frozen=True)
class Plan:
    """What rank 0 found in the store, for all ranks."""

    work_dir: str
    base: str
    restore: str | None
    """Directory of the newest full checkpoint; None when version 0 is yet to be made."""
    version: int
    steps: int
    """Optimizer steps to make, replayed ones included."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m infra.training.main", description=__doc__.splitlines()[0]
    )
    parser.add_argument("config", type=Path, help="resolved configuration of the run, as JSON")
    parser.add_argument("--proxy-url", required=True, help="base URL of the LLM proxy")
    arguments = parser.parse_args(argv)
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        config = setup.read_config(RunConfig, arguments.config)
        if config.training.processes > 1 and "WORLD_SIZE" not in os.environ:
            given = [str(arguments.config), "--proxy-url", arguments.proxy_url]
            return launch(config.training.processes, "infra.training.main", given)
        train(config, arguments.proxy_url, arguments.config.resolve().parent)
    except Stopped as stopped:
        return stopped.code
    except RollmillError as error:
        last_words(f"trainer: {type(error).__name__}", error)
        return exit_code(error)
    return 0


def train(config: RunConfig, proxy_url: str, directory: Path) -> None:
    """Join the run and train it to its last version, with files below `directory`. Raises a RollmillError, or
    Stopped on a follower."""
    waits = config.deadlines
    timeout_s = waits.batch + 2 * waits.control + waits.start + 2 * waits.publish + SLACK_S
    _join(config, timeout_s)
    setup.prepare_process(config.training.threads)
    with ExitStack() as stack:
        taken: Takeover | None = None
        found = None
        if ranks.rank() == 0:
            work_dir = stack.enter_context(scratch(directory, "trainer"))
            taken = Takeover(config, ObjectStore.connect(config.store), work_dir / "cache")
            found = json.dumps(asdict(_plan(taken, work_dir))).encode()
        plan = Plan(**json.loads(ranks.broadcast(found, _device())))
        _run(config, proxy_url, plan, taken, timeout_s, stack)
    if ranks.world() > 1:
        dist.destroy_process_group()


def _join(config: RunConfig, timeout_s: float) -> None:
    """The process group, where there is one."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != config.training.processes:
        raise ConfigError(
            f"training.processes is {config.training.processes}, but {world} trainer processes run; launch as "
            f"many, or run `python -m infra.training.main` alone, which launches them"
        )
    if world > 1:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def _plan(taken: Takeover, work_dir: Path) -> Plan:
    base = pull_directory(taken.store, taken.config.base_prefix, None, work_dir / "cache")
    restore = taken.restore()
    return Plan(
        str(work_dir), str(base), None if restore is None else str(restore), taken.version or 0, taken.steps
    )


def _run(
    config: RunConfig, proxy_url: str, plan: Plan, taken: Takeover | None, timeout_s: float, stack: ExitStack
) -> None:
    base, work_dir = Path(plan.base), Path(plan.work_dir)
    restored = Path(plan.restore) if plan.restore is not None else None
    feed = Feed(config, None, _device())
    trainer: grpo.Trainer = grpo.Trainer(
        config,
        policy_of(setup.load_model(base, config.model.dtype), config),
        setup.load_tokenizer(base),
        grpo.arguments(config, max(1, plan.steps), work_dir / "trl", timeout_s),
        feed,
        None
        if restored is None
        else lambda optimizer, scheduler: state.load_trainer(
            restored / "trainer", plan.version, trainer.model, optimizer, scheduler
        ),
    )
    feed.trainer = trainer
    if restored is not None:
        state.load_weights(trainer.model, restored / "model")
    if taken is not None:
        weights = stack.enter_context(closing(WeightStore.open(config.weights, taken.store, lend=True)))
        checkpoints = Checkpoints(config, weights, base, work_dir)
        if restored is None:
            taken.initialise(checkpoints, Snapshots().take(0, trainer.model), trainer.model)
        if plan.steps == 0:
            return
        feed.leader = taken.appoint(checkpoints, proxy_url, control_key(), stack, feed.pause)
    elif plan.steps == 0:
        return
    trainer.train()
    feed.close()


def _device() -> torch.device:
    """Where collectives run."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


if __name__ == "__main__":
    # an orderly end: engines are resumed, files removed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
