"""How much of a domain's generation is reading prompts and how much is sampling, from its trajectories.

Invariants
- Tokens are counted, not estimated: a turn's fresh tokens are those that came after the turn before; all turns of a
  domain count.
- Seconds are fitted: one turn takes `fixed + fresh * per_fresh + sampled * per_sampled`, each at least 0, by least
  squares over the turns whose time is known. They hold for the engines that were measured, waiting included.
- What is suggested follows from the tokens alone, by the rule that routes single turns (`rl.routing`), and so does not
  depend on what hardware was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from rl.placement import HardwareClass
from rl.trajectory import Trajectory

LEAST_TURNS = 8
"""Turns with a time, below which no seconds are fitted."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation: tokens that were new to the engine, tokens that it sampled, seconds that it took."""

    fresh: int
    sampled: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a turn: of its own, for a fresh token, for a sampled one."""

    fixed: float
    per_fresh: float
    per_sampled: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Of one domain."""

    domain: str
    trajectories: int
    turns: int
    fresh: float
    """Mean new prompt tokens of a turn."""
    sampled: float
    """Mean sampled tokens of a turn."""
    heavy: float
    """Share of the turns that are prefill-heavy."""
    cost: Cost | None
    """None where too little is known."""
    prefill_share: float | None
    """Of the fitted seconds that tokens take, those for fresh ones."""
    runs_on: HardwareClass
    """What is suggested."""

    @property
    def ratio(self) -> float:
        """New prompt tokens for each sampled one."""
        return self.fresh / self.sampled if self.sampled else float("inf")

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "runs_on": self.runs_on.value}


def turns(trajectory: Trajectory) -> list[Turn]:
    """The generations of a trajectory, in order."""
    found: list[tuple[int, int]] = []
    fresh = sampled = 0
    for mask in trajectory.loss_mask:
        if mask:
            sampled += 1
        elif sampled:
            found.append((fresh, sampled))
            fresh, sampled = 1, 0
        else:
            fresh += 1
    if sampled:
        found.append((fresh, sampled))
    spans = [s for s in trajectory.spans if s.stage == "generate"][-len(found) :] if found else []
    timed = len(spans) == len(found)
    return [
        Turn(new, made, spans[at].end - spans[at].start if timed else None) for at, (new, made) in enumerate(found)
    ]


def profile(domain: str, trajectories: Iterable[Trajectory], prefill_heavy: float) -> Profile | None:
    """Of a domain's trajectories; None where they have no turn. `prefill_heavy` is the new prompt tokens for each
    sampled one from which on compute is wanted."""
    count, all_turns = 0, list[Turn]()
    for trajectory in trajectories:
        count += 1
        all_turns += turns(trajectory)
    if not all_turns:
        return None
    fresh = sum(t.fresh for t in all_turns) / len(all_turns)
    sampled = sum(t.sampled for t in all_turns) / len(all_turns)
    heavy = sum(t.fresh > prefill_heavy * t.sampled for t in all_turns) / len(all_turns)
    cost = fit([t for t in all_turns if t.seconds is not None])
    share = None
    if cost is not None and (spent := cost.per_fresh * fresh + cost.per_sampled * sampled) > 0:
        share = cost.per_fresh * fresh / spent
    wanted = HardwareClass.COMPUTE_GPU if fresh > prefill_heavy * sampled else HardwareClass.BANDWIDTH_GPU
    return Profile(domain, count, len(all_turns), fresh, sampled, heavy, cost, share, wanted)


def fit(timed: Sequence[Turn]) -> Cost | None:
    """The costs that explain the turns best; None for too few turns, or turns that are too much alike."""
    if len(timed) < LEAST_TURNS:
        return None
    rows = [(1.0, float(t.fresh), float(t.sampled)) for t in timed]
    seconds = [t.seconds or 0.0 for t in timed]
    best: tuple[float, Cost] | None = None
    for size in (3, 2, 1):
        for chosen in combinations(range(3), size):
            found = _least_squares([[row[c] for c in chosen] for row in rows], seconds)
            if found is None or min(found) < 0:
                continue
            cost = [0.0, 0.0, 0.0]
            for c, value in zip(chosen, found, strict=True):
                cost[c] = value
            errors = (
                (s - sum(x * c for x, c in zip(row, cost, strict=True))) ** 2
                for row, s in zip(rows, seconds, strict=True)
            )
            error = sum(errors)
            if best is None or error < best[0]:
                best = (error, Cost(*cost))
        if best is not None and size == 3:
            break
    return None if best is None else best[1]


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float] | None:
    """The solution of the normal equations; None when they have none, or barely."""
    n = len(rows[0])
    table = [
        [sum(row[i] * row[j] for row in rows) for j in range(n)]
        + [sum(row[i] * value for row, value in zip(rows, values, strict=True))]
        for i in range(n)
    ]
    for at in range(n):
        pivot = max(range(at, n), key=lambda r: abs(table[r][at]))
        table[at], table[pivot] = table[pivot], table[at]
        scale = max(abs(x) for x in table[at][:n])
        if abs(table[at][at]) <= 1e-9 * max(scale, 1e-300) or table[at][at] == 0:
            return None
        for below in range(n):
            if below != at:
                factor = table[below][at] / table[at][at]
                table[below] = [x - factor * y for x, y in zip(table[below], table[at], strict=True)]
    return [table[i][n] / table[i][i] for i in range(n)]
