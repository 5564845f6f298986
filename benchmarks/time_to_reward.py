"""How long until a held-out reward is reached: TRL's own GRPOTrainer, synchronous, against a run.

    python -m benchmarks.time_to_reward [--quick] --json

Both train the preset `long_tail` from one warmed-up model, with the same environments, problems, batches, loss and
learning rate, one after the other on the same machine (`benchmarks.synchronous_trl`). Afterwards every second version
of either is played on the same held-out problems, without latencies. The reward to reach is that of the start plus
`SHARE` of the best rise of TRL's versions. Time counts from the first problem on (`speedup_over_trl`), and from the
start of the command on (`speedup_over_trl_with_start`: a run starts workers and an engine, TRL loads a model).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from benchmarks.held_out import EVERY, kept, reached, rewards
from benchmarks.report import Figure, emit
from benchmarks.whole_run import RunFailed, run, services, warm_model
from flows.configure import load_config
from rl.config.load import dumps
from rl.config.run import RunConfig

PRESET = "long_tail"
SHARE = 0.8


def trl(config: RunConfig, model: Path, out: Path, env: dict[str, str]) -> tuple[dict[int, float], float]:
    """Seconds until each kept version, and those of the process as a whole."""
    (out / "config.json").write_text(dumps(config))
    command = ["-m", "benchmarks.synchronous_trl", str(out / "config.json"), str(model), str(out)]
    began = monotonic()
    done = subprocess.run(
        [sys.executable, *command, "--every", str(EVERY)], env=env, capture_output=True, text=True, timeout=7200
    )
    if done.returncode != 0:
        raise RunFailed(f"TRL ended with code {done.returncode}: {done.stderr[-3000:]}")
    seconds = {int(v): s for v, s in json.loads((out / "times.json").read_text()).items()}
    return seconds, monotonic() - began


def main(quick: bool) -> list[Figure]:
    steps = 10 if quick else 24
    with services() as env, TemporaryDirectory() as scratch:
        base = Path(warm_model(PRESET, (), env))
        sets = [
            "name=to-reward",
            f"model.source={{type: pretrained, path: {base}}}",
            "model.warmstart=null",
            f"training.steps={steps}",
            "evaluation.problems=0",
            "retention.newest=1000",
        ]
        config = load_config(PRESET, [*sets, "tracking.enabled=false"])
        theirs, mine = Path(scratch) / "trl", Path(scratch) / "run"
        theirs.mkdir()
        mine.mkdir()
        measured = run(PRESET, sets, env, first=1)
        seconds = kept(config, mine, env)
        trl_seconds, trl_wall = trl(config, base, theirs, {**os.environ, **env})
        found, trl_found = rewards(config, base, mine, list(seconds)), rewards(config, base, theirs, list(trl_seconds))
    goal = found[0] + SHARE * (max(trl_found.values()) - found[0])
    us, them = reached(goal, found, seconds), reached(goal, trl_found, trl_seconds)
    figures = [
        Figure("reward_at_start", found[0], "held-out reward"),
        Figure("reward_to_reach", goal, "held-out reward"),
        Figure("reward_at_end", found[max(found)], "held-out reward"),
        Figure("trl_reward_at_end", trl_found[max(trl_found)], "held-out reward"),
        Figure("step_s", seconds[max(seconds)] / max(seconds), "s"),
        Figure("trl_step_s", trl_seconds[max(trl_seconds)] / max(trl_seconds), "s"),
        Figure("injected_share", measured.injected, "share of trajectory time"),
    ]
    if us is None or them is None:
        print(f"the reward {goal:.3f} was not reached by {'the run' if us is None else 'TRL'}", file=sys.stderr)
        return figures
    start, trl_start = measured.wall_s - seconds[max(seconds)], trl_wall - trl_seconds[max(trl_seconds)]
    return [
        *figures,
        Figure("seconds_to_reward", us, "s"),
        Figure("trl_seconds_to_reward", them, "s"),
        Figure("speedup_over_trl", them / us, "ratio", 3.0, "higher"),
        Figure("speedup_over_trl_with_start", (them + trl_start) / (us + start), "ratio"),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--json", action="store_true", help="accepted for symmetry: the last line always is JSON")
    emit("time_to_reward", main(parser.parse_args().quick))
