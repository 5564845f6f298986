"""What every command shares: its options, its errors, its services.

Invariants: an error that has a name is one line on stderr and exit code 2; what a command started is stopped when it
ends, however it ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rl.errors import ConfigError, RollmillError

console = Console()

ConfigArgument = Annotated[str, typer.Argument(help="A YAML file, or the name of a preset (see `rollmill presets`).")]
SetOption = Annotated[
    list[str], typer.Option("--set", help="Override one field, such as training.steps=10. Repeatable.")
]


def one_line_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Named errors end a command with one line, not a traceback."""
    go_on = "; go on with --resume" if "resume" in signature(command).parameters else ""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except RollmillError as error:
            typer.secho(f"error: {error}", fg="red", err=True)
            raise typer.Exit(2) from None
        except Exception as error:
            if type(error).__name__ != "CancelledRun":  # Prefect's: not imported here, for it reads the environment
                raise
            typer.secho(f"stopped: {error}{go_on}", err=True)
            raise typer.Exit(130) from None
        except KeyboardInterrupt:
            typer.secho(f"interrupted{go_on}", err=True)
            raise typer.Exit(130) from None

    return wrapped


def fresh_directory(option: str, path: Path) -> Path:
    """The directory that a command will put there, whole, in a place that exists. Raises ConfigError, which names the
    `option`, where something is already, and where nothing can be."""
    to = path.resolve()
    try:
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise ConfigError(f"{option} {str(path)!r} exists and is not an empty directory; take another")
        if to == Path.cwd():  # its shell would be left in one that is gone
            raise ConfigError(f"{option} {str(path)!r} is the directory you are in; go up, and name it from there")
        to.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {str(path)!r} can not be made: {error.strerror}; take another") from error
    if not os.access(to.parent, os.W_OK):
        raise ConfigError(f"{option} {str(path)!r} can not be made: {str(to.parent)!r} is not yours; take another")
    return to


@contextmanager
def services(which: tuple[str, ...] = ("s3", "prefect", "mlflow")) -> Iterator[None]:
    """The services for the duration of a command. Those that the environment names (`infra.services.endpoints.GIVEN`)
    are used as they are; the others are the embedded ones, started if they are not up (on free ports where the usual
    ones are taken), and stopped again if this command started them."""
    from flows.quiet import flush
    from infra.services.endpoints import environment, given
    from infra.services.errors import PortInUse
    from infra.services.supervisor import AUTO, status, up
    from infra.services.supervisor import down as stop

    end_well_on_signals()
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("TQDM_DISABLE", "1")
    wanted = [name for name in which if not given(name)]
    running = {s.name for s in status() if s.state == "running"}
    started = [name for name in wanted if name not in running]
    if wanted:
        if started:
            console.print(f"starting {', '.join(started)}", highlight=False)
        try:
            found = up(which=wanted)
        except PortInUse as error:
            console.print(f"{error.message}: taking free ports", highlight=False, soft_wrap=True)
            found = up(ports=AUTO, which=wanted)
        os.environ.update(
            {k: v for k, v in environment(found).items() if k not in os.environ or k.lower() == "no_proxy"}
        )
    try:
        yield
    finally:
        if started:
            flush()
            stop(which=started)


def end_well_on_signals() -> None:
    """A closed terminal or a plain kill ends the command through its `finally` blocks, too. (In a thread it can not be
    asked for.)"""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
