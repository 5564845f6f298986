"""Runs side by side.

Invariant: made from the stores' records and configurations alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from flows.evaluations import load_all
from flows.prepare import differences
from infra.store.objects import ObjectStore
from infra.tracking.plots import reward_curves
from infra.tracking.text import text_table
from rl.config.load import plain
from rl.records import Step

if TYPE_CHECKING:
    from flows.runs import Seen

NOT_COMPARED = ("name", "tenant", "store", "tracking")


def comparison(runs: Sequence[Seen], store: ObjectStore) -> str:
    """Figures, differing fields, and where MLflow compares them."""
    figures = [_figures(run, store) for run in runs]
    names = [run.name for run in runs]
    rows = [[name, *(f[name] for f in figures)] for name in figures[0]]
    parts = [text_table(["figure", *names], rows, left={"figure"})]
    trees = [plain(run.config) for run in runs]
    fields = sorted({path for tree in trees[1:] for path in differences(trees[0], tree)})
    fields = [f for f in fields if f.split(".")[0] not in NOT_COMPARED]
    if fields:
        rows = [[field, *(_shown(_at(tree, field)) for tree in trees)] for field in fields]
        parts.append(text_table(["field", *names], rows, left={"field", *names}))
    else:
        parts.append("their configurations are the same")
    if address := _mlflow(runs):
        parts.append(f"in MLflow: {address}")
    return "\n\n".join(parts)


def plot_rewards(runs: dict[str, list[Step]], path: Path) -> None:
    """The training reward of every run by version, as a PNG."""
    reward_curves({name: [(s.version, s.metrics["reward"]) for s in steps if "reward" in s.metrics]
                   for name, steps in runs.items()}, path)  # fmt: skip


def _figures(run: Seen, store: ObjectStore) -> dict[str, str]:
    steps = run.steps
    rewards = [s.metrics["reward"] for s in steps if "reward" in s.metrics]
    fifth = max(1, len(rewards) // 5)
    evaluations = load_all(run.config, store)
    held_out = [
        fmean([e.reward for e in evaluations if e.version == v]) for v in sorted({e.version for e in evaluations})
    ]
    seconds = steps[-1].time - run.records[0].time if steps else 0.0
    dropped = sum(s.metrics.get("dropped", 0.0) for s in steps)
    return {
        "versions": run.head,
        "reward, first fifth": f"{fmean(rewards[:fifth]):.3f}" if rewards else "-",
        "reward, last fifth": f"{fmean(rewards[-fifth:]):.3f}" if rewards else "-",
        "reward, best": f"{max(rewards):.3f}" if rewards else "-",
        "held out, first": f"{held_out[0]:.3f}" if held_out else "-",
        "held out, last": f"{held_out[-1]:.3f}" if held_out else "-",
        "largest lag": f"{max((s.metrics.get('lag_max', 0.0) for s in steps), default=0):.0f}",
        "trained groups": str(sum(len(s.trained) for s in steps)),
        "dropped attempts": f"{dropped:.0f}",
        "trained tokens": f"{sum(s.metrics.get('tokens', 0.0) for s in steps):.0f}",
        "seconds": f"{seconds:.0f}",
        "seconds per version": f"{seconds / len(steps):.2f}" if steps else "-",
    }


def _at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        inside = dict(enumerate(tree)) if isinstance(tree, list) else tree or {}
        tree = inside.get(int(key) if isinstance(tree, list) else key)
    return tree


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _mlflow(runs: Sequence[Seen]) -> str | None:
    """MLflow's page that compares their runs, where it is up and has them."""
    from infra.services.supervisor import endpoints
    from infra.tracking.server import MlflowRun

    default = os.environ.get("MLFLOW_TRACKING_URI") or endpoints().mlflow_uri
    found = []
    for run in runs:
        uri = run.config.tracking.uri or default
        if uri is None or uri != (runs[0].config.tracking.uri or default):
            return None
        try:
            found.append(MlflowRun(run.config, uri, owner=False).known())
        except Exception:  # a view of what is there: no server, no link
            return None
    if None in found:
        return None
    ids, experiments = ([pair[at] for pair in found if pair is not None] for at in (1, 0))
    return f"{uri}/#/compare-runs?runs={json.dumps(ids)}&experiments={json.dumps(sorted(set(experiments)))}"
