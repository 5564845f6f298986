"""What a vLLM server says of itself, and whether that fits.

Invariant: a server that would sample, cache or label otherwise than an engine relies on is refused before its first
request, with the option that is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from infra.engines.errors import BadRequest, NoAdapterSlot
from infra.engines.vllm_server import BACKEND, spare_slots


@dataclass(frozen=True)
class Facts:
    """Of one server's configuration."""

    name: str
    """Under which it serves its base model."""
    cpu: bool
    max_length: int
    logprobs_mode: str
    generation_config: str
    backend: str | None
    """Of weight transfer."""
    slots: int
    """Adapters in one batch; 0 without LoRA."""
    max_rank: int

    @classmethod
    def of(cls, info: dict[str, Any]) -> Self:
        """From the answer of `/server_info?config_format=json`."""
        config = info["vllm_config"]
        model, lora = config["model_config"], config.get("lora_config") or {}
        return cls(
            name=model["served_model_name"],
            cpu=config["device_config"]["device"].startswith("cpu"),
            max_length=model["max_model_len"],
            logprobs_mode=model["logprobs_mode"],
            generation_config=model["generation_config"],
            backend=(config.get("weight_transfer_config") or {}).get("backend"),
            slots=lora.get("max_loras", 0),
            max_rank=lora.get("max_lora_rank", 0),
        )

    def check(self, adapters: int, rank: int) -> None:
        """Raises BadRequest or NoAdapterSlot, naming the server's option."""
        for option, found, wanted in (
            ("--logprobs-mode", self.logprobs_mode, "processed_logprobs"),
            ("--generation-config", self.generation_config, "vllm"),
            ("--weight-transfer-config", self.backend, BACKEND),
        ):
            if found != wanted:
                raise BadRequest(f"the vLLM server has {option} {found}; start it with {wanted}")
        if adapters == 0:
            return
        needed = adapters + spare_slots(self.cpu)
        if self.slots < needed:
            raise NoAdapterSlot(
                f"the vLLM server has --max-loras {self.slots}; {adapters} adapters need {needed} "
                "(one to change over, and on a CPU one that stands for the base)"
            )
        if self.max_rank < rank:
            raise BadRequest(f"the vLLM server has --max-lora-rank {self.max_rank}; {rank} is needed")
