"""Kills until the store must have lost something, and an audit that shows that it has not.

    python -m benchmarks.crash --kills 200 [--real 20] [--seed 0] --json

`--real` of the kills hit the processes of a real run: flows, engine, trainer, driver (`benchmarks.crash.real`). The
others hit light processes that do nothing but the store's protocol (`benchmarks.crash.protocol`), on a server that is
killed too. The audit reads only the store; what it holds against it is what each process was told before it died.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from benchmarks.crash import protocol, real
from benchmarks.report import Figure, emit
from infra.services import supervisor
from infra.services.endpoints import environment
from infra.store.audit import Audit
from rl.account import Kind


def main(kills: int, real_kills: int, seed: int) -> list[Figure]:
    audits: list[Audit] = []
    failures: list[str] = []
    stuck: list[str] = []
    done = real_done = zombies = 0
    if kills > real_kills:
        began = monotonic()
        with TemporaryDirectory(prefix="rollmill-crash-") as name:
            home = Path(name)
            try:
                ours = environment(supervisor.up(home, supervisor.AUTO, ["s3"]))
                os.environ.update(ours)
                outcome = protocol.run(kills - real_kills, seed, home, ours, say)
            finally:
                supervisor.down(home)
        assert outcome.audit is not None
        audits.append(outcome.audit)
        failures, stuck, zombies = outcome.failures, outcome.stuck, outcome.zombies
        done = sum(outcome.kills.values())
        say(f"protocol: {dict(outcome.kills)}, {zombies} zombies, in {monotonic() - began:.0f} s")
    if real_kills:
        began = monotonic()
        result = real.run(real_kills, seed, say)
        audits.append(result.audit)
        real_done = sum(result.kills.values())
        say(f"real: {dict(result.kills)} in {monotonic() - began:.0f} s")
    for finding in [f for found in audits for f in found.findings]:
        say(str(finding))
    for text in failures + stuck:
        say(text)

    def count(kind: Kind) -> int:
        return sum(found.count(kind) for found in audits)

    return [
        Figure("kills", done + real_done, "processes killed"),
        Figure("real_kills", real_done, "processes killed"),
        Figure("lost", count(Kind.LOST) + len(stuck), "records, problems, writes", goal=0),
        Figure("doubled", count(Kind.DOUBLED), "attempts, problems", goal=0),
        Figure("staleness_violations", count(Kind.STALE), "samples", goal=0),
        Figure("unreadable", count(Kind.UNREADABLE), "objects", goal=0),
        Figure("broken_rules", count(Kind.BROKEN), "records", goal=0),
        Figure("unforeseen_ends", len(failures), "processes", goal=0),
        Figure("zombies", zombies, "trainers"),
        Figure("versions", sum(len(found.account.states) for found in audits), "commits"),
        Figure("trained", sum(len(found.account.trained) for found in audits), "groups"),
        Figure("segments", sum(found.segments for found in audits), "objects read"),
    ]


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crash", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="in all")
    parser.add_argument("--real", type=int, default=0, help="how many of them hit a real run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry: the last line always is JSON")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the servers end with it
    figures = main(arguments.kills, arguments.real, arguments.seed)
    emit("crash", figures)
    sys.exit(any(figure.met is False for figure in figures))
