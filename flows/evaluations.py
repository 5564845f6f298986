"""The held-out evaluations of a run, as the store keeps them: one object for each version that was evaluated.

Invariant: what is kept is of whole versions, all domains at once; garbage collection leaves it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from infra.store.errors import NotFound
from infra.store.objects import ObjectStore
from rl.config.run import RunConfig
from rl.ledger import Ledger


@dataclass(frozen=True)
class Share:
    """The problems of one difficulty."""

    problems: int
    reward: float
    pass_at: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        passes = "".join(f", pass@{k} {value:.3f}" for k, value in self.pass_at.items())
        return f"reward {self.reward:.3f} over {self.problems} problems{passes}"


@dataclass(frozen=True)
class Evaluation:
    """Mean reward of one domain at one version."""

    version: int
    domain: str
    reward: float
    problems: int
    missing: int
    turns: float
    """Mean turns per problem."""
    truncated: float
    """Share of episodes that a limit ended."""
    samples: int = 1
    """Episodes per problem."""
    pass_at: dict[str, float] = field(default_factory=dict)
    """By k (`rl.pass_at`)."""
    by_difficulty: dict[str, Share] = field(default_factory=dict)
    """By difficulty, for environments that tell it; easiest first."""
    temperature: float | None = None
    solved_at: float | None = None
    """Both as the run asked for them; None in what was kept before they were told."""

    def __str__(self) -> str:
        missing = f", {self.missing} missing" if self.missing else ""
        passes = "".join(f", pass@{k} {value:.3f}" for k, value in self.pass_at.items())
        lines = [
            f"held-out {self.domain} at version {self.version}: reward {self.reward:.3f} over {self.problems} "
            f"problems{missing}{passes}, {self.turns:.1f} turns"
        ]
        if len(self.by_difficulty) > 1:
            lines += [f"  difficulty {name}: {share}" for name, share in self.by_difficulty.items()]
        return "\n".join(lines)


def keep(config: RunConfig, store: ObjectStore, results: list[Evaluation]) -> None:
    """Keep the evaluation of one version, of all domains."""
    store.put(_key(config, results[0].version), json.dumps([asdict(r) for r in results]).encode())


def load(config: RunConfig, store: ObjectStore, version: int) -> list[Evaluation] | None:
    """The kept evaluation of a version; None if there is none, one of fewer problems, samples or k, or one by another
    temperature or, where k are asked for, `solved_at`."""
    try:
        kept = _read(store, _key(config, version))
    except NotFound:
        return None
    asked = config.evaluation
    wanted = set(map(str, asked.pass_at))
    enough = all(
        e.samples >= asked.samples
        and e.problems + e.missing >= asked.problems
        and wanted <= e.pass_at.keys()
        and e.temperature in (None, asked.temperature)
        and (not wanted or e.solved_at in (None, asked.solved_at))
        for e in kept
    )
    return kept if enough else None


def load_all(
    config: RunConfig, store: ObjectStore, known: dict[str, list[Evaluation]] | None = None
) -> list[Evaluation]:
    """Every kept evaluation of the run, by version. `known` are those that the caller read before, which are written
    once and so not read again; what is read is added."""
    known = {} if known is None else known
    keys = sorted(store.keys(f"{config.prefix}evaluations/"))
    for key in keys:
        if key not in known:
            known[key] = _read(store, key)
    return [evaluation for key in keys for evaluation in known[key]]


def pending(config: RunConfig, store: ObjectStore, ledger: Ledger) -> list[int]:
    """The versions of `evaluation.every` that were committed on the live line and are not evaluated yet, oldest
    first."""
    due = [v for v in config.evaluation.due(ledger.head, config.training.steps) if ledger.lag(v) is not None]
    if not due:
        return []
    done = set(store.keys(f"{config.prefix}evaluations/"))
    return [v for v in due if _key(config, v) not in done]


def _read(store: ObjectStore, key: str) -> list[Evaluation]:
    rows = json.loads(store.get(key))
    for row in rows:
        row["by_difficulty"] = {name: Share(**share) for name, share in row.get("by_difficulty", {}).items()}
    return [Evaluation(**row) for row in rows]


def _key(config: RunConfig, version: int) -> str:
    return f"{config.prefix}evaluations/{version:010d}.json"
