"""A small Qwen3 with a tokenizer of Qwen3's kind, Qwen3's training template, and a few conversations learned by heart.

Real in all that matters to a chat: control tokens, tokens for thinking and tool calls that are not control tokens, a
template that shows tools, adds empty thinking and joins answers of tools. Only vocabulary and weights are small.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

from infra.chat import ChatCodec
from rl.sessions import Said

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TEMPLATE = Path(trl.__file__).parent / "chat_templates" / "qwen3_training.jinja"
CORPUS = (
    "system user assistant Tools You may call one or more functions to assist with the user query. You are provided "
    'with function signatures within <tools></tools> XML tags: {"type": "function", "function": {"name": "add", '
    '"description": "", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": []}}} '
    "For each function call, return a json object with function name and arguments within XML tags: "
    '{"name": <function-name>, "arguments": <args-json-object>}\n\n'
)


@dataclass(frozen=True)
class Lesson:
    """What the model is to say (`answers`, as raw text) at each of its turns, between `messages`."""

    messages: Sequence[Sequence[Said]]
    answers: Sequence[str]
    tools: Sequence[dict[str, Any]] = field(default=())


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    return tokenizer


def make_codec() -> ChatCodec:
    return ChatCodec(make_tokenizer(), TEMPLATE.read_text(), {"eos_token": "<|im_end|>"})


def save_qwen(directory: Path, lessons: Sequence[Lesson] = (), steps: int = 120, seed: int = 0) -> Path:
    """A model directory; about ten seconds for a lesson or two."""
    torch.manual_seed(seed)
    tokenizer, codec = make_tokenizer(), make_codec()
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=codec.end,
        pad_token_id=None,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    rows = [_row(codec, lesson) for lesson in lessons]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps if rows else 0):
        for ids, labels in rows:
            model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(TEMPLATE.read_text())
    return directory


def _row(codec: ChatCodec, lesson: Lesson) -> tuple[torch.Tensor, torch.Tensor]:
    ids: list[int] = []
    labels: list[int] = []
    said: list[Said] = []
    for given, answer in zip(lesson.messages, lesson.answers, strict=True):
        known = len(said)
        said += given
        prompt, turn = codec.conversation(said, lesson.tools, known), [*codec.text(answer), codec.end]
        ids += [*prompt, *turn]
        labels += [*[-100] * len(prompt), *turn]
        said.append(Said("assistant", answer))
    return torch.tensor([ids]), torch.tensor([labels])
