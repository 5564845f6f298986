"""200 kills at random: 180 among processes that only speak the store's protocol, 20 in a real run."""

from __future__ import annotations

import json
import subprocess
import sys
from random import Random

import pytest

from benchmarks.crash.real import DRIVER, WEIGHTS, blow


def test_blows_hit_every_part_spare_the_driver_till_last_and_never_exceed_what_is_left() -> None:
    chance = Random(0)
    for left in (1, 2, 3, 20) * 50:
        parts = blow(chance, left)
        assert 1 <= len(parts) <= max(1, left - 1) and len(set(parts)) == len(parts)
        assert DRIVER not in parts[:-1] and (left > 1 or parts == [DRIVER])
    assert {part for _ in range(200) for part in blow(chance, 20)} == set(WEIGHTS)


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(1200)
def test_nothing_is_lost_or_doubled_by_kills() -> None:
    command = [sys.executable, "-m", "benchmarks.crash", "--kills", "200", "--real", "20", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-8000:]
    figures = {f["name"]: f["value"] for f in json.loads(done.stdout.splitlines()[-1])["figures"]}
    assert (figures["kills"], figures["real_kills"]) == (200, 20), output[-4000:]
    wrong = ("lost", "doubled", "staleness_violations", "unreadable", "broken_rules", "unforeseen_ends")
    assert not any(figures[name] for name in wrong), output[-8000:]
    assert figures["versions"] > 5 and figures["trained"] > 5, output[-4000:]
