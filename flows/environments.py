"""`rollmill env`: list the environments, play one by hand, check one's own.

Invariant: nothing is started but the environment itself; no run, no service, no model. Every command of `rollmill`
imports this module, so what needs environments is imported by the command that does.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from flows.command import console, one_line_errors
from rl.errors import ConfigError

if TYPE_CHECKING:
    from rl.config.work import DomainSection

app = typer.Typer(help="The environments: list, play by hand, check your own.", no_args_is_help=True)

Spec = Annotated[str, typer.Argument(help="A name of `rollmill env list`, or 'module:Class'.")]
Options = Annotated[list[str], typer.Option("--set", help="One option of the environment: size=6. Repeatable.")]


@app.command("list")
@one_line_errors
def show() -> None:
    """The environments that are installed."""
    from envs.registry import BUILT_IN, GROUP, environment_class
    from rl.plugins import known

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
    from envs.registry import environment_class

    section = _section(spec, options)
    environment_class(spec).fetch(section.environment_options)
    asyncio.run(_prepared(section))
    console.print(f"[bold]{spec}[/bold]  is ready", highlight=False, soft_wrap=True)


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
    from envs.registry import make_environment
    from flows.play import play_by_hand
    from rl.stream import derive_seed
    from rl.trajectory import Problem

    section = _section(spec, options)
    problem = Problem(seed, "play", seed, derive_seed("play", seed), _split(split))

    _needs_actions(section)

    async def prepared() -> None:
        await _prepared(section)
        await play_by_hand(make_environment(section), problem, max_turns)

    asyncio.run(prepared())


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
    _needs_actions(section)
    findings = asyncio.run(_check(section, max_turns, problems))
    table = Table("", "check", "found", "mend")
    for finding in findings:
        mark = "[green]ok[/green]" if finding.ok else "[red]no[/red]"
        table.add_row(mark, finding.name, escape(finding.found), "" if finding.ok else escape(finding.mend))
    console.print(table)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def _section(spec: str, options: list[str]) -> DomainSection:
    """A domain of that environment. Raises ConfigError for an option that has no value, or none that JSON knows."""
    from rl.config.load import from_yaml, validate_as
    from rl.config.work import DomainSection

    chosen = {}
    for text in options:
        name, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"--set {text!r} is not of the form option=value")
        chosen[name] = from_yaml(value, f"--set {text!r}")
    tree = {"name": "chosen", "environment": spec, "environment_options": chosen}
    return validate_as(DomainSection, tree, "--set")


def _split(name: str) -> str:
    if name not in ("train", "heldout"):
        raise ConfigError(f"--split {name!r} is neither train nor heldout")
    return name


def _needs_actions(section: DomainSection) -> None:
    """Raises ConfigError for an environment that takes no actions from outside."""
    from envs.agents import AgentEnvironment
    from envs.registry import environment_class

    if issubclass(environment_class(section.environment), AgentEnvironment):
        raise ConfigError(
            f"environment {section.environment!r} is an agent, which asks a policy by itself: there is nothing to say "
            "to it by hand; name it in a configuration, and train or evaluate"
        )


async def _prepared(section: DomainSection) -> None:
    """Make what the instances share, after a look at the options. Raises ConfigError."""
    from envs.registry import environment_class, make_environment
    from envs.threads import in_daemon

    make_environment(section)
    kind = environment_class(section.environment)
    await in_daemon(partial(kind.prepare, section.environment_options), "prepare")


async def _check(section: DomainSection, max_turns: int, problems: int) -> list[Any]:
    from envs.check import Subject, examine
    from envs.registry import make_environment

    await _prepared(section)
    return await examine(Subject(partial(make_environment, section), max_turns, problems))
