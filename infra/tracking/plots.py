"""What a run looks like: its reward curve and the timeline of its stages as PNG, its versions as a text table.

Invariants: a pure function of records and spans; readable at 1200x600; distinguishable without colour vision
(the palettes of Okabe, Ito and Tol, and every series is labelled in place).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from infra.tracking.text import text_table
from rl.records import Record, Rollback, Settle, Step
from rl.trajectory import Span

INK, FAINT, BUBBLE = "#262626", "#8c8c8c", "#e6e6e6"
BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, OLIVE, WINE = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#999933", "#882255",
)  # fmt: skip
STAGES = {
    "train": BLUE, "swap": VERMILION, "push": PURPLE, "restore": WINE, "wait": BUBBLE,
    "generate": GREEN, "environment": ORANGE, "reset": SKY, "score": OLIVE,
}  # fmt: skip
HELD_OUT = (VERMILION, GREEN, PURPLE, ORANGE)


@dataclass(frozen=True)
class Lane:
    """One row of the timeline: a name and its spans, which may overlap."""

    name: str
    spans: list[Span]


def reward_curve(steps: Sequence[Step], evaluations: Sequence[tuple[int, str, float]], path: Path) -> None:
    """Mean training reward by version with its running mean, and the held-out reward as
    (version, domain, reward)."""
    points = [(s.version, s.metrics["reward"]) for s in steps if "reward" in s.metrics]
    figure, axes = _figure()
    if points:
        versions, rewards = zip(*points, strict=True)
        smooth = _running_mean(rewards, max(1, len(rewards) // 8))
        axes.plot(versions, rewards, "o", color=BLUE, alpha=0.35, markersize=5, markeredgewidth=0)
        axes.plot(versions, smooth, color=BLUE, linewidth=2.6, label="training, running mean")
    for at, domain in enumerate(sorted({domain for _, domain, _ in evaluations})):
        held_out = sorted((v, r) for v, d, r in evaluations if d == domain)
        color = HELD_OUT[at % len(HELD_OUT)]
        axes.plot(*zip(*held_out, strict=True), "--", color=color, linewidth=1.2, alpha=0.5)
        axes.plot(*zip(*held_out, strict=True), "D", color=color, markersize=9, label=f"held out, {domain}")
        for version, reward in (held_out[0], held_out[-1]):
            axes.annotate(
                f"{reward:.2f}", (version, reward), xytext=(0, 12), textcoords="offset points",
                ha="center", color=color, fontsize=13, fontweight="bold",
            )  # fmt: skip
    axes.set_xlabel("policy version")
    axes.set_title("Reward", loc="left", fontsize=17, fontweight="bold", color=INK, pad=14)
    axes.grid(axis="y", color=BUBBLE, linewidth=1)
    axes.margins(x=0.03, y=0.14)
    if points or evaluations:
        axes.legend(loc="lower right", frameon=False, fontsize=12)
    else:
        axes.text(0.5, 0.5, "no step was trained yet", transform=axes.transAxes, ha="center", color=FAINT)
    _save(figure, path)


def reward_curves(runs: Mapping[str, Sequence[tuple[int, float]]], path: Path) -> None:
    """The training reward of several runs as (version, reward), each with its running mean and named in place."""
    figure, axes = _figure()
    colors = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, OLIVE)
    for at, (name, points) in enumerate(runs.items()):
        if points:
            versions, rewards = zip(*points, strict=True)
            smooth, color = _running_mean(rewards, max(1, len(rewards) // 8)), colors[at % len(colors)]
            axes.plot(versions, rewards, "o", color=color, alpha=0.25, markersize=4, markeredgewidth=0)
            axes.plot(versions, smooth, color=color, linewidth=2.4, label=name)
    axes.set_xlabel("policy version")
    axes.set_title("Training reward", loc="left", fontsize=17, fontweight="bold", color=INK, pad=14)
    axes.grid(axis="y", color=BUBBLE, linewidth=1)
    axes.margins(x=0.03, y=0.14)
    if any(runs.values()):
        axes.legend(loc="lower right", frameon=False, fontsize=12)
    _save(figure, path)


def timeline(lanes: Sequence[Lane], path: Path) -> None:
    """One row per lane. Where its spans overlap, the height says how many run at once (relative to the lane's
    most); grey is a bubble: nothing runs, or it waits. The share at the right is of the time it is busy."""
    lanes = [lane for lane in lanes if lane.spans]
    figure, axes = _figure(left=0.105, right=0.92)
    begin = min((s.start for lane in lanes for s in lane.spans), default=0.0)
    end = max((s.end for lane in lanes for s in lane.spans), default=1.0)
    for row, lane in enumerate(lanes):
        bottom = len(lanes) - 1 - row - 0.36
        axes.broken_barh([(0, end - begin)], (bottom, 0.72), facecolors=BUBBLE)
        stages = list(dict.fromkeys(s.stage for s in lane.spans))
        for stage in stages:
            spans = [s for s in lane.spans if s.stage == stage and stage != "wait"]
            _draw(axes, spans, begin, end, bottom, STAGES.get(stage, FAINT), whole=len(stages) > 1)
        busy = busy_intervals([s for s in lane.spans if s.stage != "wait"])
        share = sum(b - a for a, b in busy) / max(end - begin, 1e-9)
        axes.text(1.012, bottom + 0.36, f"{share:.0%}", transform=axes.get_yaxis_transform(), va="center",
                  color=INK, fontsize=13)  # fmt: skip
    axes.text(1.012, len(lanes) - 0.42, "busy", transform=axes.get_yaxis_transform(), color=FAINT, fontsize=11)
    axes.set_yticks(range(len(lanes)), [lane.name for lane in reversed(lanes)])
    axes.tick_params(axis="y", length=0, labelsize=13)
    axes.set_ylim(-0.6, max(len(lanes), 1) - 0.4)
    axes.set_xlim(0, end - begin)
    axes.set_xlabel("seconds")
    axes.spines["left"].set_visible(False)
    axes.set_title("Stages", loc="left", fontsize=17, fontweight="bold", color=INK, pad=14)
    # A lane of one stage is named by its label already.
    mixed = [{s.stage for s in lane.spans} - {"wait"} for lane in lanes if len({s.stage for s in lane.spans}) > 1]
    for stage in [s for s in STAGES if any(s in stages for stages in mixed)] + ["bubble"]:
        axes.broken_barh([], (0, 0), facecolors=STAGES.get(stage, BUBBLE), label=stage)
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=9,
        frameon=False,
        fontsize=12,
        handlelength=1,
        handleheight=1,
    )
    _save(figure, path)


def _draw(axes: Axes, spans: list[Span], begin: float, end: float, bottom: float, color: str, whole: bool) -> None:
    """One stage of one lane: bars of full height if `whole`, else as high as many run at once."""
    if whole:
        least = (end - begin) / 700  # shorter ones would not be seen
        bars = [(a - begin, max(b - a, least)) for a, b in busy_intervals(spans)]
        axes.broken_barh(bars, (bottom, 0.72), facecolors=color)
        return
    times, counts = concurrency(spans)
    top = max(counts, default=0)
    if top:
        heights = [bottom + 0.72 * n / top for n in counts]
        axes.fill_between([t - begin for t in times], bottom, heights, step="post", color=color, linewidth=0)


def busy_intervals(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """The union of the spans, as disjoint intervals in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((s.start, s.end) for s in spans if s.end > s.start):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def concurrency(spans: Sequence[Span]) -> tuple[list[float], list[int]]:
    """How many spans run from each moment on: (times, counts), ending with a count of 0."""
    changes: Counter[float] = Counter()
    for span in spans:
        if span.end > span.start:
            changes[span.start] += 1
            changes[span.end] -= 1
    times, counts, running = [], [], 0
    for moment, change in sorted(changes.items()):
        running += change
        times.append(moment)
        counts.append(running)
    return times, counts


def idle_ratio(spans: Sequence[Span], begin: float, end: float) -> float:
    """Share of the time from `begin` to `end` in which none of the spans runs."""
    cut = (Span(s.stage, max(s.start, begin), min(s.end, end)) for s in spans)
    busy = sum(b - a for a, b in busy_intervals(list(cut)))
    return 1.0 - busy / (end - begin) if end > begin else 0.0


VERSION_COLUMNS = ("version", "lsn", "base", "reward", "lag max", "trained", "dropped", "time")


def version_rows(records: Iterable[Record]) -> list[dict[str, str]]:
    """One row per version, by column."""
    rows = [["" if cell == "-" else cell for cell in row] for row in _rows(records)]
    return [dict(zip(VERSION_COLUMNS, row, strict=True)) for row in rows]


def versions_table(records: Sequence[Record], more: Mapping[str, Mapping[int, str]] | None = None) -> str:
    """One line per version: where it is in the log, what it was trained on, and with what result. `more` are further
    columns, by name, of what to say of each version."""
    head = VERSION_COLUMNS
    rows = [[*row, *(_cell(column, row[0]) for column in (more or {}).values())] for row in _rows(records)]
    return text_table([*head, *(more or {})], rows, left={"dropped", "time", *(more or {})})


def _cell(column: Mapping[int, str], version: str) -> str:
    return column.get(int(version), "-") if version.isdecimal() else "-"


def _rows(records: Iterable[Record]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    dropped: Counter[str] = Counter()
    for record in records:
        if isinstance(record, Step | Settle):
            dropped.update(drop.reason.value for drop in record.dropped)
        when = datetime.fromtimestamp(record.time, UTC).strftime("%Y-%m-%d %H:%M:%S")
        if isinstance(record, Step):
            reward, lag = record.metrics.get("reward"), record.metrics.get("lag_max")
            rows.append((
                str(record.version),
                str(record.lsn),
                "-" if record.base is None else str(record.base),
                "-" if reward is None else f"{reward:.3f}",
                "-" if lag is None else f"{lag:.0f}",
                str(len(record.trained)),
                ", ".join(f"{n} {reason}" for reason, n in sorted(dropped.items())) or "-",
                when,
            ))  # fmt: skip
            dropped.clear()
        elif isinstance(record, Rollback):
            rows.append((f"back to {record.to}", str(record.lsn), "-", "-", "-", "-", "-", when))
    return rows


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean over up to `width` values on either side."""
    return [fmean(values[max(0, at - width) : at + width + 1]) for at in range(len(values))]


def _figure(left: float = 0.07, right: float = 0.97) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(12, 6), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((left, 0.12, right - left, 0.75))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=12)
    axes.xaxis.label.set(color=INK, fontsize=13)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True, steps=[1, 2, 5, 10]))
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
