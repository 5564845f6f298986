"""Pictures of a plan: where the time of its steps goes, and the plans that were tried.

Invariants: pure functions of results; readable at 1200x600; distinguishable without colour vision.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sim.search import Plan
from sim.simulate import Result

TRAIN, WAIT, PUBLISH, BEST = "#0072b2", "#e6e6e6", "#cc79a7", "#d55e00"


def steps(result: Result, path: Path) -> None:
    """One bar per step: waiting for its batch, training, publishing."""
    figure, axes = _axes("Steps", "seconds of the virtual clock")
    for step in result.steps:
        row = step.version
        for begin, end, color in (
            (step.asked, step.batch, WAIT), (step.batch, step.trained, TRAIN), (step.trained, step.committed, PUBLISH),
        ):  # fmt: skip
            axes.broken_barh([(begin, end - begin)], (row - 0.38, 0.76), facecolors=color)
    for color, label in ((WAIT, "waits for a batch"), (TRAIN, "trains"), (PUBLISH, "publishes")):
        axes.broken_barh([], (0, 0), facecolors=color, label=label)
    axes.set_ylabel("version")
    axes.legend(loc="lower right", frameon=False)
    _save(figure, path)


def plans(tried: Sequence[Plan], path: Path) -> None:
    """Every plan by what it costs and how fast it is; the best one is named."""
    figure, axes = _axes("Plans", "price of a million trajectories, in hours of one H20")
    axes.plot([p.result.cost for p in tried], [p.result.tokens_per_s for p in tried], "o", color=TRAIN, alpha=0.5)
    best = tried[0]
    axes.plot([best.result.cost], [best.result.tokens_per_s], "D", color=BEST, markersize=10, label=best.label)
    axes.set_ylabel("trained tokens per second")
    axes.legend(loc="upper right", frameon=False)
    _save(figure, path)


def _axes(title: str, below: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(12, 6), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.08, 0.12, 0.88, 0.76))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_title(title, loc="left", fontsize=17, fontweight="bold")
    axes.set_xlabel(below)
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
