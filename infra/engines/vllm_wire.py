"""What goes over the wire to a vLLM server and back: one place for the shapes of its routes. Without I/O.

Invariants: a request fixes every sampling parameter that shapes the distribution, so that no default of a server or
model can; log-probs are of the sampled token after temperature (`--logprobs-mode processed_logprobs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from infra.engines.errors import NonFiniteLogits
from infra.engines.protocol import Sampling
from rl.errors import GenerationFailure

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
_NOT_FINITE = -9999.0
"""What a server sends for a log-prob that JSON can not hold."""
_PREFIX = "generate-tokens-"
"""How a server prefixes the ids of requests to GENERATE inside."""
_DATA = b"data: "
_DONE = b"[DONE]"


@dataclass(slots=True)
class Segment:
    """What one request to a server brought so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    """stop, length or abort; None while it runs."""
    labels: set[str] = field(default_factory=set)
    """Of the weights that made its tokens; known at its end."""


def request(
    model: str, request_id: str, token_ids: Sequence[int], sampling: Sampling, kv: dict[str, Any] | None = None
) -> bytes:
    """A streamed request for the next tokens."""
    return orjson.dumps(_body(model, request_id, token_ids, sampling, kv) | {"stream": True})


def prefill(model: str, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> bytes:
    """A request that leaves the prompt's keys and values for another server to fetch."""
    kv = {"do_remote_decode": True, "do_remote_prefill": False}
    body = _body(model, request_id, token_ids, sampling, kv)
    body["sampling_params"] |= {"max_tokens": 1, "stop_token_ids": []}
    return orjson.dumps(body)


def _body(
    model: str, request_id: str, token_ids: Sequence[int], sampling: Sampling, kv: dict[str, Any] | None
) -> dict[str, Any]:
    parameters = {
        "n": 1,
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # what ends a turn is in the request, not in the model's files
        "seed": sampling.seed,
        "logprobs": 0,  # of the sampled token alone
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "detokenize": False,
    }
    body = {"model": model, "request_id": request_id, "token_ids": list(token_ids), "sampling_params": parameters}
    return body if kv is None else body | {"kv_transfer_params": kv}


def abort(request_ids: Sequence[str]) -> bytes:
    return orjson.dumps({"request_ids": [_PREFIX + name for name in request_ids]})


def read_event(line: bytes, segment: Segment) -> None:
    """Add a line of the stream to the segment; lines without data are skipped.

    Raises NonFiniteLogits, and GenerationFailure for an error that the server reports in the stream.
    """
    line = line.strip()
    if not line.startswith(_DATA) or line.endswith(_DONE):
        return
    message = orjson.loads(line[len(_DATA) :])
    if "error" in message:
        raise GenerationFailure(f"vLLM: {told(message)}")
    for choice in message["choices"]:
        content = (choice["logprobs"] or {}).get("content") or []
        logprobs = [entry["logprob"] for entry in content]
        if any(logprob is None or logprob <= _NOT_FINITE for logprob in logprobs):
            raise NonFiniteLogits("the policy's logits are not finite")
        segment.token_ids += choice["token_ids"] or []
        segment.logprobs += [min(logprob, 0.0) for logprob in logprobs]
        segment.finish = choice["finish_reason"] or segment.finish
        segment.labels |= {span["version"] for span in choice.get("weight_versions") or []}


def told(message: Any) -> str:
    """The text of an error answer."""
    error = message.get("error", message) if isinstance(message, dict) else message
    return str(error.get("message", error) if isinstance(error, dict) else error)


def metrics(text: str) -> dict[str, float]:
    """Sums over labels of vLLM's metrics, by name without the prefix, from the Prometheus text format."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("vllm:"):
            name, _, value = line.removeprefix("vllm:").rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found
