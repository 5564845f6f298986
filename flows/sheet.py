"""Samples as text for people.

Invariant: a pure function of samples; what the model generated is told from what it was given, by the loss mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from infra.store.browse import Sample
from infra.tracking.text import text_table
from rl.trajectory import Trajectory

PROMPT, ENVIRONMENT, GENERATED = "prompt", "environment", "generated"
Decoder = Callable[[list[int]], str]


@dataclass(frozen=True)
class Run:
    """Adjacent tokens of one kind and version: `start` to `stop`, exclusive."""

    start: int
    stop: int
    kind: str
    version: int
    logprobs: list[float]


def token_runs(member: Trajectory) -> list[Run]:
    """The tokens of a trajectory, in order."""

    def kind(at: int) -> tuple[str, int]:
        if member.loss_mask[at]:
            return GENERATED, member.versions[at]
        return (PROMPT if at < member.prompt_length else ENVIRONMENT), -1

    runs = []
    for (name, version), adjacent in groupby(range(len(member.token_ids)), key=kind):
        at = list(adjacent)
        runs.append(Run(at[0], at[-1] + 1, name, version, [float(member.logprobs[i]) for i in at]))
    return runs


def groups_table(samples: Iterable[Sample]) -> str:
    """One line per group, and their sum."""
    samples = list(samples)
    head = ("uid", "version", "domain", "fate", "members", "reward", "least", "most", "turns", "generated", "tokens")
    members = [member for sample in samples for member in sample.group.members]
    text = text_table(head, [_row(sample) for sample in samples], left={"domain", "fate"})
    rewards = f", mean reward {fmean(m.reward for m in members):.3f}" if members else ""
    generated, tokens = sum(map(_generated, members)), sum(len(m.token_ids) for m in members)
    return (
        f"{text}\n{len(samples)} groups, {len(members)} trajectories{rewards}, {generated} of {tokens} tokens generated"
    )


def _row(sample: Sample) -> list[str]:
    group = sample.group
    start = [str(group.uid), str(group.version), group.problem.domain]
    if not group.members:
        return [*start, _fate(sample), "0", *["-"] * 6]
    rewards = group.rewards
    return [
        *start,
        _fate(sample),
        str(len(group.members)),
        *(f"{value:.3f}" for value in (fmean(rewards), min(rewards), max(rewards))),
        f"{fmean(m.turns for m in group.members):.1f}",
        str(sum(map(_generated, group.members))),
        str(sum(len(m.token_ids) for m in group.members)),
    ]


def group_sheet(sample: Sample) -> str:
    """A group: its problem, its fate, and a line per member."""
    head = ("member", "reward", "parts", "status", "turns", "generated", "tokens", "versions")
    rows = [
        [
            str(m.member),
            f"{m.reward:.3f}",
            _parts(m),
            m.status.value,
            str(m.turns),
            str(_generated(m)),
            str(len(m.token_ids)),
            ", ".join(str(v) for v in sorted({v for v in m.versions if v >= 0})),
        ]
        for m in sample.group.members
    ]
    table = text_table(head, rows, left={"parts", "status"}) if rows else f"given up: {sample.group.tombstone}"
    return f"{_title(sample)}\n\n{table}\n\n--member shows one of them"


def trajectory_sheet(sample: Sample, member: int, decode: Decoder | None = None) -> str:
    """One trajectory: rewards, messages, and its tokens by who made them; `decode` adds their text."""
    one = sample.group.members[member]
    runs = token_runs(one)
    logprobs = [p for run in runs if run.kind == GENERATED for p in run.logprobs]
    counts = {kind: sum(r.stop - r.start for r in runs if r.kind == kind) for kind in (PROMPT, ENVIRONMENT, GENERATED)}
    lines = [
        _title(sample),
        f"member {one.member} of {len(sample.group.members)}: {one.status.value} after {one.turns} turns, started "
        f"under version {one.start_version}" + (f", try {one.retry + 1}" if one.retry else ""),
        f"reward {one.reward:.3f}: {_parts(one)}; the environment itself gave {one.environment_reward:g}",
        f"{len(one.token_ids)} tokens: {', '.join(f'{n} {kind}' for kind, n in counts.items())}"
        + (f"; log-prob mean {fmean(logprobs):.3f}, least {min(logprobs):.3f}" if logprobs else ""),
        *(f"{key}: {value}" for key, value in one.info.items()),
        "",
        *(_message(m.role, m.content) for m in one.messages),
        "",
        _token_table(one, runs, decode),
    ]
    return "\n".join(lines)


def _token_table(one: Trajectory, runs: list[Run], decode: Decoder | None) -> str:
    head = ["from", "to", "tokens", "loss", "version", "log-prob", "least", "made by"]
    rows = []
    for run in runs:
        generated = run.kind == GENERATED
        figures = (
            [str(run.version), f"{fmean(run.logprobs):.3f}", f"{min(run.logprobs):.3f}"] if generated else ["-"] * 3
        )
        who = "the model" if generated else run.kind
        text = [repr(decode(list(one.token_ids[run.start : run.stop])))] if decode is not None else []
        count = str(run.stop - run.start)
        rows.append([str(run.start), str(run.stop - 1), count, str(int(generated)), *figures, who, *text])
    return text_table(head + ["text"] * (decode is not None), rows, left={"made by", "text"})


def _title(sample: Sample) -> str:
    group, problem = sample.group, sample.group.problem
    return (
        f"group {group.uid} of {problem.domain}: problem {problem.index} ({problem.split}, seed {problem.seed}), "
        f"version {group.version}, {_fate(sample)}\nin {sample.segment}"
    )


def _fate(sample: Sample) -> str:
    given_up = (
        f" (given up: {sample.group.tombstone})" if sample.group.tombstone and sample.fate.state == "open" else ""
    )
    return f"{sample.fate}{given_up}"


def _message(role: str, content: str) -> str:
    """A message with its role; what the model said is marked."""
    mark = ">" if role == "assistant" else " "
    first, *rest = content.splitlines() or [""]
    return "\n".join([f"{mark} {role:9}  {first}", *(f"{mark} {'':9}  {line}" for line in rest)])


def _parts(member: Trajectory) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in member.rewards.items()) or "no reward"


def _generated(member: Trajectory) -> int:
    return int(sum(member.loss_mask))
