"""`rollmill rewards`: what rewards there are, and the functions that they run as.

Invariants: a reward is named as in a configuration; without `--local` a command speaks to AWS (or to
AWS_ENDPOINT_URL_LAMBDA), with it to functions on this machine, which end with the command.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from flows.command import console, one_line_errors
from rl.errors import ConfigError

if TYPE_CHECKING:
    from infra.serverless.client import FunctionClient
    from rl.serverless import Serverless

app = typer.Typer(help="The rewards, and the functions that they run as.", no_args_is_help=True)

NamesArgument = Annotated[
    list[str] | None, typer.Argument(help="As in a configuration; all that are installed and marked if none is given.")
]
RewardArgument = Annotated[str, typer.Argument(help="As in a configuration: a name, or module:attribute.")]
PrefixOption = Annotated[str, typer.Option(help="The function `math` is called PREFIX-math.")]
RegionOption = Annotated[str, typer.Option(help="AWS region.")]
LocalOption = Annotated[bool, typer.Option("--local", help="On this machine instead of AWS.")]
PREFIX, REGION = "rollmill-reward", "us-east-1"
DEADLINE_S = 120.0


@app.command("list")
@one_line_errors
def show() -> None:
    """The rewards that are installed, and which run as functions."""
    from rewards.registry import names, reward_function
    from rl.serverless import serverless_of

    table = Table("reward", "function", "memory", "timeout", "requires")
    for name in names():
        mark = serverless_of(reward_function(name))
        where = (mark.function, f"{mark.memory_mb} MB", f"{mark.timeout_s} s", ", ".join(mark.requires)) if mark else ()
        table.add_row(name, *where)
    console.print(table)


@app.command()
@one_line_errors
def bundle(
    names: NamesArgument = None, to: Annotated[Path, typer.Option(help="The file to write.")] = Path("rewards.zip")
) -> None:
    """Write the deployment package, as `deploy` uploads it."""
    from tasks.functions import bundle_of

    wanted = bundle_of(names or _marked())
    digest = wanted.write_zip(to)
    console.print(
        f"{to}: {', '.join(f.name for f in wanted.functions)}; {len(wanted.files)} files, "
        f"{to.stat().st_size / 2**20:.1f} MiB, {wanted.unpacked_bytes / 2**20:.1f} MiB unpacked (Lambda's limit: 250); "
        f"sha256 {digest[:12]}",
        highlight=False,
        soft_wrap=True,
    )


@app.command()
@one_line_errors
def deploy(
    bucket: Annotated[str, typer.Option(help="For the bundle and for large events: the bucket of the runs.")],
    names: NamesArgument = None,
    prefix: PrefixOption = PREFIX,
    region: RegionOption = REGION,
) -> None:
    """Bring the functions of these rewards to AWS, each in a CloudFormation stack of its own."""
    from infra.serverless import stack
    from infra.store.objects import ObjectStore
    from rl.config.infrastructure import StoreSection
    from tasks.functions import bundle_of

    wanted = bundle_of(names or _marked())
    key = stack.upload(wanted, ObjectStore.connect(StoreSection(bucket=bucket, region=region)))
    for function in wanted.functions:
        done = stack.deploy(stack.parameters(function, prefix, bucket, key), region)
        console.print(f"{prefix}-{function.name}: {done}", highlight=False)


@app.command()
@one_line_errors
def invoke(
    reward: RewardArgument,
    said: Annotated[str, typer.Option(help="What the policy said last.")],
    info: Annotated[str, typer.Option(help="The environment's last info, as JSON or YAML.")] = "{}",
    options: Annotated[list[str], typer.Option("--option", help="Such as tag=answer. Repeatable.")] = [],  # noqa: B006
    prefix: PrefixOption = PREFIX,
    region: RegionOption = REGION,
    local: LocalOption = False,
) -> None:
    """Score one answer by the function of a reward, and show its log."""
    from rewards.protocol import TrajectoryView
    from rl.trajectory import Message, Problem, Status

    mark = _mark(reward)
    problem, transcript = Problem(0, "by-hand", 0, 0), [Message("assistant", said)]
    view = TrajectoryView(problem, transcript, Status.TERMINATED, 1, 0, 0.0, _mapping("--info", info))
    given = {key: _value("--option", value) for key, _, value in (option.partition("=") for option in options)}
    event = {"reward": reward, "options": given, "views": [view.as_json()]}
    with _functions(reward, prefix, region, local) as functions:
        answer = functions.invoke(mark.function, event, DEADLINE_S, log=True)
    console.print(answer.log.strip(), style="dim", highlight=False, markup=False, soft_wrap=True)
    console.print_json(json.dumps(answer.value))


@app.command()
@one_line_errors
def logs(
    reward: RewardArgument,
    minutes: Annotated[float, typer.Option(help="How far back, on AWS.")] = 15,
    prefix: PrefixOption = PREFIX,
    region: RegionOption = REGION,
    local: LocalOption = False,
) -> None:
    """What the function of a reward logged."""
    from infra.serverless import stack

    function = _mark(reward).function
    if local:
        log = _home() / "logs" / f"{function}.log"
        if not log.exists():
            raise ConfigError(f"{log} does not exist: the function {function!r} was never started here")
        lines: Any = log.read_text(errors="replace").splitlines()
    else:
        lines = stack.log_lines(f"{prefix}-{function}", int((time.time() - 60 * minutes) * 1000), region)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _functions(reward: str, prefix: str, region: str, local: bool) -> Iterator[FunctionClient]:
    from infra.serverless import host
    from infra.serverless.client import FunctionClient, lambda_client
    from tasks.functions import bundle_of

    if not local:
        yield FunctionClient(lambda_client(region, None, DEADLINE_S, connections=1), prefix, store=None)
        return
    running = host.LocalHost(bundle_of([reward]), _home(), concurrency=1, idle_s=300, deadline_s=DEADLINE_S)
    try:
        client = lambda_client(region, running.url, DEADLINE_S, connections=1)
        yield FunctionClient(client, host.PREFIX, store=None)
    finally:
        running.close()


def _home() -> Path:
    """Where runs keep their local functions, too."""
    from flows.home import Home

    return Home.default().cache / "functions"


def _mark(reward: str) -> Serverless:
    from rewards.registry import reward_function
    from rl.serverless import serverless_of

    mark = serverless_of(reward_function(reward))
    if mark is None:
        raise ConfigError(f"reward {reward!r} is no function: it has no @serverless mark; see `rollmill rewards list`")
    return mark


def _marked() -> list[str]:
    from rewards.registry import names, reward_function
    from rl.serverless import serverless_of

    return [name for name in names() if serverless_of(reward_function(name)) is not None]


def _mapping(option: str, text: str) -> dict[str, Any]:
    found = _value(option, text)
    if not isinstance(found, dict):
        raise ConfigError(f"{option} {text!r} is not a mapping such as {{answer: 42}}")
    return found


def _value(option: str, text: str) -> Any:
    """What a user wrote in YAML. Raises ConfigError for what is none, or none that JSON knows."""
    from rl.config.load import from_yaml

    found = from_yaml(text, f"{option} {text!r}")
    try:
        json.dumps(found)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{option} {text!r}: {error}; put it in quotes") from error
    return found
