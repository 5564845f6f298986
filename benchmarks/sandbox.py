"""What a sandbox costs: from the call to the result of a program that does nothing, and of code graded by tests.

    python -m benchmarks.sandbox [--quick] --json

The same program without any isolation, in turns within the same run, is what the rest is to be compared with.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable
from statistics import median, quantiles
from time import perf_counter

from benchmarks.report import Figure, emit
from infra.sandbox.grading import Exam, grade
from infra.sandbox.limits import Limits
from infra.sandbox.sandbox import Sandbox

EXAM = Exam("double", ["assert candidate(2) == 4", "assert candidate('ab') == 'abab'"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; the last line is JSON anyway")
    rounds = 30 if parser.parse_args().quick else 200
    full, lesser = Sandbox(Limits()), Sandbox(Limits(), isolation="rlimits")
    nothing = [full.python, "-I", "-S", "-c", "pass"]
    sides: dict[str, Callable[[], object]] = {
        "bare_process": lambda: subprocess.run(nothing, env={}, check=True),
        "sandbox": lambda: full.run(nothing),
        "rlimits": lambda: lesser.run(nothing),
        "graded": lambda: grade(full, "def double(x): return x + x", EXAM),
    }
    milliseconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            start = perf_counter()
            side()
            milliseconds[name].append((perf_counter() - start) * 1000)
    figures = [Figure(f"{name}_p50", median(values), "ms") for name, values in milliseconds.items()]
    figures.append(Figure("sandbox_p95", quantiles(milliseconds["sandbox"], n=20)[-1], "ms"))
    emit("sandbox", figures)


if __name__ == "__main__":
    main()
