"""Environments of GEM (`gem-llm`), unchanged: text in, text out.

Invariant: only for a process of its own (`environment: child`), as they draw from the global random generators.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

from envs.adapters.translation import plain, seed_of
from envs.protocol import Hints, Needs, Step, SyncEnvironment
from rl.trajectory import Message, Problem


class Gem(SyncEnvironment):
    """The environment that GEM has registered as `id`, made with the keywords `options`. A problem is a seed."""

    hints: ClassVar[Hints] = Hints(expected_turns=8, prompt_tokens=250, response_tokens=40)
    needs: ClassVar[Needs] = Needs(memory_mb=200)

    def __init__(self, id: str, options: dict[str, Any] | None = None):
        import gem

        self._env = gem.make(id, **(options or {}))
        self._seed: int | None = None

    def reset_sync(self, problem: Problem) -> list[Message]:
        self._seed = seed_of(problem)
        return [Message("user", _with_suffix(*self._env.reset(seed=self._seed)))]

    def step_sync(self, action: str) -> Step:
        observation, reward, terminated, truncated, info = self._env.step(action)
        text = str(observation) if terminated or truncated else _with_suffix(observation, info)
        return Step(Message("user", text), float(reward), bool(terminated), bool(truncated), plain(info))

    def fingerprint(self) -> object:
        return self._seed

    def random_action(self, rng: random.Random) -> str:
        state = random.getstate()
        random.seed(rng.random())
        try:
            return self._env.sample_random_action()
        finally:
            random.setstate(state)


def _with_suffix(observation: object, info: dict[str, Any]) -> str:
    """With what GEM wants to be said after each observation."""
    return "\n".join(filter(None, (str(observation), info.get("suffix"))))
