"""A from-scratch Qwen3 model with a tokenizer of its own, small enough to learn on one core.

The result is an ordinary Hugging Face directory: `AutoModelForCausalLM`, `AutoTokenizer` and vLLM load it.

Invariants
- Equal size and seed give equal weights.
- Every printable ASCII text survives encoding and decoding; a word of the two built-in tasks is one token,
  which is what makes them learnable at this size.
- The chat template is prefix-stable ChatML and knows the roles system, user, assistant and tool.
"""

from __future__ import annotations

import json
import math
import string
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from rl.config.model import TINY_CONTEXT, TinySection

PAD, UNKNOWN, START, END = "<pad>", "<unk>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, UNKNOWN, START, END)
HEAD_DIM = 32

_MOVES, _CELLS = ("up", "down", "left", "right"), ("wall", "hole", "near", "far")
WORDS = (
    *("system", "user", "assistant", "tool"),
    *("<tool>", "</tool>", "<answer>", "</answer>"),
    *("start ", " add ", " take ", " times "),
    *(str(number) for number in range(10, 17)),
    *(f"[{move}]" for move in _MOVES),
    *(f"{'' if move == 'up' else ' '}{move}:{cell}" for move in _MOVES for cell in _CELLS),
)

TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('unknown role ' ~ message.role) -}}
{%- endif -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def make_tokenizer() -> Tokenizer:
    """One token per word of `WORDS`, else one per character; `<unk>` for what is not printable ASCII."""
    characters = [*string.printable.removesuffix("\x0b\x0c")]
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *WORDS, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    longest_first = sorted(WORDS, key=len, reverse=True)
    pattern = "|".join([*(_escape(word) for word in longest_first), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def _escape(word: str) -> str:
    return "".join(f"\\{c}" if c in r"\^$.|?*+()[]{}" else c for c in word)


def make_model(size: TinySection, vocabulary: int, seed: int) -> Qwen3ForCausalLM:
    """A float32 model; the scale of its initial weights decides how quickly it learns, so it is set here:
    embeddings 0.05, others 0.02, and what writes to the residual stream divided by sqrt(2 x layers)."""
    width = size.hidden_size
    heads = width // HEAD_DIM
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else 1,  # it must divide the former
        head_dim=HEAD_DIM,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=TINY_CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=SPECIAL.index(PAD),
        eos_token_id=SPECIAL.index(END),
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**64)
        model = Qwen3ForCausalLM(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            scale = 0.05 if "embed_tokens" in name else 0.02
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                scale /= math.sqrt(2 * size.layers)
            torch.nn.init.normal_(parameter, std=scale)
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id, do_sample=True
    )
    return model


def write_tiny(size: TinySection, seed: int, directory: Path) -> None:
    """Make the model and write it, with tokenizer and chat template, into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    make_model(size, tokenizer.get_vocab_size(), seed).save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": TINY_CONTEXT,
        "clean_up_tokenization_spaces": False,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "eos_token": END,
        "bos_token": None,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
