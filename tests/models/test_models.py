"""Sources of the policy model: what they write, and what they say when they can not."""

from __future__ import annotations

import importlib.util
import string
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from infra.chat import ChatCodec
from infra.models import smollm2
from infra.models.sources import check_source, longest_sequence, materialise
from infra.models.tiny import WORDS, make_model, make_tokenizer
from infra.training.warmstart import _arguments
from rl.config.model import ModelSection, PretrainedModel, Smollm2Model, TinyModel, TinySection, WarmstartSection
from rl.errors import ConfigError
from rl.trajectory import Message

SMALL = ModelSection(source=TinyModel(size=TinySection(hidden_size=64, layers=2)))


def test_the_tiny_model_is_an_ordinary_model_directory(tmp_path: Path) -> None:
    directory = materialise(SMALL, tmp_path, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    messages = [
        {"role": "user", "content": "start 3 add 4"},
        {"role": "assistant", "content": "<tool>+4</tool>"},
    ]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    codec = ChatCodec.from_directory(directory)
    assert ids[:13] == codec.open([Message("user", "start 3 add 4")]) + codec.turn("<tool>+4</tool>")[:1]
    assert model.config.vocab_size == len(tokenizer) and model.config.tie_word_embeddings
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert (model.generation_config.eos_token_id,) == codec.stop_token_ids
    assert model(torch.tensor([ids])).logits.isfinite().all()


def test_equal_seeds_give_equal_weights(tmp_path: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = materialise(SMALL, tmp_path / "a", seed=1)
    assert torch.equal(torch.get_rng_state(), before), "making a model disturbs the caller's random state"
    torch.manual_seed(6)
    again = materialise(SMALL, tmp_path / "b", seed=1)
    other = materialise(SMALL, tmp_path / "b", seed=2)
    read = [(d / "model.safetensors").read_bytes() for d in (first, again, other)]
    assert read[0] == read[1] != read[2]


@pytest.mark.parametrize("width", [32, 33, 96, 160, 224])
def test_whatever_width_is_legal_makes_a_model_that_computes(width: int) -> None:
    model = make_model(TinySection(hidden_size=width, layers=1), 100, seed=0)
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


@pytest.mark.parametrize("seed", [-1, 2**32, 2**64, -(10**23)])
def test_any_integer_is_a_seed(seed: int, tmp_path: Path) -> None:
    materialise(SMALL, tmp_path / "models", seed)
    set_seed(_arguments(WarmstartSection(), seed, str(tmp_path / "scratch")).seed)


def test_the_longest_sequence_is_what_the_source_tells(tmp_path: Path) -> None:
    directory = materialise(SMALL, tmp_path, seed=0)
    pretrained = ModelSection(source=PretrainedModel(path=str(directory)))
    assert longest_sequence(SMALL) == longest_sequence(pretrained) == 2048
    (directory / "config.json").write_text("{}")
    assert longest_sequence(pretrained) is None
    (directory / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model\.source\.path: .* no readable config\.json"):
        longest_sequence(pretrained)


def test_a_made_model_is_reused_and_never_half_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = materialise(SMALL, tmp_path, seed=0)
    stamp = (directory / "model.safetensors").stat().st_mtime_ns
    assert materialise(SMALL, tmp_path, seed=0) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == stamp

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("infra.models.tiny.make_model", fail)
    with pytest.raises(OSError, match="disk full"):
        materialise(SMALL, tmp_path, seed=9)
    assert list(tmp_path.iterdir()) == [directory]


def test_the_tiny_tokenizer_gives_words_one_token_and_loses_no_printable_text() -> None:
    tokenizer = make_tokenizer()
    assert all(len(tokenizer.encode(word).tokens) == 1 for word in WORDS)
    text = "".join(c for c in string.printable if c not in "\x0b\x0c") + "".join(WORDS)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "does not exist"),
        ([], "has no config.json"),
        (["config.json"], r"has no \*.safetensors"),
        (["config.json", "model.safetensors"], "has no tokenizer.json"),
    ],
)
def test_what_a_pretrained_directory_lacks_is_named(tmp_path: Path, files: list[str] | None, message: str) -> None:
    directory = tmp_path / "model"
    if files is not None:
        directory.mkdir()
        for name in files:
            (directory / name).write_text("{}")
    section = ModelSection(source=PretrainedModel(path=str(directory)))
    for check in (lambda: check_source(section), lambda: materialise(section, tmp_path, 0)):
        with pytest.raises(ConfigError, match=rf"model\.source\.path: .*{directory}.*{message}"):
            check()


def test_a_pretrained_directory_is_used_where_it_lies(tmp_path: Path) -> None:
    made = materialise(SMALL, tmp_path, seed=0)
    assert materialise(ModelSection(source=PretrainedModel(path=str(made))), tmp_path / "cache", 0) == made
    assert not (tmp_path / "cache").exists()


def test_smollm2_without_its_package_names_the_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    section = ModelSection(source=Smollm2Model())
    for check in (lambda: check_source(section), lambda: materialise(section, tmp_path, 0)):
        with pytest.raises(ConfigError, match=r"model\.source\.type: .*make smollm2"):
            check()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_smollm2_is_converted_once_and_speaks(tmp_path: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("needs gguf")
    try:
        smollm2.find_weights()
    except ConfigError as error:
        pytest.skip(str(error))
    directory = materialise(ModelSection(source=Smollm2Model(), dtype="bfloat16"), tmp_path, 0)
    codec = ChatCodec.from_directory(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.bfloat16
    prompt = codec.open([Message("user", "What is the capital of France? Answer with one word.")])
    output = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :]
    assert "Paris" in codec.decode(output.tolist())
