"""The training step as a state machine: RollArt's six steps, and the order for alpha = 0.

    alpha >= 1   GET_BATCH -> SUSPEND -> UPDATE -> RESUME -> RECOMPUTE -> TRAIN -> COMMIT -> (next step)
    alpha == 0   SUSPEND -> UPDATE -> RESUME -> RECOMPUTE -> GET_BATCH -> TRAIN -> COMMIT -> (next step)

Under alpha >= 1 the engines receive, after get_batch, the weights that the *previous* step committed, while
this step trains: a batch has lag 1 or more. Under alpha = 0 the engines are brought to the head first and the
batch is rolled out under it.

Invariants: SUSPEND is always followed by RESUME, also when UPDATE fails; RECOMPUTE (the engine's own work on
the prefixes in flight) and everything after it runs with the engines resumed; a version is published only by
COMMIT. Pure: the driver does the work of a phase and then calls `enter`.
"""

from __future__ import annotations

from enum import StrEnum

from rl.errors import ProtocolViolation


class Phase(StrEnum):
    GET_BATCH = "get_batch"
    SUSPEND = "suspend"
    UPDATE = "update"
    RESUME = "resume"
    RECOMPUTE = "recompute"
    TRAIN = "train"
    COMMIT = "commit"


_SWAP = (Phase.SUSPEND, Phase.UPDATE, Phase.RESUME, Phase.RECOMPUTE)
ASYNCHRONOUS = (Phase.GET_BATCH, *_SWAP, Phase.TRAIN, Phase.COMMIT)
SYNCHRONOUS = (*_SWAP, Phase.GET_BATCH, Phase.TRAIN, Phase.COMMIT)


def phases(alpha: int) -> tuple[Phase, ...]:
    """The order of one step under this staleness bound."""
    return SYNCHRONOUS if alpha == 0 else ASYNCHRONOUS


class StepProtocol:
    """Follows the phases of consecutive steps and refuses any other order."""

    def __init__(self, alpha: int):
        self._order = phases(alpha)
        self._at = -1

    @property
    def phase(self) -> Phase | None:
        """The phase entered last; None before the first step."""
        return self._order[self._at] if self._at >= 0 else None

    @property
    def suspended(self) -> bool:
        return self.phase in (Phase.SUSPEND, Phase.UPDATE)

    def enter(self, phase: Phase) -> None:
        """Move to `phase`; re-entering the present one is idempotent. Raises ProtocolViolation otherwise."""
        if phase == self.phase:
            return
        following = self._order[(self._at + 1) % len(self._order)]
        if phase != following:
            raise ProtocolViolation(f"phase {phase} after {self.phase}: {following} is next")
        self._at = (self._at + 1) % len(self._order)

    def abandon_update(self) -> None:
        """An UPDATE failed: the engines are resumed on what they had, and the step starts over."""
        if not self.suspended:
            raise ProtocolViolation(f"nothing is suspended in phase {self.phase}")
        self._at = -1
