"""The tables of the page on GPU sizing, from the facts about models and hardware that the simulator uses (`sim/data`).

Invariants: pure; what it says of memory is arithmetic on published shapes, told as such, and nothing is measured here.
"""

from __future__ import annotations

import math

from sim.profiles import Hardware, LanguageModel, hardware_profiles, model_profiles

GB = 1e9
SHARE = 0.9
"""Of a GPU's memory that is given to weights and cache, or to a trainer."""
STATES = 8
"""Bytes per trained parameter in bf16: weight, gradient and the two moments of AdamW, each 2."""
ACTIVATIONS = 10 * GB
CHIPS = ("A100", "H100", "H200", "H20")
LENGTH = 8192
"""Tokens of a trajectory in the table of engines."""


def tables() -> dict[str, str]:
    """Markdown for each placeholder of docs/sizing.md."""
    models = [model for model in model_profiles().values() if model.weight_bytes < 100 * GB]
    chips = [hardware_profiles()[name] for name in CHIPS]
    names = [f"{chip.name} ({chip.memory / GB:.0f} GB)" for chip in chips]
    engines = [["model", "weights", *names]]
    trainers = [["model", "all weights", "LoRA", *names]]
    for m in models:
        weights = f"{m.weight_bytes / GB:.0f} GB"
        engines.append([m.name, weights, *(_engine(m, chip) for chip in chips)])
        trained = f"{trained_bytes(m) / GB:.0f} GB"
        trainers.append([m.name, trained, f"{weights} +", *(_trainer(m, chip) for chip in chips)])
    return {"ENGINES": _table(engines), "TRAINERS": _table(trainers)}


def trained_bytes(model: LanguageModel) -> float:
    """Weights, gradients and moments of a model of which everything is trained."""
    return model.parameters * STATES


def engine_gpus(model: LanguageModel, chip: Hardware) -> int:
    """The fewest GPUs, a power of two, over which the weights leave a third of the memory to the cache."""
    return 2 ** max(0, math.ceil(math.log2(model.weight_bytes * 1.5 / (chip.memory * SHARE))))


def at_once(model: LanguageModel, chip: Hardware) -> int:
    """Trajectories of `LENGTH` tokens whose keys and values fit beside the weights."""
    room = engine_gpus(model, chip) * chip.memory * SHARE - model.weight_bytes
    return int(room / (model.kv_bytes * LENGTH))


def _engine(model: LanguageModel, chip: Hardware) -> str:
    gpus = engine_gpus(model, chip)
    return f"{at_once(model, chip)} at once" + (f" on {gpus} GPUs" if gpus > 1 else "")


def _trainer(model: LanguageModel, chip: Hardware) -> str:
    room = chip.memory * SHARE
    if trained_bytes(model) < room - ACTIVATIONS:
        return "all weights"
    return "LoRA" if model.weight_bytes < room - ACTIVATIONS else "too large"


def _table(rows: list[list[str]]) -> str:
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body])
