"""What a slot of the world may be in, and what a tick leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray

# Phases of a slot: plain numbers, for they are compared with arrays millions of times.
FREE, RESET, READ, DECODE, STEP, SCORE = range(6)
HELD = 6
"""Ready for its next turn, but the engines stand still."""
WAIT_READ = 7
"""Ready for its next turn, but others of its run are not (lockstep)."""
WAIT_STEP = 8
"""Answered, but others of its run are not (lockstep)."""
WAIT_SCORE = 9
"""Played to its end, but others of its run are not (lockstep)."""
QUEUED = 10
"""Ready for its next turn, but no engine has room (`rl.routing`)."""


@dataclass
class Totals:
    """What was done since the beginning."""

    tokens: float = 0.0
    """Of trajectories that were played to their end, prompts and responses."""
    finished: int = 0
    failed: int = 0
    ended: int = 0
    """Trajectories that were stopped before they were through."""
    busy: Array = field(default_factory=lambda: np.zeros(0))
    """Seconds by engine in which it decodes or reads."""
    computing: float = 0.0
    """Seconds of all engines in which their devices do something, and do not wait for the host."""
    stalled: float = 0.0
    """Seconds in which the engines stood still for an update."""


@dataclass
class Happened:
    """Of one tick: slots that finished and slots that failed, with their groups and moments."""

    finished: Array
    failed: Array
