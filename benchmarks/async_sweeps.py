"""One thing varied at a time: alpha, the deviation of latencies, redundancy; on the preset `long_tail`.

    python -m benchmarks.async_sweeps alpha|deviation|redundancy... [--quick] [--minutes 60] --json

Runs are those of `benchmarks.mode_runs`, one after the other: same model, seeds and workload but for what is varied.

- `alpha`: 1, 2, 4, 6 under `rollart`. Throughput, and seconds until the held-out reward that alpha 1 reaches with
  `SHARE` of its best rise (`benchmarks.held_out`); `over_bound`, the step over the work in it, as in
  `benchmarks.async_modes`. The steps count from the one whose batch may have any lag.
- `deviation`: of a turn's latency, at equal mean, without the heavy tail of resets, which would hide it; trajectories
  that go their own way (`sync_plus`) over environments that are stepped together (`sync`), beside RollArt's figures.
- `redundancy`: in `sync_plus`, where a step waits for all it started: spares where almost nothing fails, and where one
  call of `step` in a hundred does, and `first_finished`, which is biased and named so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.held_out import kept, reached, rewards
from benchmarks.mode_runs import Bench, Size, work_bound
from benchmarks.report import Figure, emit
from benchmarks.whole_run import Measured, services

SHARE = 0.8
ALPHAS = (1, 2, 4, 6)
PAPER_DEVIATION = {1: 1.23, 10: 2.27, 5: 1.69, 3: 1.51, 7: 2.18}
"""RollArt's gain of asynchronous over stepped environments, by the deviation of a turn's latency; the ends first."""
EVEN_RESETS = (
    "domains.0.injection.reset_latency={type: constant, seconds: 5}",
    "domains.0.injection.reset_failure=0",
)
FAILING = "domains.0.injection.step_failure=0.01"
FULL_PIPELINE = max(ALPHAS) + 1


def alpha_sweep(bench: Bench, quick: bool) -> list[Figure]:
    size = Size(FULL_PIPELINE, 16 if quick else 32, FULL_PIPELINE)
    runs = {a: bench.run(f"alpha-{a}", size, f"staleness={{alpha: {a}}}", "retention.newest=1000") for a in ALPHAS}
    found = {alpha: m for alpha, m in runs.items() if m is not None}
    if (base := found.get(1)) is None:
        return []
    scores, times = {}, {}
    for alpha, m in found.items():
        with TemporaryDirectory() as scratch:
            out = Path(scratch) / f"alpha-{alpha}"
            out.mkdir()
            times[alpha] = kept(m.config, out, bench.env)
            scores[alpha] = rewards(m.config, bench.model, out, times[alpha])
    start = scores[1][0]
    goal = start + SHARE * (max(scores[1].values()) - start)
    figures = [Figure("score_to_reach", goal, "held-out reward")]
    for alpha, m in found.items():
        figures += [
            Figure(f"alpha_{alpha}_step_s", m.step_s, "s"),
            Figure(f"alpha_{alpha}_over_alpha_1", m.tokens_per_s / base.tokens_per_s, "ratio"),
            Figure(f"alpha_{alpha}_over_bound", m.step_s / work_bound(m), "ratio"),
            Figure(f"alpha_{alpha}_lag_mean", m.lag_mean, "versions"),
            Figure(f"alpha_{alpha}_score_at_end", scores[alpha][max(scores[alpha])], "held-out reward"),
        ]
        if (seconds := reached(goal, scores[alpha], times[alpha])) is not None:
            figures.append(Figure(f"alpha_{alpha}_seconds_to_score", seconds, "s"))
    return figures


def deviation_sweep(bench: Bench, quick: bool) -> list[Figure]:
    size, figures = alternating(quick), []
    for deviation, published in PAPER_DEVIATION.items():
        turn = f"domains.0.injection.step_latency={{type: normal, mean: 10, deviation: {deviation}}}"
        stepped = bench.run(f"sync-{deviation}", size, "staleness.mode=sync", turn, *EVEN_RESETS)
        free = bench.run(f"sync-plus-{deviation}", size, "staleness.mode=sync_plus", turn, *EVEN_RESETS)
        if stepped is not None and free is not None:
            figures += [
                Figure(f"sync_plus_over_sync_deviation_{deviation}", over(free, stepped), "ratio"),
                Figure(f"published_deviation_{deviation}", published, "ratio"),
            ]
    return figures


def redundancy_sweep(bench: Bench, quick: bool) -> list[Figure]:
    size, figures = alternating(quick), []

    def run(mode: str, extra: int, *sets: str) -> Measured | None:
        wish = f"rollout.redundancy={{mode: {mode}, extra_members: {extra}}}"
        label = f"{mode.replace('_', '-')}-{extra}" + "-failing" * bool(sets)
        return bench.run(label, size, wish, "staleness.mode=sync_plus", *sets)

    for named, sets in (("", ()), ("_failing", (FAILING,))):
        base = run("replace_failures", 0, *sets)
        for mode, extra in (("replace_failures", 1), ("replace_failures", 2), ("first_finished", 1)):
            biased = mode == "first_finished"
            if base is None or (biased and sets):
                continue
            if (m := run(mode, extra, *sets)) is not None:
                name = "biased_" * biased + f"{mode}_{extra}{named}"
                figures += [
                    Figure(f"{name}_over_none", over(m, base), "ratio"),
                    Figure(f"{name}_processor_over_none", m.cpu_s / base.cpu_s, "ratio"),
                ]
    return figures


def alternating(quick: bool) -> Size:
    """Where rollout and training take turns, every step but the first counts."""
    return Size(1, 5 if quick else 13)


def over(m: Measured, base: Measured) -> float:
    return m.trajectories_per_s / base.trajectories_per_s


SWEEPS: dict[str, Callable[[Bench, bool], list[Figure]]] = {
    "alpha": alpha_sweep,
    "redundancy": redundancy_sweep,
    "deviation": deviation_sweep,
}


def main(sweeps: list[str], quick: bool, minutes: float) -> list[Figure]:
    with services() as env:
        bench = Bench(env, minutes)
        return [figure for name in sweeps for figure in SWEEPS[name](bench, quick)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", choices=SWEEPS)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no run goes on")
    parser.add_argument("--json", action="store_true", help="accepted for symmetry: the last line always is JSON")
    given = parser.parse_args()
    emit("async_sweeps", main(given.sweeps, given.quick, given.minutes))
