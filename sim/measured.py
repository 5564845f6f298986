"""From what a run recorded to what a scenario asks for: the work of its domains, with measured stage times.

Invariants: pure; means and standard deviations of what was observed, nothing is assumed about a tail; a domain that
has no trajectory is an error, for its times would be made up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import log
from statistics import fmean, pstdev

from rl.errors import ConfigError
from rl.trajectory import Group, Trajectory
from sim.config import DomainWork, Latency


def measured_domains(groups: Iterable[Group]) -> tuple[DomainWork, ...]:
    """The domains of these groups. Raises ConfigError when there is none with members."""
    by_domain: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        if group.members:
            by_domain[group.problem.domain].append(group)
    if not by_domain:
        raise ConfigError("the run has no trajectories to measure; let it run first")
    total = sum(map(len, by_domain.values()))
    return tuple(_domain(name, found, len(found) / total) for name, found in sorted(by_domain.items()))


def seconds_per_token(groups: Iterable[Group]) -> float:
    """Mean time of one generated token in its sequence, waiting in the engine included."""
    members = [member for group in groups for member in group.members]
    tokens = sum(member.generated_tokens for member in members)
    return sum(sum(_spans([member], "generate")) for member in members) / max(1, tokens)


def _domain(name: str, groups: Sequence[Group], weight: float) -> DomainWork:
    members = [member for group in groups for member in group.members]
    turns = [max(1, member.turns) for member in members]
    total = sum(turns)
    generated = [max(1, m.generated_tokens) / t for m, t in zip(members, turns, strict=True)]
    prompts = [member.prompt_length for member in members]
    observed = sum(len(m.token_ids) - m.prompt_length - m.generated_tokens for m in members)
    return DomainWork(
        name=name,
        weight=weight,
        turns=(min(turns), max(turns)),
        prompt_tokens=fmean(prompts),
        observation_tokens=max(0.0, observed / total),
        response_tokens=sum(m.generated_tokens for m in members) / total,
        problem_spread=0.0,
        member_spread=pstdev([log(tokens) for tokens in generated]),
        turn_spread=0.0,
        reset=_latency(_spans(members, "reset")),
        step=_latency(_spans(members, "environment")),
        score=_latency(_spans(members, "score")),
    )


def _spans(members: Iterable[Trajectory], stage: str) -> list[float]:
    return [span.end - span.start for member in members for span in member.spans if span.stage == stage]


def _latency(seconds: Sequence[float]) -> Latency:
    return Latency(mean=fmean(seconds), sd=pstdev(seconds)) if seconds else Latency(mean=0.0)
