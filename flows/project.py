"""`rollmill init`: a project of one's own, with an environment, a reward, an algorithm and a configuration that runs.

Invariants: nothing is written over; what is written is there whole, or not at all; the package's name hides no module.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from flows.command import console, fresh_directory, one_line_errors
from rl.errors import ConfigError

TEMPLATES = files("flows") / "templates"
FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "config.yaml": "config.yaml",
    "{package}/environment.py": "environment.py",
    "{package}/reward.py": "reward.py",
    "{package}/advantage.py": "advantage.py",
    "tests/test_{package}.py": "test.py",
}
"""What is written, and the template that it is made from."""
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


@one_line_errors
def init(directory: Annotated[Path, typer.Argument(help="A directory that does not exist yet, or is empty.")]) -> None:
    """Begin a project: an environment, a reward, an algorithm and a configuration of your own that run as they are."""
    write_project(directory)
    console.print(
        f"{directory}: an environment, a reward, an algorithm, a configuration and their tests; go on with\n\n"
        f"    cd {directory}\n    pip install -e .\n    rollmill train config.yaml\n",
        highlight=False,
        soft_wrap=True,
    )


def write_project(directory: Path) -> None:
    """Raises ConfigError for a name that no package can have, and where something is already."""
    project = directory.resolve().name
    if not _NAME.fullmatch(project):
        raise ConfigError(
            f"DIRECTORY {project!r} gives the package its name: take small letters, digits and single dashes, such as "
            "my-project"
        )
    package = project.replace("-", "_")
    found = find_spec(package)
    if found is not None and found.origin is not None:  # without an origin it is any directory of that name
        raise ConfigError(f"DIRECTORY {project!r}: a module {package!r} exists already; take another name")
    directory = fresh_directory("DIRECTORY", directory)
    draft = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{project}-"))
    try:
        for name, template in FILES.items():
            path = draft / name.format(package=package)
            path.parent.mkdir(exist_ok=True)
            path.write_text(_rendered(template, project, package), encoding="utf-8")
        (draft / package / "__init__.py").touch()
        draft.chmod(0o755)
        if directory.exists():
            directory.rmdir()
        draft.rename(directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _rendered(template: str, project: str, package: str) -> str:
    from jinja2 import Environment, StrictUndefined

    text = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    made = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False).from_string(text)
    return made.render(project=project, package=package)
