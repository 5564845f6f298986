"""What the demo shows when it is done.

Invariant: every number it prints was read from the store or measured by this run.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console

from flows.report import Report


def show(console: Console, directory: Path, report: Report) -> None:
    """Copy the report to the top of the demo's directory and print what to look at."""
    for path in (report.json_path, report.reward_png, report.timeline_png):
        shutil.copy(path, directory / path.name)
    f = report.figures
    console.print(report.table, highlight=False, soft_wrap=True)
    console.print(
        f"\nheld-out reward {f['heldout_reward_before']:.2f} -> {f['heldout_reward_after']:.2f}, "
        f"training reward {f['train_reward_first_fifth']:.2f} -> {f['train_reward_last_fifth']:.2f} "
        f"(first and last fifth), {f['versions']:.0f} versions, {f['trajectories']:.0f} trajectories, "
        f"largest lag {f['lag_max']:.0f}, {f['wall_s']:.0f} s\n\n"
        f"reward curve    {directory / 'reward.png'}\n"
        f"stage timeline  {directory / 'timeline.png'}\n"
        f"figures         {directory / 'report.json'}\n"
        f"run, logs       {report.json_path.parent}\n\n"
        f"Look around: `ROLLMILL_HOME={directory} rollmill up` starts the services again on this demo's data and "
        f"prints the addresses of the Prefect and MLflow UIs; `ROLLMILL_HOME={directory} rollmill down` stops them.",
        highlight=False,
        soft_wrap=True,
    )
