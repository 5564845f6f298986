"""The training step as a state machine: RollArt's six steps, publishing beside them, the eager order, and alpha = 0.

    alpha >= 1   trainer     GET_BATCH 1 ........... TRAIN 1 -> GET_BATCH 2 ............ TRAIN 2 -> GET_BATCH 3
                 publisher          SUSPEND..RECOMPUTE (0)      COMMIT 1 -> SUSPEND..RECOMPUTE (1) ... COMMIT 2
    eager        trainer     GET_BATCH 1 ..... TRAIN 1 -> GET_BATCH 2 ........................ TRAIN 2 -> GET_BATCH 3
                 publisher   SUSPEND.. (0)                COMMIT 1 -> SUSPEND..RECOMPUTE (1)              COMMIT 2 ->
    alpha == 0   SUSPEND -> UPDATE -> RESUME -> RECOMPUTE -> GET_BATCH -> TRAIN -> COMMIT -> (next step)

Under alpha >= 1 the engines receive, after get_batch, the version that the *previous* step made, while this step
trains: a batch has lag 1 or more. Neither that nor the previous step's COMMIT holds up GET_BATCH and TRAIN: a version
may still be on its way to the store while the next batch is awaited and trained. In the eager order they receive it as
soon as it is committed, so that the rollout of the next groups does not wait for the last ones of this batch. Under
alpha = 0 the engines are brought to the head first and the batch is rolled out under it; there everything is in line.

Invariants
- SUSPEND is always followed by RESUME, also when UPDATE fails; RECOMPUTE (the engine's own work on the prefixes in
  flight) runs with the engines resumed.
- A version is published only by its COMMIT; the engines never get one before, and get every one.
- At most one version is on its way: batch n + 1 may be awaited while version n is uncommitted, batch n + 2 not.

Pure: the driver does the work of a phase, then calls `enter`; its two threads may, for each waits only for what the
other one has done already.
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


class StepProtocol:
    """Follows the phases of consecutive steps and refuses any other order."""

    def __init__(self, alpha: int, eager: bool = False):
        self._alpha, self._eager = alpha, eager
        self._batches = self._trained = self._committed = self._swapped = 0
        self._swap: Phase | None = None

    @property
    def suspended(self) -> bool:
        return self._swap in (Phase.SUSPEND, Phase.UPDATE)

    def enter(self, phase: Phase) -> None:
        """Move to `phase`. Raises ProtocolViolation, and changes nothing, when it is not its turn."""
        if not self.may(phase):
            raise ProtocolViolation(
                f"phase {phase} under alpha {self._alpha} after {self._batches} batches, {self._trained} trained, "
                f"{self._committed} committed, {self._swapped} updates of the engines (now in {self._swap or 'none'})"
            )
        match phase:
            case Phase.GET_BATCH:
                self._batches += 1
            case Phase.TRAIN:
                self._trained += 1
            case Phase.COMMIT:
                self._committed += 1
            case Phase.RECOMPUTE:
                self._swap = None
                self._swapped += 1
            case _:
                self._swap = phase

    def abandon_update(self) -> None:
        """An UPDATE failed: the engines are resumed on what they had, and the swap starts over."""
        if not self.suspended:
            raise ProtocolViolation(f"nothing is suspended: the engines are in {self._swap or 'no swap'}")
        self._swap = None

    def may(self, phase: Phase) -> bool:
        """Whether it is the turn of `phase`."""
        step = self._batches
        match phase:
            case Phase.GET_BATCH if self._alpha == 0:
                return self._trained == self._committed == step and self._swapped == step + 1
            case Phase.GET_BATCH if self._eager:
                return self._trained == step and self._committed >= step - 1 and self._swapped > 0
            case Phase.GET_BATCH:
                return self._trained == self._swapped == step and self._committed >= step - 1
            case Phase.TRAIN:
                return self._trained == step - 1
            case Phase.COMMIT:
                return self._committed < self._trained and self._swapped > self._committed and self._swap is None
            case Phase.SUSPEND if self._alpha == 0:
                return self._swap is None and self._swapped == self._committed == step
            case Phase.SUSPEND if self._eager:
                return self._swap is None and self._swapped == self._committed
            case Phase.SUSPEND:
                return self._swap is None and self._swapped == step - 1 <= self._committed
            case _:
                return self._swap is _SWAP[_SWAP.index(phase) - 1]
