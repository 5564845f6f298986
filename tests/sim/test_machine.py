"""Step times of a real machine's modes, from its stage times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

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


MEASURED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "mode_times.json").read_text())
"""What `python -m benchmarks.async_modes --times FILE` wrote of the runs that docs/asynchrony.md tells of: the stage
times of every mode, and the step that was measured, which the simulator does not see."""
BEST = "rollart"
OFF = {"areal": 0.12, "draw_again": 0.22}
"""What may be beyond a tenth, as docs/simulator.md tells."""


def measured(name: str) -> StageTimes:
    given = {key: value for key, value in MEASURED[name].items() if key != "step_s"}
    return StageTimes(**given | {"batches": tuple(map(tuple, given["batches"]))})


def predicted(name: str) -> float:
    return predicted_step(measured(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_steps_that_were_measured_are_predicted_within_a_tenth_but_for_what_is_named(name: str) -> None:
    error = predicted(name) / MEASURED[name]["step_s"] - 1
    print(f"{name}: {predicted(name):.2f} s, {error:+.1%}")
    assert abs(error) <= OFF.get(name, 0.10)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MEASURED if name != BEST])
def test_ratios_that_were_measured_are_predicted_within_a_tenth_but_for_what_is_named(name: str) -> None:
    """In tokens, as `benchmarks.async_modes` compares."""

    def tokens_per_s(name: str, step_s: float) -> float:
        return MEASURED[name]["tokens"] / step_s

    ratio = tokens_per_s(BEST, predicted(BEST)) / tokens_per_s(name, predicted(name))
    truth = tokens_per_s(BEST, MEASURED[BEST]["step_s"]) / tokens_per_s(name, MEASURED[name]["step_s"])
    print(f"{BEST} over {name}: {ratio:.2f}, measured {truth:.2f}, {ratio / truth - 1:+.1%}")
    assert abs(ratio / truth - 1) <= OFF.get(name, 0.10)
