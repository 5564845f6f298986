"""Environments in which an agent acts by itself: it asks the policy through OpenAI's API, as often and in whatever way
it likes, and says at the end what came of it.

    async def solve(problem: Problem, client: ClientInfo) -> float | Outcome: ...

    environment: agent
    environment_options: {function: "my_package.my_module:solve", options: {...}}

Any harness that speaks OpenAI's API is trained like this, unchanged: give it `client.base_url` and `client.api_key`.

Invariants
- What the agent raises is a failure of the environment and never a reward, unless the policy was denied a further turn
  for it had used up its turns or tokens; then the episode is truncated.
- What is trained is what the policy sampled for the agent, token by token (`rl.sessions`).
"""

from __future__ import annotations

import inspect
import json
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envs.protocol import Environment, Step
from rl.plugins import check_options, find
from rl.trajectory import Message, Problem

GROUP = "rollmill.agents"


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """Where the policy answers, for this episode only: `OpenAI(base_url=..., api_key=...)`."""

    base_url: str
    api_key: str = field(repr=False)
    model: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an episode."""

    reward: float | None = None
    """Of the environment itself; the domain's reward function may make another of the transcript."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON types only; stored with the trajectory, under `mistakes` how often which mistake was made."""


class AgentEnvironment(Environment):
    """Write `run`; `reset` and `close` where something has to be started and ended."""

    async def reset(self, problem: Problem) -> list[Message]:
        """What `run` finds prepared. The messages are shown to nobody: the agent makes its own."""
        return [Message("user", f"problem {problem.index}, seed {problem.seed}")]

    @abstractmethod
    async def run(self, problem: Problem, client: ClientInfo) -> Outcome | float:
        """Play the episode. Ended by cancellation when its deadline (`deadlines.trajectory`) is over."""

    async def step(self, action: str) -> Step:
        raise NotImplementedError(f"{type(self).__name__} is an agent: it asks the policy itself, and takes no actions")


class Agent(AgentEnvironment):
    """An agent that is a coroutine function, by entry point of the group `rollmill.agents` or `module:attribute`."""

    def __init__(self, function: str, options: Mapping[str, Any] | None = None):
        found = find(function, GROUP, {}, "environment_options.function")
        if not inspect.iscoroutinefunction(found):
            raise ValueError(f"function: {function!r} is no `async def` function of a problem and a client")
        check_options(found, options or {}, "environment_options.options", given=2)
        self._function, self._options = found, dict(options or {})

    async def run(self, problem: Problem, client: ClientInfo) -> Outcome | float:
        outcome: Outcome | float = await self._function(problem, client, **self._options)
        return outcome


def unlike_an_outcome(outcome: object) -> str | None:
    """What is wrong with the result of `run`; None if nothing is."""
    if isinstance(outcome, bool) or not isinstance(outcome, Outcome | int | float):
        return f"{type(outcome).__name__} instead of a number or an Outcome"
    reward = outcome.reward if isinstance(outcome, Outcome) else outcome
    if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
        return f"the reward {reward!r}, which is neither None nor a finite number"
    if isinstance(outcome, Outcome):
        try:
            json.dumps(dict(outcome.info), allow_nan=False)
        except (TypeError, ValueError) as error:
            return f"an info that is not JSON: {error}"
    return None
