"""Two steps on given groups, per case; what `test_ranks` runs in one process and under `accelerate launch`."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file

from infra.training import ranks, setup
from tests.training.small import gradients, make_config, make_group, make_trainer

CASES = {"grpo": ("grpo", 3, False), "dapo-lora": ("dapo", 3, True), "bnpo-odd": ("bnpo", 1, False)}
"""Loss, groups, LoRA. Of 3 rows in micro-batches of 2 one rank gets a single one."""


def run(base: Path, work: Path, case: str) -> None:
    """Rank r writes {case}-{r}.json: figures and hashes of each step; rank 0 the last gradient too."""
    loss, groups, lora = CASES[case]
    config = make_config(
        training={"loss": loss, "micro_batch_size": 2, "kl_beta": 0.1},
        model={
            "source": {"type": "pretrained", "path": "x"},
            "lora": {"rank": 4, "alpha": 8} if lora else None,
        },
    )
    trainer, source = make_trainer(
        config, base, work / "trl", [[make_group(i, 3) for i in range(groups)]] * 2
    )
    kept = gradients(trainer)
    trainer.train()
    (work / f"{case}-{ranks.rank()}.json").write_text(
        json.dumps({"figures": source.figures, "hashes": source.hashes})
    )
    if ranks.rank() == 0:
        save_file(kept, work / f"{case}.safetensors")


def main(base: Path, work: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    assert int(os.environ["WORLD_SIZE"]) == ranks.world() == 2
    setup.prepare_process(1)
    sent = b"\x00a\n" * 5
    assert ranks.broadcast(sent if ranks.rank() == 0 else None) == sent
    assert ranks.broadcast(b"" if ranks.rank() == 0 else None) == b""
    for case in CASES:
        run(base, work, case)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
