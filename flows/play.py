"""An episode between an environment and a person, who types what a policy would say.

Invariant: what is typed goes to the environment as it is, unless it begins with a colon; what that stands for is shown.
"""

from __future__ import annotations

import json
import shlex

import yaml
from rich.markup import escape

from envs.episodes import AgainstProtocol, act, at_random, expert, open_episode
from envs.protocol import Environment
from envs.tools import write_call
from flows.command import console
from rl.errors import EnvironmentFailure
from rl.trajectory import Problem

HELP = """\
What you type is the action; end a line with \\ to go on in the next one. Beside that:
  :TOOL key=value ...  call a tool      :expert  do what the expert would
  :random              act at random    :quit    give up"""


async def play_by_hand(environment: Environment, problem: Problem, max_turns: int) -> None:
    """One episode in the terminal, of a fresh environment, which is closed. Raises EnvironmentFailure."""
    try:
        episode = await open_episode(environment, problem)
        for tool in environment.tools:
            _say("tool schema", json.dumps(tool["function"], ensure_ascii=False))
        for message in episode.messages:
            _say(message.role, message.content)
        console.print(HELP, style="dim", markup=False, highlight=False)
        while not episode.ended and len(episode.steps) < max_turns:
            action = _action(environment, f"{problem.seed}/{len(episode.steps)}")
            if action is None:
                break
            step = await act(environment, episode, action)
            _say(step.observation.role, step.observation.content)
            if step.error is not None:
                _say("mistake", step.error)
            if step.reward is not None:
                _say("reward", f"{step.reward:g}")
        _say("end", f"{len(episode.steps)} turns, reward {episode.reward:g}")
        if episode.steps and episode.steps[-1].info:
            _say("info", json.dumps(episode.steps[-1].info, ensure_ascii=False))
    except AgainstProtocol as error:
        raise EnvironmentFailure(f"{type(environment).__name__}: {error}") from error
    finally:
        await environment.close()


def _action(environment: Environment, seed: str) -> str | None:
    """What the person wants to say; None to give up."""
    while True:
        text = _read()
        if text is None or text == ":quit":
            return None
        try:
            action = _meant(environment, text, seed)
        except (ValueError, NotImplementedError, yaml.YAMLError) as error:
            _say("not said", str(error))
            continue
        if action != text:
            _say("assistant", action)
        return action


def _meant(environment: Environment, text: str, seed: str) -> str:
    """The action for a line: itself, or what a line that begins with a colon stands for."""
    if not text.startswith(":"):
        return text
    name, *pairs = shlex.split(text[1:]) or [""]
    if name == "expert":
        return expert(environment, [])
    if name == "random":
        return at_random(seed)(environment, [])
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in environment.tools}
    if name not in schemas:
        raise ValueError(f":{name} is none of {', '.join(f':{n}' for n in ('expert', 'random', 'quit', *schemas))}")
    arguments = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        is_text = schemas[name].get("properties", {}).get(key, {}).get("type") == "string"
        arguments[key] = value if is_text else yaml.safe_load(value)
    return write_call(name, **arguments)


def _read() -> str | None:
    lines: list[str] = []
    while True:
        try:
            line = input("> " if not lines else "... ")
        except EOFError:
            return None
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines)


def _say(who: str, what: str) -> None:
    console.print(f"[bold]{who}[/bold]  {escape(what)}", highlight=False, soft_wrap=True)
