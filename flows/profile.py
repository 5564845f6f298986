"""`rollmill profile`: what each domain's generation consists of, and on which hardware it should run.

Invariant: it only reads.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from flows.command import ConfigArgument, SetOption, console, one_line_errors, services
from rl.errors import ConfigError

if TYPE_CHECKING:
    from infra.store.browse import Browser
    from rl.profile import Profile
    from rl.trajectory import Trajectory


@one_line_errors
def profile(
    config: ConfigArgument,
    overrides: SetOption = [],  # noqa: B006  typer copies it
    groups: Annotated[int, typer.Option(min=1, help="Newest groups of each domain to look at.")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Measure a run: prompt and answer of each domain's turns, and the hardware class that suits them."""
    from flows.configure import load_config

    settled = load_config(config, overrides)
    with services(("s3",)):
        from flows.prepare import join_run
        from infra.store.browse import Browser
        from rl.profile import profile as measure

        run, log = join_run(settled)
        browser = Browser(log.store, run.prefix, {})
        trajectories = _trajectories(browser, [d.name for d in run.domains], groups)
        heavy = run.engine.routing.prefill_heavy
        found = [p for d in run.domains if (p := measure(d.name, trajectories[d.name], heavy)) is not None]
    if not found:
        raise ConfigError(f"run {run.prefix.rstrip('/')!r} has no trajectories yet; train it for a step first")
    if as_json:
        print(json.dumps({"prefill_heavy": heavy, "domains": [p.as_json() for p in found]}, indent=2))
        return
    declared = {d.name: d.runs_on for d in run.domains}
    console.print(_table(found, declared), highlight=False, soft_wrap=True, markup=False)


def _trajectories(browser: Browser, domains: list[str], groups: int) -> dict[str, list[Trajectory]]:
    """Of the newest groups of each domain."""
    found: dict[str, list[Trajectory]] = {name: [] for name in domains}
    taken: Counter[str] = Counter()
    for domain, members in _groups(browser):
        if domain in found and taken[domain] < groups:
            found[domain] += members
            taken[domain] += 1
        if all(taken[name] >= groups for name in domains):
            break
    return found


def _groups(browser: Browser) -> Iterator[tuple[str, list[Trajectory]]]:
    for sample in browser.samples():
        if sample.group.members:
            yield sample.group.problem.domain, sample.group.members


def _table(found: list[Profile], declared: Mapping[str, str | None]) -> str:
    from infra.tracking.text import text_table

    head = ["domain", "trajectories", "turns", "new prompt", "sampled", "ratio", "heavy turns", "prefill time"]
    rows = []
    for p in found:
        share = "-" if p.prefill_share is None else f"{p.prefill_share:.0%}"
        counts = [str(p.trajectories), f"{p.turns / p.trajectories:.1f}", f"{p.fresh:.1f}", f"{p.sampled:.1f}"]
        rows.append([p.domain, *counts, f"{p.ratio:.2f}", f"{p.heavy:.0%}", share, p.runs_on.value])
    lines = [
        text_table([*head, "runs_on"], rows, left={"domain", "runs_on"}),
        "",
        "Means: turns of a trajectory; new prompt tokens and sampled tokens of a turn.",
        *(
            f"--set domains.{at}.runs_on={p.runs_on.value}"
            for at, p in enumerate(found)
            if declared[p.domain] != p.runs_on.value
        ),
    ]
    return "\n".join(lines)
