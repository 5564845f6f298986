"""The simulator: how fast it is, and how well it predicts what was published.

    python -m benchmarks.simulator [--quick] --json

`week_3000_gpus_wall_s` is the wall time of one week of 3,000 GPUs (`sim.validation.systems.week`: a mixture of 235B
parameters, four kinds of agentic work, alpha 1, up to 10,240 trajectories unsettled), in this process on one core;
`--quick` runs six hours of it and multiplies. `share_of_predicted_rows_within_10pct` is over the published numbers that
nothing was fitted to; the table says which those are. It takes minutes; `--quick` leaves the slow experiments out.

Why ticks (estimated; the alternatives were not timed): with 10,000 trajectories of some tens of turns in flight a week
has very many turns, and an event loop in Python pays for each of them; arrays of all trajectories, moved a tick at a
time, cost the same per tick however many turns end in it.
"""

from __future__ import annotations

import argparse
from time import perf_counter, process_time

from benchmarks.report import Figure, emit
from sim.cluster import Cluster
from sim.validation.systems import WEEK, week
from sim.validation.table import QUICK, WHOLE, check, share_right

SLICE = 6 * 3600.0


def measure_week(quick: bool) -> list[Figure]:
    """Seconds for the week, and what it did."""
    horizon = SLICE if quick else WEEK
    cluster = Cluster(week(horizon))
    wall, cpu = perf_counter(), process_time()
    cluster.simulate(horizon)
    wall, cpu = perf_counter() - wall, process_time() - cpu
    scale = WEEK / horizon
    steps = len(cluster.runs[0].steps)
    print(f"{horizon / 3600:.0f} h: {steps} steps, {cluster.world.totals.finished} trajectories")
    return [
        Figure("week_3000_gpus_wall_s", wall * scale, "s", goal=60.0),
        Figure("week_3000_gpus_cpu_s", cpu * scale, "s"),
        Figure("week_3000_gpus_trajectories", cluster.world.totals.finished * scale, "count"),
    ]


def measure_rows(quick: bool) -> list[Figure]:
    """The table of predictions, and the share of them that is right."""
    checked = check(QUICK if quick else WHOLE)
    print(f"{'row':50s} {'published':>14s} {'predicted':>9s} {'unit':6s} {'error':>7s}")
    for row in checked:
        print(row)
    fitted = sum(c.row.fitted is not None for c in checked)
    return [
        Figure("share_of_predicted_rows_within_10pct", share_right(checked), "share", goal=1.0, better="higher"),
        Figure("predicted_rows", float(len(checked) - fitted), "count"),
        Figure("fitted_rows", float(fitted), "count"),
        *(Figure(f"row: {c.row.name}", c.predicted, c.row.unit) for c in checked),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="part of the week, and the quick experiments")
    parser.add_argument("--json", action="store_true", help="the last line is JSON (it always is)")
    options = parser.parse_args()
    emit("simulator", [*measure_week(options.quick), *measure_rows(options.quick)])


if __name__ == "__main__":
    main()
