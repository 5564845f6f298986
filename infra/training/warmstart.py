"""Supervised warm start: the policy learns from the expert's demonstrations until it earns some reward.

Group-relative learning needs groups whose rewards differ; a model that never succeeds has none. Training stops
as soon as the sampled reward reaches `stop_at_reward`, so that most of the task is left to learn from reward.

Invariants
- Demonstrations and the problems of the look at the reward come from a problem stream of their own in the
  training split; no held-out problem is seen.
- Loss falls on the expert's turns alone (stop tokens included), on exactly the tokens that rollout would record.
- Rewards are sampled as in rollout: embedded engine, the run's temperature and limits.
- Equal configurations give equal weights on one machine (the looks at the reward are sampled with fixed seeds).
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from infra.chat import ChatCodec
from infra.engines.hf import HFEngine
from infra.engines.protocol import BASE, Sampling
from infra.training.episodes import Episode, MakeEnvironment, demonstrate, play
from infra.training.muon import MuonAdamW
from infra.training.setup import load_model, load_tokenizer
from rl.config.model import WarmstartSection
from rl.config.run import RunConfig
from rl.errors import ConfigError, DeadlineExceeded
from rl.stream import ProblemStream, derive_seed
from rl.trajectory import Problem

T = TypeVar("T")
LOOK_PROBLEMS = 128
WARMUP_STEPS = 5
IGNORED = -100
"""Label of a token without loss."""


def warm_start(
    config: RunConfig,
    make_environment: MakeEnvironment,
    model_dir: Path,
    out_dir: Path,
    progress: Callable[[dict[str, float]], None],
) -> dict[str, float]:
    """Train the model of `model_dir` and write it, with its tokenizer, to `out_dir`.

    `progress` gets {step, reward, seconds} at every look at the reward; the last of these is returned.
    Computes on as many threads as torch has. Blocks; must not be called inside an event loop. Raises
    ConfigError when a domain has no expert.
    """
    section = config.model.warmstart
    if section is None:
        raise ConfigError("model.warmstart: the section is missing; a warm start was asked for")
    codec = ChatCodec.from_directory(model_dir)
    stream = ProblemStream(derive_seed(config.seed, "warmstart"), {d.name: d.weight for d in config.domains})
    shown = [stream.problem(n) for n in range(section.demonstrations)]
    asked = [stream.problem(section.demonstrations + n) for n in range(LOOK_PROBLEMS)]
    with _Looks(config, make_environment, codec, asked, model_dir) as looks:
        demonstrations = _in_loop(_demonstrate(config, make_environment, codec, shown), config)
        model = load_model(model_dir, config.model.dtype)
        watch = _Watch(section, looks, progress)
        with tempfile.TemporaryDirectory() as scratch:
            trainer = _Trainer(
                model=model,
                args=_arguments(section, config.seed, scratch),
                train_dataset=_dataset(demonstrations, section.batch_size, section.max_steps, config.seed),
                processing_class=load_tokenizer(model_dir),
                callbacks=[watch],
                optimizers=(MuonAdamW(model, section.learning_rate), None),
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
    out_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out_dir)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (model_dir / name).is_file():
            shutil.copyfile(model_dir / name, out_dir / name)
    return watch.last


def _arguments(section: WarmstartSection, seed: int, scratch: str) -> SFTConfig:
    return SFTConfig(
        output_dir=scratch,
        seed=seed % 2**32,  # as of what trains later: no more is taken
        max_steps=section.max_steps,
        per_device_train_batch_size=section.batch_size,
        learning_rate=section.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=WARMUP_STEPS,
        max_grad_norm=1.0,
        bf16=False,
        activation_checkpointing=False,
        max_length=None,
        shuffle_dataset=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def _dataset(episodes: list[Episode], batch_size: int, steps: int, seed: int) -> Dataset:
    """Tokens and labels of all batches in order, to be read in sequence.

    A batch holds episodes of like length, so that little of it is padding. The batches are in random order:
    in order of length, as the stock sampler would have them, the policy swings between short and long tasks.
    """
    draw = random.Random(seed)
    rows: list[Episode] = []
    while len(rows) < steps * batch_size:
        shuffled = draw.sample(episodes, len(episodes) - len(episodes) % batch_size or len(episodes))
        shuffled.sort(key=lambda e: len(e.token_ids))
        batches = [shuffled[at : at + batch_size] for at in range(0, len(shuffled), batch_size)]
        draw.shuffle(batches)
        rows += [episode for batch in batches for episode in batch]
    return Dataset.from_dict(
        {
            "input_ids": [e.token_ids for e in rows],
            "labels": [
                [token if said else IGNORED for token, said in zip(e.token_ids, e.mask, strict=True)] for e in rows
            ],
        }
    )


async def _demonstrate(
    config: RunConfig, make: MakeEnvironment, codec: ChatCodec, problems: list[Problem]
) -> list[Episode]:
    episodes = []
    for problem in problems:
        domain = config.domain(problem.domain)
        try:
            episode = await demonstrate(make(domain), problem, codec, domain.max_turns, config.rollout.max_tokens)
        except NotImplementedError as error:
            raise ConfigError(f"domains.{domain.name}.environment: {error}; remove model.warmstart") from error
        episodes.append(episode)
    return episodes


class _Trainer(SFTTrainer):
    def _send_telemetry(self) -> None:
        """None of it."""


class _Watch(TrainerCallback):
    """Looks at the reward every so many steps, and ends training when it is enough."""

    def __init__(self, section: WarmstartSection, looks: _Looks, progress: Callable[[dict[str, float]], None]):
        self._section, self._looks, self._progress = section, looks, progress
        self._started = time.monotonic()
        self.last: dict[str, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> Any:
        step = state.global_step
        if step % self._section.evaluate_every and step < self._section.max_steps:
            return control
        reward = self._looks.look(model, step)
        self.last = {"step": step, "reward": reward, "seconds": time.monotonic() - self._started}
        self._progress(self.last)
        goal = self._section.stop_at_reward
        control.should_training_stop = control.should_training_stop or (goal is not None and reward >= goal)
        return control


class _Looks:
    """The embedded engine beside the trainer, with the problems on which the reward is sampled."""

    def __init__(
        self,
        config: RunConfig,
        make: MakeEnvironment,
        codec: ChatCodec,
        problems: list[Problem],
        model_dir: Path,
    ):
        self._config, self._make, self._codec, self._problems = config, make, codec, problems
        self._engine = HFEngine(
            model_dir,
            device=config.engine.device,
            dtype=config.model.dtype,
            max_batch=max(config.engine.max_batch, len(problems)),
            threads=torch.get_num_threads(),
        )

    def __enter__(self) -> _Looks:
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run(self._engine.close())

    def look(self, model: Any, step: int) -> float:
        """Mean reward of one sampled episode on each problem."""
        return _in_loop(self._sample(model, step), self._config)

    async def _sample(self, model: Any, step: int) -> float:
        with tempfile.TemporaryDirectory() as scratch:
            model.save_pretrained(scratch)
            await self._engine.update_weights(step, Path(scratch))
        rewards = await asyncio.gather(*(self._episode(problem) for problem in self._problems))
        return sum(rewards) / len(rewards)

    async def _episode(self, problem: Problem) -> float:
        rollout, domain = self._config.rollout, self._config.domain(problem.domain)

        async def turn(ids: list[int]) -> list[int] | None:
            sampling = Sampling(
                rollout.temperature,
                min(rollout.max_new_tokens, rollout.max_tokens - len(ids)),
                self._codec.stop_token_ids,
                seed=derive_seed(problem.seed, len(ids)),
            )
            result = await self._engine.generate(ids, sampling, BASE, f"{problem.ordinal}-{len(ids)}")
            return result.token_ids if result.finish_reason == "stop" else None

        episode = await play(self._make(domain), problem, self._codec, turn, domain.max_turns, rollout.max_tokens)
        return episode.reward


def _in_loop(work: Coroutine[Any, Any, T], config: RunConfig) -> T:
    """Run to the end within the deadline of a batch."""

    async def bounded() -> T:
        deadline = config.deadlines.batch
        try:
            async with asyncio.timeout(deadline):
                return await work
        except TimeoutError as error:
            raise DeadlineExceeded(f"episodes of the warm start did not end within {deadline:.0f} s") from error

    return asyncio.run(bounded())
