"""Whether what an environment answered is what `envs.protocol` allows.

Invariant: what passes can be tokenised, stored and scored; what does not is described for whoever wrote it.
"""

from __future__ import annotations

import json
import math

from envs.protocol import Step
from rl.trajectory import Message


def unlike_a_step(step: object) -> str | None:
    """What is wrong with the answer of a `step`; None if nothing is."""
    if not isinstance(step, Step):
        return f"{type(step).__name__} instead of a Step"
    if not isinstance(step.observation, Message) or step.observation.role not in ("user", "tool"):
        return f"the observation {step.observation!r}, which is no user or tool message"
    if not isinstance(step.observation.content, str):
        return f"a content of type {type(step.observation.content).__name__}; it must be text"
    if step.reward is not None and not (isinstance(step.reward, int | float) and math.isfinite(step.reward)):
        return f"the reward {step.reward!r}, which is neither None nor a finite number"
    try:
        json.dumps(step.info, allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"an info that is not JSON: {error}"
    return None


def unlike_an_opening(opening: object) -> str | None:
    """What is wrong with the answer of a `reset`; None if nothing is."""
    if not isinstance(opening, list) or not opening or not all(isinstance(m, Message) for m in opening):
        return f"{opening!r}, which is no list of Messages with at least one"
    if not all(isinstance(m.content, str) for m in opening):
        return "a message whose content is not text"
    if any(m.role not in ("system", "user") for m in opening) or opening[-1].role != "user":
        return f"messages of {', '.join(m.role for m in opening)}; they are of system and user, the last of user"
    return None
