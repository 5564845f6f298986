"""Step times of a real machine's modes, from its stage times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rl.modes import MODES
from sim.machine import StageTimes, predicted_ratios, predicted_step

L, T = 8.0, 1.5
TIMES = StageTimes("sync_plus", 0, batches=((3.0, 7.0, 5.0, 2.5, L, 6.0, 4.0, 4.5),) * 3, train_s=T)


def of(mode: str, **more: object) -> StageTimes:
    return replace(TIMES, mode=mode, alpha=MODES[mode].alphas[0], **more)


@pytest.mark.slow
def test_modes_take_what_their_order_makes_of_the_stages():
    """`rl.modes` says what each takes at least; none is much above it, with groups like these."""
    found = {mode: predicted_step(of(mode)) for mode in ("sync", "sync_plus", "one_off", "areal", "rollart")}
    assert found["sync"] == found["sync_plus"] == pytest.approx(L + T, rel=0.06)
    assert found["one_off"] == pytest.approx(L, rel=0.08)
    assert 0.97 < found["rollart"] / ((L + T) / 2) < 1.25
    assert found["areal"] < found["rollart"]
    moved = predicted_step(of("sync_plus", push_s=1.0, swap_s=0.5))
    assert moved == pytest.approx(found["sync_plus"] + 1.5, rel=0.05), "alternating, a version's way is waited for"
    pushed = predicted_step(of("rollart", push_s=1.0))
    assert pushed == pytest.approx(found["rollart"] + 0.5, rel=0.06), "a part of what starts under two versions"


def test_no_step_is_shorter_than_its_work():
    quick = of("rollart", work_s=20.0)
    assert predicted_step(quick) == 20.0
    slow = of("sync_plus", work_s=40.0, tokens=0.5)
    assert predicted_ratios({"sync_plus": slow, "rollart": quick}) == {"rollart_over_sync_plus": 4.0}
