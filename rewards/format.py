"""Format: the share of the policy's messages that have the shape asked for."""

from __future__ import annotations

import re

from rewards.protocol import TrajectoryView

LONGEST = 20_000
"""Characters of a message that are looked at: a longer one has the wrong shape, whatever it is."""


def format(view: TrajectoryView, pattern: str, final_only: bool = False) -> dict[str, float]:
    """One part, `format`, from 0 to 1. `pattern` is a regular expression for a whole message; with `final_only` only
    the last one counts. An episode without a message has 0. Raises re.error for a pattern that is none."""
    shape = re.compile(pattern, re.DOTALL)
    said = [m.content for m in view.messages if m.role == "assistant"]
    looked_at = said[-1:] if final_only else said
    fitting = sum(len(text) <= LONGEST and shape.fullmatch(text) is not None for text in looked_at)
    return {"format": fitting / len(looked_at) if looked_at else 0.0}
