"""What modes and spares cost by the policies alone (`benchmarks.policy_clock`): seconds a step, without any machine.

    python -m benchmarks.policies [--quick] --json

- `modes`: groups of 4, 8 % of the tries fail, lengths by chance with a heavy tail; each over `one_off`. `unlike`: the
  Kolmogorov-Smirnov distance of what was trained from what was submitted, over what chance exceeds once in a thousand
  cases; more than 1 is a bias. `given up`: groups that ended without being trained.
- `spares`: groups of 8, by the deviation of lengths and the share of tries that fail; `first_finished` beside them.

`--quick` plays one seed instead of three.
"""

from __future__ import annotations

import argparse
from statistics import fmean
from typing import NamedTuple

from benchmarks.policy_clock import Late, PolicyClock, by_chance, gap
from benchmarks.report import Figure, emit
from infra.tracking.text import text_table
from rl.modes import ModeName
from rl.redundancy import Mode, RedundancyPolicy

NONE = RedundancyPolicy()
FIRST = RedundancyPolicy(Mode.FIRST_FINISHED, extra_members=1)
EXCESS = RedundancyPolicy(Mode.FIRST_FINISHED, extra_members=2, extra_groups=3)
MODES: dict[str, tuple[ModeName, int, RedundancyPolicy, Late]] = {
    "one_off": ("one_off", 1, NONE, "wait"),
    "six_steps_2": ("six_steps", 2, NONE, "wait"),
    "rollart_1": ("rollart", 1, NONE, "wait"),
    "rollart_2": ("rollart", 2, NONE, "wait"),
    "rollart_4": ("rollart", 4, NONE, "wait"),
    "rollart_1_draw_again": ("rollart", 1, NONE, "draw_again"),
    "areal_1": ("areal", 1, NONE, "wait"),
    "biased_rollart_1_first_finished": ("rollart", 1, EXCESS, "wait"),
}
TURNS: tuple[tuple[ModeName, int], ...] = (("rollart", 1), ("sync_plus", 0))
DEVIATIONS, FAILS, SPARES = (0.2, 1.0), (0.01, 0.06, 0.12), (0, 1, 2)


class Played(NamedTuple):
    """What a run came to."""

    step_s: float
    unlike: float
    given_up: float


def played(
    mode: ModeName,
    alpha: int,
    spare: RedundancyPolicy,
    seeds: int,
    deviation: float = 1.0,
    late: Late = "wait",
    size: int = 4,
    fails: float = 0.08,
) -> Played:
    """In the mean of the seeds."""
    found = []
    for seed in range(seeds):
        clock = PolicyClock(mode, alpha, spare, by_chance(deviation, f"{seed}/"), late, size, fails)
        unlike = gap(*clock.run())
        found.append((clock.now / clock.steps, unlike, clock.ledger.dropped_groups.total()))
    return Played(*map(fmean, zip(*found, strict=True)))


def modes(seeds: int) -> list[Figure]:
    found = {name: played(mode, alpha, spare, seeds, late=late) for name, (mode, alpha, spare, late) in MODES.items()}
    base = found["one_off"].step_s
    rows = [
        [name, f"{p.step_s:.1f}", f"{base / p.step_s:.1f}", f"{p.unlike:.2f}", f"{p.given_up:.0f}"]
        for name, p in found.items()
    ]
    print(text_table(["mode, alpha", "seconds a step", "over one_off", "unlike", "given up"], rows))
    return [
        Figure(f"{name}_{field}", getattr(p, field), unit)
        for name, p in found.items()
        for field, unit in (("step_s", "s"), ("unlike", "ratio"), ("given_up", "groups"))
    ]


def spares(seeds: int) -> list[Figure]:
    rows, figures = [], []
    for deviation in DEVIATIONS:
        for fails in FAILS:
            row = {
                f"{mode}_{spare.mode.value}_{spare.extra_members}": played(
                    mode, alpha, spare, seeds, deviation, size=8, fails=fails
                ).step_s
                for mode, alpha in TURNS
                for spare in (*(RedundancyPolicy(extra_members=n) for n in SPARES), FIRST)
            }
            rows.append([f"{deviation}", f"{fails:.0%}", *(f"{value:.2f}" for value in row.values())])
            figures += [Figure(f"{name}_{deviation}_{fails}_step_s", value, "s") for name, value in row.items()]
    print(text_table(["deviation", "fail", *row], rows))
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed instead of three")
    parser.add_argument("--json", action="store_true", help="accepted for symmetry: the last line always is JSON")
    seeds = 1 if parser.parse_args().quick else 3
    emit("policies", [*modes(seeds), *spares(seeds)])
