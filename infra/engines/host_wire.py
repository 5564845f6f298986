"""What goes over the wire between an engine's host and its clients: one place for both sides. Without torch.

A generation is answered by lines of JSON: `{"token_ids", "logprobs", "spans"}` with what is new since the line before
(spans are always all of them), `"end"` in the last one; or `{"error", "detail"}`, which is the last one too. A stream
that ends without either was cut: what was told before it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from infra.engines.errors import (
    BadRequest,
    BaseFrozen,
    EngineClosed,
    ModelUnusable,
    NoAdapterSlot,
    NonFiniteLogits,
    PromptTooLong,
    UnknownPolicy,
    WeightMismatch,
)
from infra.engines.protocol import Generation, Prefilled, Sampling
from rl.errors import GenerationFailure

NAMED = (
    BadRequest,
    BaseFrozen,
    EngineClosed,
    GenerationFailure,
    ModelUnusable,
    NoAdapterSlot,
    NonFiniteLogits,
    PromptTooLong,
    UnknownPolicy,
    WeightMismatch,
)
"""Errors that keep their name on the way."""


@dataclass(frozen=True, slots=True)
class Call:
    """One generation."""

    token_ids: Sequence[int]
    sampling: Sampling
    tenant: str
    request_id: str
    kv: Prefilled | None = None

    def dump(self) -> bytes:
        s = self.sampling
        return orjson.dumps(
            {
                "token_ids": list(self.token_ids),
                "sampling": [s.temperature, s.max_new_tokens, s.stop_token_ids, s.seed],
                "tenant": self.tenant,
                "request_id": self.request_id,
                "kv": None if self.kv is None else [self.kv.version, self.kv.params],
            }
        )

    @classmethod
    def load(cls, raw: bytes) -> Call:
        """Raises BadRequest."""
        try:
            tree = orjson.loads(raw)
            temperature, most, stops, seed = tree["sampling"]
            sampling = Sampling(temperature, most, tuple(stops), seed)
            kv = None if tree["kv"] is None else Prefilled(*tree["kv"])
            return cls(tree["token_ids"], sampling, tree["tenant"], tree["request_id"], kv)
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise BadRequest(f"this is no generation: {type(error).__name__}: {error}") from error


def line(so_far: Generation, told: int, *, end: bool) -> bytes:
    """What is new of a generation after its first `told` tokens."""
    content: dict[str, Any] = {
        "token_ids": so_far.token_ids[told:],
        "logprobs": so_far.logprobs[told:],
        "spans": so_far.version_spans,
    }
    if end:
        content["end"] = so_far.finish_reason
    return orjson.dumps(content) + b"\n"


def error_line(error: Exception) -> bytes:
    return orjson.dumps(failure(error)) + b"\n"


def take(raw: bytes, so_far: Generation) -> bool:
    """Add a line to the generation; whether it was the last. Raises the engine's named errors."""
    content = orjson.loads(raw)
    if "error" in content:
        raise named(content)
    so_far.token_ids += content["token_ids"]
    so_far.logprobs += content["logprobs"]
    so_far.version_spans[:] = [(start, version) for start, version in content["spans"]]
    if "end" not in content:
        return False
    so_far.finish_reason = content["end"]
    return True


def failure(error: Exception) -> dict[str, str]:
    """An error as it is told."""
    name = type(error).__name__
    known = {kind.__name__ for kind in NAMED}
    return {"error": name if name in known else "GenerationFailure", "detail": str(error) or name}


def named(content: dict[str, str]) -> Exception:
    """The error that was told."""
    kinds = {kind.__name__: kind for kind in NAMED}
    return kinds.get(content["error"], GenerationFailure)(content["detail"])
