"""The stage timeline as one HTML file that needs nothing else: no script from elsewhere, no network.

    one row per lane: grey where nothing runs (a bubble), colour where something does; the height says how much at once
    a slider stretches the time; pointing at a bar tells its stage, when it began and how long it took

Invariants: a pure function of the lanes; text from a run is escaped; the file stays below a few megabytes, for a lane
is drawn with at most `MOST` bars.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from infra.tracking.plots import BUBBLE, FAINT, INK, STAGES, Lane, busy_intervals, concurrency
from rl.trajectory import Span

MOST = 4000
WIDTH, ROW, BAR = 1200.0, 46, 34

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<style>
body {{ font: 14px system-ui, sans-serif; color: {ink}; margin: 24px; }}
h1 {{ font-size: 20px; }} table {{ border-collapse: collapse; margin-top: 16px; }}
td, th {{ padding: 2px 14px 2px 0; text-align: right; }} td:first-child, th:first-child {{ text-align: left; }}
.frame {{ display: flex; }} .names {{ flex: none; width: 110px; padding-top: 0; }}
.names div {{ height: {row}px; line-height: {bar}px; }} .chart {{ overflow-x: auto; flex: auto; }}
.key span {{ display: inline-block; width: 12px; height: 12px; margin: 0 4px 0 14px; vertical-align: -1px; }}
</style></head><body>
<h1>{title}</h1>
<p class="key">{key}</p>
<p><label>Stretch <input type="range" min="1" max="40" value="1" step="0.5"
 oninput="document.getElementById('t').style.width = 100 * this.value + '%'"></label> {seconds:.1f} seconds in all</p>
<div class="frame"><div class="names">{names}</div><div class="chart">
<svg id="t" viewBox="0 0 {width:g} {height:g}" preserveAspectRatio="none"
 style="width:100%;height:{height:g}px">{body}</svg>
</div></div>
<table><tr><th>lane</th><th>busy</th><th>bubble</th><th>spans</th><th>most at once</th></tr>{rows}</table>
</body></html>
"""


def timeline_page(lanes: Sequence[Lane], title: str, path: Path) -> None:
    """Write the page of these lanes. Times are shown in seconds from the first span on."""
    lanes = [lane for lane in lanes if lane.spans]
    begin = min((s.start for lane in lanes for s in lane.spans), default=0.0)
    end = max((s.end for lane in lanes for s in lane.spans), default=1.0)
    scale = WIDTH / max(end - begin, 1e-9)
    body, rows = [], []
    for at, lane in enumerate(lanes):
        top = at * ROW
        body.append(f'<rect x="0" y="{top}" width="{WIDTH:g}" height="{BAR}" fill="{BUBBLE}"/>')
        work = [s for s in lane.spans if s.stage != "wait"]
        stages = list(dict.fromkeys(s.stage for s in work))
        for stage in stages:
            spans = [s for s in work if s.stage == stage]
            draw = _bars if len(stages) > 1 else _hill
            body += draw(spans, stage, begin, scale, top)
        busy = sum(b - a for a, b in busy_intervals(work)) / max(end - begin, 1e-9)
        most = max(concurrency(work)[1], default=0)
        cells = (escape(lane.name), f"{busy:.1%}", f"{1 - busy:.1%}", len(work), most)
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    known = list(dict.fromkeys(s.stage for lane in lanes for s in lane.spans if s.stage != "wait"))
    key = [f'<span style="background:{STAGES.get(s, FAINT)}"></span>{escape(s)}' for s in known]
    page = PAGE.format(
        title=escape(title),
        ink=INK,
        row=ROW,
        bar=BAR,
        width=WIDTH,
        height=max(1, len(lanes)) * ROW,
        seconds=end - begin,
        key="".join([*key, f'<span style="background:{BUBBLE}"></span>bubble']),
        names="".join(f"<div>{escape(lane.name)}</div>" for lane in lanes),
        body="".join(body),
        rows="".join(rows),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)


def _bars(spans: Sequence[Span], stage: str, begin: float, scale: float, top: float) -> list[str]:
    """Bars of full height, one per span; of too many only the longest."""
    longest = sorted(spans, key=lambda s: s.start - s.end)[:MOST]
    color, name = STAGES.get(stage, FAINT), escape(stage)
    return [
        f'<rect x="{(s.start - begin) * scale:.2f}" y="{top}" width="{max((s.end - s.start) * scale, 0.4):.2f}" '
        f'height="{BAR}" fill="{color}">'
        f"<title>{name}: {s.start - begin:.2f} s, {s.end - s.start:.3f} s long</title></rect>"
        for s in longest
    ]


def _hill(spans: Sequence[Span], stage: str, begin: float, scale: float, top: float) -> list[str]:
    """One outline, as high as many run at once."""
    times, counts = concurrency(spans)
    if not times:
        return []
    every = -(-len(times) // MOST)  # of neighbouring moments the highest is drawn
    steps = [(times[at], max(counts[at : at + every])) for at in range(0, len(times), every)]
    most = max(count for _, count in steps) or 1
    path = [f"M{(times[0] - begin) * scale:.2f} {top + BAR}"]
    path += [f"H{(time - begin) * scale:.2f}V{top + BAR * (1 - count / most):.1f}" for time, count in steps]
    path.append(f"H{(times[-1] - begin) * scale:.2f}V{top + BAR}Z")
    told = f"<title>{escape(stage)}: up to {most} at once</title>"
    return [f'<path d="{"".join(path)}" fill="{STAGES.get(stage, FAINT)}">{told}</path>']
