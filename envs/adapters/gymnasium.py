"""Environments of Gymnasium, unchanged, told in text: numbers as JSON, discrete actions by number or by name.

    user       FrozenLake-v1. Answer with one of left, down, right, up.
               (the rendered board)
    assistant  right

Invariant: what is no member of the action space is a mistake of the policy, and does nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, ClassVar, cast

from envs.adapters.translation import plain, seed_of
from envs.protocol import Hints, Mistake, Needs, Step, SyncEnvironment
from rl.errors import ConfigError
from rl.trajectory import Message, Problem


class Gymnasium(SyncEnvironment):
    """The environment that `gymnasium.make(id, **options)` makes. A problem is a seed.

    `actions` names the actions of a discrete space in order. `prompt` tells the task; without, only the form of an
    action is told. With the option `render_mode: ansi` the policy sees the rendered text, else the observation.
    """

    hints: ClassVar[Hints] = Hints(expected_turns=20, prompt_tokens=80, response_tokens=4)
    needs: ClassVar[Needs] = Needs(memory_mb=8)

    def __init__(
        self, id: str, options: dict[str, Any] | None = None, actions: Sequence[str] = (), prompt: str | None = None
    ):
        try:
            import gymnasium
        except ModuleNotFoundError as error:
            raise ConfigError("environment gymnasium needs its package; run `pip install gymnasium`") from error
        try:
            self._env = gymnasium.make(id, **(options or {}))
        except gymnasium.error.Error as error:
            raise ValueError(f"id ({id!r}) can not be made: {error}") from error
        self._space = cast(Any, self._env.action_space)
        self._discrete = isinstance(self._space, gymnasium.spaces.Discrete)
        self._textual = isinstance(self._space, gymnasium.spaces.Text)
        if actions and not (self._discrete and self._space.n == len(actions)):
            raise ValueError(f"actions ({', '.join(actions)}) do not name all of {self._space}")
        self._names = list(actions)
        form = f"one of {', '.join(actions)}" if actions else f"a member of {self._space}, as JSON"
        self._prompt = f"{prompt or f'{id}.'} Answer with {form}."
        self._seed: int | None = None

    def reset_sync(self, problem: Problem) -> list[Message]:
        self._seed = seed_of(problem)
        observation, _ = self._env.reset(seed=self._seed)
        return [Message("user", f"{self._prompt}\n{self._told(observation)}")]

    def step_sync(self, action: str) -> Step:
        member = self._member(action.strip())
        if member is None:
            return Step(Message("user", f"no action. {self._prompt}"), error=Mistake.INVALID)
        observation, reward, terminated, truncated, info = self._env.step(member)
        told = Message("user", self._told(observation))
        return Step(told, float(reward), bool(terminated), bool(truncated), plain(info))

    def close_sync(self) -> None:
        self._env.close()

    def fingerprint(self) -> object:
        return self._seed

    def random_action(self, rng: random.Random) -> str:
        self._space.seed(rng.getrandbits(31))
        return self._written(self._space.sample())

    def _told(self, observation: Any) -> str:
        if self._env.render_mode == "ansi":
            return str(self._env.render()).strip()
        return observation if isinstance(observation, str) else json.dumps(plain(observation))

    def _written(self, member: Any) -> str:
        if self._names:
            return self._names[int(member) - int(self._space.start)]
        return member if isinstance(member, str) else json.dumps(plain(member))

    def _member(self, text: str) -> Any:
        """The action that the text names; None if there is none."""
        if self._names:
            return self._space.start + self._names.index(text) if text in self._names else None
        if self._textual:
            return text if self._space.contains(text) else None
        try:
            found = json.loads(text)
            members = [found] if self._discrete else self._space.from_jsonable([found])
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            return None
        is_bool = isinstance(found, bool)
        return members[0] if not is_bool and self._space.contains(members[0]) else None
