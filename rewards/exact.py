"""Exact match: the answer is the right one, letter by letter, after the white space around it is gone."""

from __future__ import annotations

from rewards.answers import reference, tagged
from rewards.protocol import TrajectoryView


def exact_match(
    view: TrajectoryView, answer_key: str = "answer", tag: str | None = "answer", ignore_case: bool = False
) -> dict[str, float]:
    """One part, `exact_match`, 0 or 1. The answer is what `<tag>` holds in the last message, or with `tag` None
    the whole message; the right one is `info[answer_key]`. Several white-space characters count as one blank."""
    right = reference(view, answer_key)
    given = view.final if tag is None else tagged(view.final, tag)
    if right is None or given is None:
        return {"exact_match": 0.0}
    given, right = " ".join(given.split()), " ".join(right.split())
    if ignore_case:
        given, right = given.casefold(), right.casefold()
    return {"exact_match": float(given == right)}
