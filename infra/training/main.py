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
import socket
import sys
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from infra.compute.lifeline import die_with_parent, last_words
from infra.compute.scratch import scratch
from infra.proxy.client import ControlClient
from infra.proxy.secret import control_key
from infra.store.buffer import SampleBuffer
from infra.store.directories import pull_directory
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from infra.store.weights import WeightStore
from infra.tracking.run import Tracker
from infra.training import grpo, ranks, setup, state
from infra.training.adapters import policy_of
from infra.training.launch import launch
from infra.training.loop import Feed, Leader, Stopped, exit_code
from infra.training.publish import Checkpoints, Publisher
from infra.training.snapshot import Snapshots
from infra.training.swap import Engines
from rl.config.load import loads
from rl.config.run import RunConfig
from rl.errors import ConfigError, RollmillError
from rl.protocol import StepProtocol
from rl.records import Step

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
        config = _read(arguments.config)
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


def _read(path: Path) -> RunConfig:
    try:
        return loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: can not be read: {error}") from error


def train(config: RunConfig, proxy_url: str, directory: Path) -> None:
    """Join the run and train it to its last version, with files below `directory`. Raises a RollmillError, or
    Stopped on a follower."""
    waits = config.deadlines
    timeout_s = waits.batch + 2 * waits.control + waits.start + 2 * waits.publish + SLACK_S
    _join(config, timeout_s)
    setup.prepare_process(config.training.threads)
    with ExitStack() as stack:
        lead: Lead | None = None
        if ranks.rank() == 0:
            lead = Lead(config, stack.enter_context(scratch(directory, "trainer")))
        plan = Plan(
            **json.loads(ranks.broadcast(json.dumps(asdict(lead.plan)).encode() if lead else None, _device()))
        )
        _run(config, proxy_url, plan, lead, timeout_s, stack)
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


class Lead:
    """What rank 0 does before the trainer exists: take the run over and fetch what to build on."""

    def __init__(self, config: RunConfig, work_dir: Path) -> None:
        self.config, self.work_dir = config, work_dir
        store = ObjectStore.connect(config.store)
        self.commits = CommitLog(store, config.prefix, f"trainer-{socket.gethostname()}-{os.getpid()}")
        self.buffer = SampleBuffer(store, config.prefix)
        self.replay: list[Step] = []
        self.plan = self._plan(store)

    def _plan(self, store: ObjectStore) -> Plan:
        self.commits.fence()
        ledger, cache = self.commits.ledger, self.work_dir / "cache"
        base = pull_directory(store, self.config.base_prefix, None, cache)
        version, restore = ledger.newest_full, None
        if version is not None:
            ref = ledger.states[version]
            restore = str(pull_directory(store, self.config.prefix + ref.prefix, ref.manifest_sha256, cache))
            self.replay = self.commits.steps_after(version)
        fresh = max(0, self.config.training.steps + 1 - max(1, ledger.next_version))
        return Plan(str(self.work_dir), str(base), restore, version or 0, len(self.replay) + fresh)


def _run(
    config: RunConfig, proxy_url: str, plan: Plan, lead: Lead | None, timeout_s: float, stack: ExitStack
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
    if lead is not None:
        weights = stack.enter_context(closing(WeightStore.open(config.weights, lead.commits.store, lend=True)))
        checkpoints = Checkpoints(config, weights, base, work_dir)
        if restored is None:
            initialise(config, lead.commits, checkpoints, trainer)
        if plan.steps == 0:
            return
        control = ControlClient(
            proxy_url, deadline_s=config.deadlines.control, fence=lead.commits.ledger.fence, key=control_key()
        )
        tracker = Tracker.start(config, "trainer")
        stack.callback(tracker.close, config.deadlines.control)
        engines = Engines(control, config.deadlines.control, config.deadlines.start)
        protocol = StepProtocol(config.staleness.alpha, config.mode.eager)
        publisher = Publisher(config, lead.commits, checkpoints, engines, tracker, protocol)
        stack.enter_context(closing(publisher))
        feed.leader = Leader(config, lead.commits, lead.buffer, publisher, lead.replay)
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


def initialise(
    config: RunConfig, commits: CommitLog, checkpoints: Checkpoints, trainer: grpo.Trainer
) -> None:
    """Commit version 0: the base, or a zero adapter on it (TRL seeds PEFT's initialisation with the run's seed)."""
    snapshot = Snapshots().take(0, trainer.model)
    ref = checkpoints.push(snapshot, trainer.model, commits.state_prefix())
    commits.append_step(state=ref, weights_sha256=snapshot.sha256, alpha=config.policy.alpha)
    logging.getLogger(__name__).info("version 0 committed")


if __name__ == "__main__":
    # an orderly end: engines are resumed, files removed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
