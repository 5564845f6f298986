"""The synchronous baseline: TRL's own GRPOTrainer, which plays a batch of episodes, trains on it, plays again.

    python -m benchmarks.synchronous_trl CONFIG.json MODEL_DIR OUT_DIR --every N

Same environments (with what is injected), problems, limits, loss and optimizer as the run of CONFIG; generation is
transformers' `generate`, as TRL generates without vLLM. All episodes of a batch take each turn together, as in TRL's
own loop over tools; within a turn their environments step at once. `OUT_DIR/v{n}/` gets every n-th version, and
`OUT_DIR/times.json` how long training took until then, saving left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback
from trl import GRPOTrainer

from envs.injection import Injected
from envs.protocol import Environment
from envs.registry import make_environment
from infra.chat import ChatCodec
from infra.training import grpo, setup
from rl.config.load import loads
from rl.config.run import RunConfig
from rl.errors import InjectedFailure
from rl.stream import derive_seed
from rl.trajectory import Problem

TRIES = 5
"""Of an episode whose failure was injected."""


@dataclass
class Episode:
    problem: Problem
    environment: Environment
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    prompt_length: int = 0
    reward: float = 0.0
    done: bool = False

    def add(self, ids: Sequence[int], sampled: bool) -> None:
        self.ids += ids
        self.mask += [int(sampled)] * len(ids)


class Players:
    """Plays batches of episodes turn by turn, with one model."""

    def __init__(self, config: RunConfig, codec: ChatCodec, injected: bool):
        self._config, self._codec, self._injected = config, codec, injected

    def play(self, model: PreTrainedModel, problems: Sequence[Problem], temperature: float) -> list[Episode]:
        return asyncio.run(self._play(model, problems, temperature))

    async def _play(self, model: PreTrainedModel, problems: Sequence[Problem], temperature: float) -> list[Episode]:
        episodes = list(await asyncio.gather(*(self._reset(p, k) for k, p in enumerate(problems))))
        for _ in range(max(self._config.domain(p.domain).max_turns for p in problems)):
            playing = [e for e in episodes if not e.done]
            if not playing:
                break
            turns = self._generate(model, [e.ids for e in playing], temperature)
            await asyncio.gather(*(self._step(e, turn) for e, turn in zip(playing, turns, strict=True)))
        await asyncio.gather(*(e.environment.close() for e in episodes))
        return episodes

    async def _reset(self, problem: Problem, member: int) -> Episode:
        domain = self._config.domain(problem.domain)
        for tried in range(TRIES):
            environment = make_environment(domain)
            if self._injected and domain.injection is not None:
                environment = Injected(environment, domain.injection, derive_seed(problem.seed, member, tried))
            try:
                episode = Episode(problem, environment)
                episode.add(self._codec.open(await environment.reset(problem), environment.tools), False)
                episode.prompt_length = len(episode.ids)
                return episode
            except InjectedFailure:
                await environment.close()
        raise InjectedFailure(f"{problem} could not be started in {TRIES} tries")

    async def _step(self, episode: Episode, sampled: list[int]) -> None:
        limit, stops = self._config.rollout.max_tokens, self._codec.stop_token_ids
        episode.add(sampled, True)
        if sampled[-1] not in stops:
            episode.done = True
            return
        answer = await episode.environment.step(self._codec.decode(sampled))
        episode.reward += answer.reward or 0.0
        observed = self._codec.reply(answer.observation)
        room = limit - len(episode.ids) - len(observed)
        if answer.terminated or answer.truncated or room < 1:
            episode.done = True
        else:
            episode.add(observed, False)

    @torch.no_grad()
    def _generate(self, model: PreTrainedModel, histories: list[list[int]], temperature: float) -> list[list[int]]:
        width, stops = max(map(len, histories)), self._codec.stop_token_ids
        ids = torch.tensor([[stops[0]] * (width - len(h)) + h for h in histories], device=model.device)
        attention = torch.tensor([[0] * (width - len(h)) + [1] * len(h) for h in histories], device=model.device)
        made = model.generate(
            input_ids=ids,
            attention_mask=attention,
            max_new_tokens=self._config.rollout.max_new_tokens,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            eos_token_id=list(stops),
            pad_token_id=stops[0],
        )
        return [_until(row, stops) for row in made[:, width:].tolist()]


def _until(row: list[int], stops: Sequence[int]) -> list[int]:
    """The sampled tokens up to the first that stops."""
    for at, token in enumerate(row):
        if token in stops:
            return row[: at + 1]
    return row


class Saver(TrainerCallback):
    """Keeps every n-th version, with the time until then."""

    def __init__(self, out: Path, every: int):
        self._out, self._every = out, every
        self._begun = time.perf_counter()
        self.seconds: dict[int, float] = {}

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % self._every == 0:
            now = time.perf_counter()
            self.seconds[state.global_step] = now - self._begun
            model.save_pretrained(self._out / f"v{state.global_step}")
            self._begun += time.perf_counter() - now


class Plain(GRPOTrainer):
    def _send_telemetry(self) -> None:
        """None of it."""


def train(config: RunConfig, directory: Path, out: Path, every: int) -> None:
    setup.prepare_process(config.training.threads)
    t, codec = config.training, ChatCodec.from_directory(directory)
    players, stream = Players(config, codec, injected=True), config.stream

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.eval()
        episodes = players.play(model, [stream.problem(int(p)) for p in prompts], config.rollout.temperature)
        model.train()
        return {
            "prompt_ids": [e.ids[: e.prompt_length] for e in episodes],
            "completion_ids": [e.ids[e.prompt_length :] for e in episodes],
            "logprobs": None,
            "env_mask": [e.mask[e.prompt_length :] for e in episodes],
            "outcome": [e.reward for e in episodes],
        }

    def outcome(outcome: list[float], **_: Any) -> list[float]:
        return outcome

    arguments = grpo.arguments(config, t.steps, out / "trl", config.deadlines.batch)
    arguments.per_device_train_batch_size = arguments.generation_batch_size = t.groups_per_step * t.group_size
    arguments.shuffle_dataset = False
    trainer = Plain(
        model=setup.load_model(directory, config.model.dtype),
        processing_class=setup.load_tokenizer(directory),
        reward_funcs=outcome,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [str(n) for n in range(t.steps * t.groups_per_step)]}),
        rollout_func=rollout,
    )
    trainer.remove_callback(PrinterCallback)
    saver = Saver(out, every)
    trainer.add_callback(saver)
    trainer.train()
    (out / "times.json").write_text(json.dumps(saver.seconds))


def held_out(config: RunConfig, tokenizer: Path, directory: Path, problems: int) -> float:
    """Mean reward of a model directory on the first held-out problems, with a fixed seed and nothing injected."""
    setup.seed_step(config.seed, 0, 0)
    model = setup.load_model(directory, config.model.dtype).eval()
    players = Players(config, ChatCodec.from_directory(tokenizer), injected=False)
    asked = [p for d in config.domains for p in config.stream.held_out(d.name, problems)]
    episodes = players.play(model, asked, config.evaluation.temperature)
    return sum(e.reward for e in episodes) / len(episodes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--every", type=int, default=2)
    given = parser.parse_args()
    train(loads(given.config.read_text()), given.model, given.out, given.every)
