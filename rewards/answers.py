"""Where the answer of an episode stands, and what it is compared with.

Invariants: the right answer comes from the environment, in the `info` of its last step, which the policy never
sees; an episode that was cut off has none there, and has given no answer either.
"""

from __future__ import annotations

import re

from rewards.protocol import TrajectoryView
from rl.trajectory import Status


def reference(view: TrajectoryView, key: str) -> str | None:
    """The right answer; None for an episode that was cut off before the environment told. Raises KeyError."""
    if key in view.info:
        return str(view.info[key])
    if view.status is Status.TRUNCATED:
        return None
    raise KeyError(f"the environment's last info has no {key!r} (it has {sorted(view.info)}); set answer_key")


def tagged(text: str, tag: str) -> str | None:
    """The content of the last `<tag>...</tag>`, stripped; None if there is none."""
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    return found[-1].strip() if found else None


def boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}`, with the braces inside it; None if there is none."""
    opening = text.rfind(r"\boxed{")
    if opening < 0:
        return None
    start, depth = opening + len(r"\boxed{"), 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at].strip()
    return None


def last_line(text: str) -> str:
    """The last line that is not blank; empty if all are."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
