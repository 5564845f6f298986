"""Save and restore: the same bits, in the process and across processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.engines.weights import read_tensors
from infra.training import grpo, setup, state
from infra.training.snapshot import Snapshot, Snapshots
from rl.config.run import RunConfig
from rl.trajectory import Group
from tests.training.small import ListSource, hash_of, make_base, make_config, make_group, make_trainer

LORA = {"rank": 4, "alpha": 8, "dropout": 0.1}


def config(lora: bool) -> RunConfig:
    return make_config(
        model={"source": {"type": "pretrained", "path": "x"}, "lora": LORA if lora else None},
        training={"warmup_steps": 3},
    )


def batches(n: int) -> list[list[Group]]:
    return [[make_group(10 * step + i, 4) for i in range(2)] for step in range(n)]


def save(trainer: grpo.Trainer, base: Path, directory: Path, version: int, bucket_mb: int = 512) -> Path:
    snapshot = Snapshots().take(version, trainer.model, trainer.optimizer, trainer.lr_scheduler)
    state.save(snapshot, trainer.model, base, directory, bucket_mb)
    return directory


def straight(base: Path, work: Path, lora: bool, n: int) -> ListSource:
    trainer, source = make_trainer(config(lora), base, work, batches(n))
    trainer.train()
    return source


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_resume_is_bit_exact(base: Path, tmp_path: Path, lora: bool, k: int) -> None:
    """4 steps straight equal k steps, save, restore into a new trainer, 4 - k steps (dropout and warm-up on)."""
    want = straight(base, tmp_path / "w", lora, 4).hashes
    first, source = make_trainer(config(lora), base, tmp_path / "w", batches(4)[:k])
    if k:
        first.train()
        saved = save(first, base, tmp_path / "saved", k)
    else:
        saved = tmp_path / "saved"
        state.save(Snapshots().take(0, first.model), first.model, base, saved, 512)
    second, rest = make_trainer(config(lora), base, tmp_path / "w", batches(4)[k:], version=k, saved=saved)
    second.train()
    assert source.hashes + rest.hashes == want
    assert len(set(want)) == 4


SCRIPT = """
import json, sys
from pathlib import Path
from infra.training import setup
from tests.training.test_state import batches, config, make_trainer, save
base, saved, work = map(Path, sys.argv[1:4])
lora, k = bool(int(sys.argv[4])), int(sys.argv[5])
setup.prepare_process(1)
trainer, source = make_trainer(config(lora), base, work, batches(2)[k : k + 1], version=k, saved=saved if k else None)
trainer.train()
save(trainer, base, saved, k + 1)
print(json.dumps(source.hashes))
"""


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_resume_is_bit_exact_across_processes(base: Path, tmp_path: Path, lora: bool) -> None:
    want = straight(base, tmp_path / "w", lora, 2).hashes
    got = []
    for k in range(2):
        args = [str(base), str(tmp_path / "saved"), str(tmp_path / "w"), str(int(lora)), str(k)]
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *args], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        got += json.loads(done.stdout.splitlines()[-1])
    assert got == want


def test_saved_model_is_a_hugging_face_directory(base: Path, tmp_path: Path) -> None:
    trainer, _ = make_trainer(config(False), base, tmp_path / "w", batches(1))
    trainer.train()
    saved = save(trainer, base, tmp_path / "s", 1)
    model = AutoModelForCausalLM.from_pretrained(saved / "model")
    assert hash_of(model) == hash_of(trainer.model)
    assert AutoTokenizer.from_pretrained(saved / "model")("w3 w4").input_ids == [5, 6]
    assert (saved / "model" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert (saved / "model" / "chat_template.jinja").is_file()
    assert not list(saved.rglob("*.bin")) + list(saved.rglob("*.pt")) + list(saved.rglob("*.pkl"))


def test_saved_adapter_is_a_peft_directory_and_the_base_is_untouched(base: Path, tmp_path: Path) -> None:
    trainer, _ = make_trainer(config(True), base, tmp_path / "w", batches(1))
    trainer.train()
    saved = save(trainer, base, tmp_path / "s", 1)
    plain = setup.load_model(base, "float32")
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        before = plain(ids).logits
        adapted = PeftModel.from_pretrained(plain, saved / "model")
        trainer.model.eval()
        assert torch.allclose(adapted.eval()(ids).logits, trainer.model(ids).logits, atol=1e-6)
        with trainer.model.disable_adapter():
            assert torch.equal(trainer.model(ids).logits, before)
    assert str(tmp_path) not in (saved / "model" / "adapter_config.json").read_text()


def test_a_state_of_another_model_is_refused(base: Path, tmp_path: Path) -> None:
    trainer, _ = make_trainer(config(True), base, tmp_path / "w", batches(1))
    trainer.train()
    saved = save(trainer, base, tmp_path / "s", 1)
    with pytest.raises(state.StateMismatch, match="version 1, not of format 1 and version 2"):
        state.load_trainer(saved / "trainer", 2, trainer.model, trainer.optimizer, trainer.lr_scheduler)
    full, _ = make_trainer(config(False), base, tmp_path / "w", batches(1))
    with pytest.raises(state.StateMismatch):
        state.load_weights(full.model, saved / "model")


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_snapshot_is_what_was_then(base: Path, tmp_path: Path, lora: bool) -> None:
    """Taken before a step and saved after it: what resumes from it is what was before."""
    want = straight(base, tmp_path / "w", lora, 3).hashes
    snapshots, taken = Snapshots(), list[Snapshot]()
    trainer, source = make_trainer(config(lora), base, tmp_path / "w", batches(3)[:2])
    finish = source.finish_step

    def keep(figures: dict[str, float]) -> None:
        finish(figures)
        if not taken:
            taken.append(snapshots.take(1, trainer.model, trainer.optimizer.optimizer, trainer.lr_scheduler))

    source.finish_step = keep  # type: ignore[method-assign]
    trainer.train()
    assert taken[0].sha256 == want[0] != hash_of(trainer.model)
    state.save(taken[0], trainer.model, base, tmp_path / "saved", 512)
    _, rest = resumed = make_trainer(config(lora), base, tmp_path / "w", batches(3)[1:], 1, tmp_path / "saved")
    resumed[0].train()
    assert rest.hashes == want[1:]
    memory = [tensor.data_ptr() for tensor in taken[0].weights.values()]
    again = snapshots.take(2, trainer.model)
    assert [tensor.data_ptr() for tensor in again.weights.values()] == memory, "no second copy in host memory"
    assert again.sha256 == want[1]


def test_a_model_is_cut_into_files_of_the_size_asked_for(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", hidden=256, layers=3)
    trainer, _ = make_trainer(config(False), base, tmp_path / "w", [])
    saved = save(trainer, base, tmp_path / "s", 0, bucket_mb=1) / "model"
    buckets = sorted(saved.glob("*.safetensors"))
    assert len(buckets) >= 3
    biggest = max(p.numel() * p.element_size() for p in trainer.model.parameters())
    assert all(file.stat().st_size <= max(biggest, 1 << 20) + 10_000 for file in buckets)
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert hash_of(model) == hash_of(trainer.model)
    served = read_tensors(saved)
    assert served.keys() >= {name for name, _ in model.named_parameters()}
    again, _ = make_trainer(config(False), base, tmp_path / "w", [], saved=saved.parent)
    assert hash_of(again.model) == hash_of(trainer.model)
