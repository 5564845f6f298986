"""Going on with a generation that was cut: what is left to sample, and what both parts make together.

Invariants: no token is lost or doubled; spans stay exact and are as few as can be; no part is sampled with the chances
of an earlier one.
"""

from __future__ import annotations

from dataclasses import replace

from infra.engines.protocol import Generation, Sampling
from rl.stream import derive_seed


def rest(sampling: Sampling, done: int) -> Sampling:
    """How the tokens after the first `done` are sampled."""
    if done == 0:
        return sampling
    seed = None if sampling.seed is None else derive_seed(sampling.seed, done)
    return replace(sampling, max_new_tokens=sampling.max_new_tokens - done, seed=seed)


def extend(done: Generation, part: Generation) -> None:
    """Add what was sampled after it, spans included."""
    start = len(done.token_ids)
    for at, version in part.version_spans:
        if not done.version_spans or done.version_spans[-1][1] != version:
            done.version_spans.append((start + at, version))
    done.token_ids += part.token_ids
    done.logprobs += part.logprobs
    done.finish_reason = part.finish_reason


def complete(done: Generation, sampling: Sampling) -> bool:
    """Whether what is there is all that was asked for; says how it ended."""
    if done.token_ids and done.token_ids[-1] in sampling.stop_token_ids:
        done.finish_reason = "stop"
        return True
    done.finish_reason = "length"
    return len(done.token_ids) >= sampling.max_new_tokens
