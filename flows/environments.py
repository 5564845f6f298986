"""`rollmill env`: list the environments, play one by hand, check one's own.

Invariant: nothing is started but the environment itself; no run, no service, no model.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from functools import partial
from typing import Annotated, Any

import typer
import yaml
from rich.markup import escape
from rich.table import Table

from envs.check import Subject, examine
from envs.episodes import AgainstProtocol, act, at_random, expert, open_episode
from envs.protocol import Environment
from envs.registry import BUILT_IN, GROUP, environment_class, make_environment
from envs.threads import in_daemon
from envs.tools import write_call
from flows.command import console, one_line_errors
from rl.config.work import DomainSection
from rl.errors import ConfigError, EnvironmentFailure
from rl.plugins import known
from rl.stream import derive_seed
from rl.trajectory import Problem

app = typer.Typer(help="The environments: list, play by hand, check your own.", no_args_is_help=True)
HELP = """\
What you type is the action; end a line with \\ to go on in the next one. Beside that:
  :TOOL key=value ...  call a tool      :expert  do what the expert would
  :random              act at random    :quit    give up"""

Spec = Annotated[str, typer.Argument(help="A name of `rollmill env list`, or 'module:Class'.")]
Options = Annotated[list[str], typer.Option("--set", help="One option of the environment: size=6. Repeatable.")]


@app.command("list")
@one_line_errors
def show() -> None:
    """The environments that are installed."""
    table = Table("name", "turns", "memory", "processes", "sandbox", "what it is")
    for name in known(GROUP, BUILT_IN):
        try:
            kind = environment_class(name)
        except ConfigError as error:
            table.add_row(name, "", "", "", "", f"[red]{escape(str(error))}[/red]")
            continue
        needs, words = kind.needs, (sys.modules[kind.__module__].__doc__ or kind.__doc__ or "").strip()
        sandbox, processes = "yes" if needs.sandbox else "", str(needs.processes or "")
        turns, line = str(kind.hints.expected_turns), words.partition("\n")[0]
        table.add_row(name, turns, f"{needs.memory_mb} MB", processes, sandbox, escape(line))
    console.print(table)


@app.command()
@one_line_errors
def prepare(spec: Spec, options: Options = []) -> None:  # noqa: B006
    """Get the data that an environment needs onto this machine; it may use the network."""
    section = _section(spec, options)
    environment_class(spec).fetch(section.environment_options)
    asyncio.run(_prepared(section))
    _say(spec, "is ready")


@app.command()
@one_line_errors
def play(
    spec: Spec,
    options: Options = [],  # noqa: B006  typer copies it
    seed: Annotated[int, typer.Option(help="Which problem.")] = 0,
    split: Annotated[str, typer.Option(help="train or heldout.")] = "train",
    max_turns: Annotated[int, typer.Option(help="Turns until the episode is cut off.")] = 50,
) -> None:
    """Play one episode in the terminal."""
    problem = Problem(seed, "play", seed, derive_seed("play", seed), _split(split))
    asyncio.run(_play(_section(spec, options), problem, max_turns))


@app.command()
@one_line_errors
def check(
    spec: Spec,
    options: Options = [],  # noqa: B006
    max_turns: Annotated[int, typer.Option(help="Turns until an episode is cut off.")] = 10,
    problems: Annotated[int, typer.Option(min=1, help="Episodes per score, and problems of each split.")] = 50,
) -> None:
    """Examine an environment: does it keep the promises that training relies on?"""
    section = _section(spec, options)
    findings = asyncio.run(_check(section, max_turns, problems))
    table = Table("", "check", "found", "mend")
    for finding in findings:
        mark = "[green]ok[/green]" if finding.ok else "[red]no[/red]"
        table.add_row(mark, finding.name, escape(finding.found), "" if finding.ok else escape(finding.mend))
    console.print(table)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def _section(spec: str, options: list[str]) -> DomainSection:
    """A domain of that environment. Raises ConfigError for an option that has no value."""
    chosen = {}
    for text in options:
        name, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"--set {text!r} is not of the form option=value")
        chosen[name] = yaml.safe_load(value)
    return DomainSection(name="chosen", environment=spec, environment_options=chosen)


def _split(name: str) -> str:
    if name not in ("train", "heldout"):
        raise ConfigError(f"--split {name!r} is neither train nor heldout")
    return name


async def _prepared(section: DomainSection) -> None:
    """Make what the instances share, after a look at the options. Raises ConfigError."""
    make_environment(section)
    kind = environment_class(section.environment)
    await in_daemon(partial(kind.prepare, section.environment_options), "prepare")


async def _check(section: DomainSection, max_turns: int, problems: int) -> list[Any]:
    await _prepared(section)
    return await examine(Subject(partial(make_environment, section), max_turns, problems))


async def _play(section: DomainSection, problem: Problem, max_turns: int) -> None:
    await _prepared(section)
    environment = make_environment(section)
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
        raise EnvironmentFailure(f"{section.environment}: {error}") from error
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
