"""Groups of a realistic size: episodes of several turns on real-looking tokens, log-probs and text."""

from __future__ import annotations

import numpy as np

from rl.trajectory import NO_VERSION, Group, Message, Problem, Span, Status, Trajectory, Uid

MEMBERS = 8
TOKENS = 1024
"""Per trajectory: a prompt of an eighth, then turns of generated tokens (two thirds) and answers (a third)."""
VOCABULARY = 151_000
_PROMPT, _TURN, _ANSWER = TOKENS // 8, 96, 48


def make_group(ordinal: int, version: int = 0, members: int = MEMBERS, tokens: int = TOKENS) -> Group:
    """One group, the same for equal arguments. Token frequencies fall as in text (Zipf), rewards differ."""
    draw = np.random.default_rng(ordinal)
    problem = Problem(ordinal, "synthetic", ordinal, ordinal)
    at = np.arange(tokens) - _PROMPT
    mask = ((at >= 0) & (at % (_TURN + _ANSWER) < _TURN)).astype(np.uint8)
    turns = max(1, -(-(tokens - _PROMPT) // (_TURN + _ANSWER)))
    return Group.of([_member(draw, problem, k, version, mask, turns) for k in range(members)])


def _member(
    draw: np.random.Generator, problem: Problem, k: int, version: int, mask: np.ndarray, turns: int
) -> Trajectory:
    ids = np.minimum(draw.zipf(1.2, len(mask)), VOCABULARY - 1)
    logprobs = (-draw.exponential(0.5, len(mask)) * mask).astype(np.float32)
    words = [f"w{token % 5000}" for token in ids.tolist()]
    text = [Message("user", " ".join(words[:_PROMPT]))]
    for start in range(_PROMPT, len(words), _TURN + _ANSWER):
        text.append(Message("assistant", " ".join(words[start : start + _TURN])))
        text.append(Message("tool", " ".join(words[start + _TURN : start + _TURN + _ANSWER])))
    return Trajectory(
        uid=Uid(problem.ordinal, 0),
        member=k,
        problem=problem,
        start_version=version,
        prompt_length=min(_PROMPT, len(words)),
        token_ids=ids.tolist(),
        loss_mask=mask.tolist(),
        logprobs=logprobs.tolist(),
        versions=np.where(mask == 1, version, NO_VERSION).tolist(),
        messages=text,
        status=Status.TERMINATED,
        turns=turns,
        rewards={"outcome": float(k % 2)},
        spans=[Span(stage, at, at + 1.0) for at, stage in enumerate(("reset", "interact", "score"))],
    )
