"""Short logs to try things on."""

from __future__ import annotations

from typing import Any

from rl.ledger import Ledger
from rl.records import Drop, Fence, Outcome, Reason, Record, StateRef, Step

STATE = StateRef(prefix="state/0000000001-ab/", manifest_sha256="0", full=True)


def common(lsn: int) -> dict[str, Any]:
    return {"lsn": lsn, "nonce": "n", "writer": "w", "time": 0.0}


def step(lsn: int, version: int, base: int | None, full: bool = True, **fields: Any) -> Step:
    state = STATE.model_copy(update={"full": full})
    return Step(**common(lsn), version=version, base=base, state=state, weights_sha256="0", alpha=1, **fields)


def drop(uid: str, outcome: Outcome = Outcome.RETRY, reason: Reason = Reason.STALE) -> Drop:
    return Drop(uid=uid, reason=reason, outcome=outcome)


def history(steps: int, full: bool = True) -> tuple[list[Record], Ledger]:
    """A fence, version 0, and `steps` versions that train one ordinal each."""
    records: list[Record] = [Fence(**common(1)), step(2, 0, None)]
    records += [step(v + 2, v, v - 1, full, trained=(f"{v - 1}.0",)) for v in range(1, steps + 1)]
    ledger = Ledger()
    for record in records:
        ledger.apply(record)
    return records, ledger
