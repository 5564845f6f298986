"""Length shaping: nothing up to `free` generated tokens, then a penalty that grows linearly to -1 at `limit`
(the soft overlong punishment of DAPO)."""

from __future__ import annotations

from rewards.protocol import TrajectoryView


def length(view: TrajectoryView, free: int, limit: int) -> dict[str, float]:
    """One part, `length`, from -1 to 0. Raises ValueError unless 0 <= free < limit."""
    if not 0 <= free < limit:
        raise ValueError(f"free ({free}) must be from 0 to below limit ({limit})")
    beyond = max(0, view.generated_tokens - free)
    return {"length": -min(1.0, beyond / (limit - free))}
