"""A tiny random model and hand-made groups for the tests of the trainer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from infra.training import grpo, setup, state, window
from infra.training.adapters import policy_of
from infra.training.snapshot import trained, weights_sha256
from rl.advantages.registry import advantage_function
from rl.config.run import RunConfig
from rl.trajectory import NO_VERSION, Group, Message, Problem, Status, Trajectory, Uid

WORDS = ["<pad>", "<eos>", *(f"w{i}" for i in range(46))]


def make_base(directory: Path, seed: int = 0, hidden: int = 32, layers: int = 2) -> Path:
    """A run's `base/`: Qwen3 with random weights, tokenizer, chat template."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():  # sharper than the 0.02 of a fresh model, so that log-probs differ
        model.model.embed_tokens.weight.mul_(8)
    model.save_pretrained(directory)
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    return directory


def make_config(**changes: Any) -> RunConfig:
    """A configuration; keyword arguments replace whole sections by dictionaries merged over small defaults."""
    tree: dict[str, Any] = {
        "name": "test",
        "domains": [{"name": "lake", "environment": "envs.frozen_lake:FrozenLake"}],
        "model": {"source": {"type": "pretrained", "path": "unused"}},
        "rollout": {"max_new_tokens": 8, "max_tokens": 64},
        "training": {
            "steps": 4,
            "groups_per_step": 3,
            "group_size": 4,
            "learning_rate": 1e-2,
            "micro_batch_size": 4,
        },
        "tracking": {"enabled": False},
    }
    for key, value in changes.items():
        tree[key] = {**tree.get(key, {}), **value} if isinstance(value, dict) else value
    return RunConfig.model_validate(tree)


@torch.no_grad()
def behaviour(model: PreTrainedModel, ids: list[int], temperature: float = 1.0) -> list[float]:
    """Log-prob of every token given those before it, after temperature, by a plain forward pass."""
    logits = model(torch.tensor([ids])).logits[0, :-1].float() / temperature
    picked = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return [0.0, *picked.tolist()]


def make_group(
    ordinal: int,
    size: int,
    *,
    model: PreTrainedModel | None = None,
    temperature: float = 1.0,
    version: int = 0,
    attempt: int = 0,
    rewards: Callable[[int, random.Random], float] | None = None,
    seed: int = 0,
) -> Group:
    """Two turns with an environment's answer between them. With `model` the log-probs are its own."""
    draw = random.Random(f"{seed}/{ordinal}/{attempt}")
    problem = Problem(ordinal, "lake", ordinal, ordinal)
    prompt = [draw.randrange(2, 48) for _ in range(draw.randint(3, 9))]
    members = []
    for k in range(size):
        ids, mask = list(prompt), [0] * len(prompt)
        for turn in range(2):
            n = draw.randint(1, 8)
            ids += [draw.randrange(2, 48) for _ in range(n)]
            mask += [1] * n
            if turn == 0:
                ids += [draw.randrange(2, 48) for _ in range(3)]
                mask += [0] * 3
        logs = behaviour(model, ids, temperature) if model is not None else [-draw.uniform(2, 5) for _ in ids]
        members.append(
            Trajectory(
                uid=Uid(ordinal, attempt),
                member=k,
                problem=problem,
                start_version=version,
                prompt_length=len(prompt),
                token_ids=ids,
                loss_mask=mask,
                # what the store keeps is single precision
                logprobs=torch.tensor([lp if m else 0.0 for lp, m in zip(logs, mask, strict=True)]).tolist(),
                versions=[version if m else NO_VERSION for m in mask],
                messages=[Message("user", "go")],
                status=Status.TERMINATED,
                turns=2,
                rewards={
                    "outcome": rewards(k, draw)
                    if rewards
                    else float(draw.random() < 0.5 + (k == 0) - (k == 1))
                },
            )
        )
    return Group.of(members)


def hash_of(model: torch.nn.Module) -> str:
    """Of the trained weights."""
    return weights_sha256(trained(model))


class ListSource:
    """Windows from a list of batches; keeps the figures, the gradients and the hashes of every step."""

    def __init__(self, config: RunConfig, batches: list[list[Group]], version: int = 0) -> None:
        self._function = advantage_function(config.training.advantage)
        self._batches: Iterator[list[Group]] = iter(batches)
        self.version = version
        self.figures: list[dict[str, float]] = []
        self.hashes: list[str] = []
        self.trainer: grpo.Trainer | None = None

    def next_window(self) -> window.Window:
        rows = window.rows_of(next(self._batches), self._function, self.version)
        return window.Window(self.version + 1, rows)

    def finish_step(self, figures: dict[str, float]) -> None:
        self.version += 1
        self.figures.append(figures)
        assert self.trainer is not None
        self.hashes.append(hash_of(self.trainer.accelerator.unwrap_model(self.trainer.model)))


def make_trainer(
    config: RunConfig,
    base: Path,
    work: Path,
    batches: list[list[Group]],
    version: int = 0,
    saved: Path | None = None,
    model: PeftModel | None = None,
) -> tuple[grpo.Trainer, ListSource]:
    """A trainer on `base` (or on `model`, which others use too), optionally continued from a saved state directory of
    `version`."""
    source = ListSource(config, batches, version)
    trainer: grpo.Trainer = grpo.Trainer(
        config,
        model or policy_of(setup.load_model(base, config.model.dtype), config),
        setup.load_tokenizer(base),
        grpo.arguments(config, len(batches), work, 60),
        source,
        None
        if saved is None
        else lambda optimizer, scheduler: state.load_trainer(
            saved / "trainer", version, trainer.model, optimizer, scheduler
        ),
    )
    source.trainer = trainer
    if saved is not None:
        state.load_weights(trainer.model, saved / "model")
    return trainer, source


def gradients(trainer: grpo.Trainer) -> dict[str, torch.Tensor]:
    """Makes `train()` keep the gradients of each step, unclipped, in the returned dictionary."""
    kept: dict[str, torch.Tensor] = {}
    clip = trainer._clip_grad_norm

    def keep(model: torch.nn.Module) -> Any:
        plain = trainer.accelerator.unwrap_model(model)
        kept.update({n: p.grad.clone() for n, p in plain.named_parameters() if p.grad is not None})
        return clip(model)

    trainer._clip_grad_norm = keep
    return kept
