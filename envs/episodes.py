"""Plays an episode in text: for checks, tests and people. (Rollout plays in tokens, `tasks/interact.py`.)

Invariant: the environment is not closed here; whoever made it closes it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from envs.protocol import Environment, Step
from envs.validity import unlike_a_step, unlike_an_opening
from rl.stream import derive_seed
from rl.trajectory import Message, Problem

Say = Callable[[Environment, list[Message]], str]
"""What the policy says next, from the environment (an expert asks it) and the messages so far."""


class AgainstProtocol(Exception):
    """The environment answered with something that `envs.protocol` does not allow."""


@dataclass
class Episode:
    """What was said, and the environment's answer to each action."""

    messages: list[Message]
    steps: list[Step] = field(default_factory=list)

    @property
    def reward(self) -> float:
        return sum(step.reward or 0.0 for step in self.steps)

    @property
    def ended(self) -> bool:
        """Whether the environment ended it, and not the limit on turns."""
        return bool(self.steps) and (self.steps[-1].terminated or self.steps[-1].truncated)


async def open_episode(environment: Environment, problem: Problem) -> Episode:
    """Reset. Raises AgainstProtocol, and what the environment raises."""
    opening = await environment.reset(problem)
    if mistake := unlike_an_opening(opening):
        raise AgainstProtocol(f"reset gave {mistake}")
    return Episode(list(opening))


async def act(environment: Environment, episode: Episode, action: str) -> Step:
    """One step, added to the episode. Raises AgainstProtocol, and what the environment raises."""
    step = await environment.step(action)
    if mistake := unlike_a_step(step):
        raise AgainstProtocol(f"step gave {mistake}")
    episode.messages += [Message("assistant", action), step.observation]
    episode.steps.append(step)
    return step


async def play(environment: Environment, problem: Problem, say: Say, max_turns: int) -> Episode:
    """A whole episode, at most `max_turns` turns. Raises AgainstProtocol, and what the environment raises."""
    episode = await open_episode(environment, problem)
    while not episode.ended and len(episode.steps) < max_turns:
        await asyncio.sleep(0)  # other episodes of this loop get their turn
        await act(environment, episode, say(environment, episode.messages))
    return episode


def expert(environment: Environment, _: list[Message]) -> str:
    """Says what the environment's own demonstrator would."""
    return environment.expert_action()


def at_random(seed: object) -> Say:
    """A policy that knows the form of an action and nothing else; equal seeds say the same."""
    rng = random.Random(derive_seed("random agent", seed))
    return lambda environment, _: environment.random_action(rng)
