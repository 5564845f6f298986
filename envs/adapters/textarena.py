"""Games of textarena for one player, unchanged.

    environment: child
    environment_options: {environment: "envs.adapters.textarena:TextArena", options: {id: TowerOfHanoi-v0}}

Invariants
- Only for a process of its own, as the games draw from Python's global generator.
- The policy is told what is new since its last turn, and nothing twice: the game's own rendering of all that was said
  would be the conversation again.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

from envs.adapters.translation import plain, seed_of
from envs.protocol import Hints, Mistake, Needs, Step, SyncEnvironment
from rl.trajectory import Message, Problem


class TextArenaFailed(Exception):
    """The library gave something else than a reward for a game's only player."""


class TextArena(SyncEnvironment):
    """The game that textarena has registered as `id`, made with the keywords `options`. A problem is a seed."""

    hints: ClassVar[Hints] = Hints(expected_turns=10, prompt_tokens=250, response_tokens=20)
    needs: ClassVar[Needs] = Needs(memory_mb=200)

    def __init__(self, id: str, options: dict[str, Any] | None = None):
        import textarena

        self._env = textarena.make(f"{id}-raw", **(options or {}))
        self._seed: int | None = None

    def reset_sync(self, problem: Problem) -> list[Message]:
        self._seed = seed_of(problem)
        random.seed(self._seed)
        self._env.reset(num_players=1, seed=self._seed)
        return [Message("user", self._news())]

    def step_sync(self, action: str) -> Step:
        errors = self._env.state.error_count
        done, _ = self._env.step(action)
        told = Message("user", self._news())
        mistake = Mistake.INVALID if self._env.state.error_count > errors else None
        if not done:
            return Step(told, error=mistake)
        rewards, info = self._env.close()
        try:
            reward = float(rewards[0])
        except (TypeError, KeyError, ValueError) as error:  # some games give the text of an error
            raise TextArenaFailed(f"the rewards are {rewards!r:.200}") from error
        said = plain(info[0])
        return Step(told, reward, terminated=True, info=said, error=mistake or _spoilt(said))

    def fingerprint(self) -> object:
        return self._seed

    def _news(self) -> str:
        """What somebody else than the policy said since the last look."""
        player, heard = self._env.get_observation()
        return "\n".join(text.strip() for sender, text, _ in heard if sender != player)


def _spoilt(info: dict[str, Any]) -> str | None:
    return Mistake.INVALID if info.get("invalid_move") else None
