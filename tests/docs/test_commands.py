"""Every command in README and docs/ is one: it exists, takes what it is given, and a test runs it.

Those of Rollmill that need no server, those about a run, and the demo are run here, those of benchmarks in
`test_benchmarks`, others where `ELSEWHERE` says. Of `make` it is seen that the targets exist: it is what calls these
tests. Docker and Kubernetes are not where tests run; `tests/deploy` holds their files against the specifications.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from flows.cli import app
from tests.command_line import Rollmill
from tests.docs.commands import ROOT, Command, commands, ran

ALL = commands()
TREE = get_command(app)


def of(*words: str, whole: bool | None = None) -> list[Command]:
    found = [c for c in ALL if c.words[: len(words)] == words]
    return [c for c in found if whole is None or c.whole == whole]


def each(found: Sequence[Command]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("command", found, ids=str)


def reached(words: Sequence[str]) -> tuple[Any, list[str]]:
    """The command that these words reach, and what is left for it."""
    node, left = TREE, list(words)
    while hasattr(node, "commands") and left and not left[0].startswith("-"):
        assert left[0] in node.commands, f"there is no command {left[0]!r} of {node.name!r}"
        node = node.commands[left.pop(0)]
    return node, left


def test_pages_tell_commands() -> None:
    assert len(of("rollmill", whole=True)) > 40 and len(of("python", "-m")) > 10 and len(of("make")) > 5


@each(of("rollmill", whole=True))
def test_a_whole_command_takes_what_it_is_given(command: Command) -> None:
    node, left = reached(command.words[1:])
    if "--help" not in left and not (hasattr(node, "commands") and not left):
        node.make_context(node.name, left)  # raises UsageError


@each(of("rollmill", whole=False))
def test_a_mentioned_command_exists_with_its_options(command: Command) -> None:
    node, left = reached(command.words[1:])
    known = {option for parameter in node.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in left:
        assert not word.startswith("--") or word.partition("=")[0] in {*known, "--help"}, word


@each(of("make"))
def test_a_target_of_make_exists(command: Command) -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for word in command.words[1:]:
        assert word in targets or "=" in word or word.startswith("-"), f"make has no target {word}"


@each(of("python", "-m"))
def test_a_module_exists_with_its_options(command: Command) -> None:
    module, *left = command.words[2:]
    if module == "benchmarks.<name>":
        module = "benchmarks.buffer"
    spec = find_spec(module)
    assert spec is not None, f"there is no module {module}"
    assert spec.origin is not None
    text = Path(spec.origin).read_text()
    main = Path(spec.origin).with_name("__main__.py")
    text += main.read_text() if main.exists() else ""
    for word in left:
        assert not word.startswith("--") or word in text, f"{module} has no option {word}"


@each(of("pip", "install"))
def test_an_extra_exists(command: Command) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in command.words[2:]:
        for names in re.findall(r"rollmill\[([^\]]+)\]", word):
            assert set(names.split(",")) <= extras.keys(), word


RUN = (
    "rollmill --help",
    "rollmill presets",
    "rollmill train calculator --dry-run",
    "rollmill env list",
    "rollmill init my-project",
)


@pytest.mark.slow
def test_what_needs_no_server_runs(tmp_path: Path) -> None:
    told = {" ".join(c.words) for c in ALL}
    for line in RUN:
        assert line in told, f"{line} is told nowhere any more"
        words = line.split()[1:]
        code, said = ran("flows.cli", *words, cwd=tmp_path, log=tmp_path / "log", timeout_s=120, PYTHONPATH=str(ROOT))
        assert code == 0, f"{line}:\n{said}"


DEMO = ("demo", "up", "doctor", "down")
ELSEWHERE = {
    "env": ("tests/flows/test_env_command.py", '"play", "frozen_lake"'),
    "engine serve": ("tests/flows/test_fleet_runs.py", '"engine", "serve"'),
    "engine install": ("Makefile", "rollmill engine install --cpu"),
    "init": ("tests/flows/test_project.py", '"init"'),
    "rewards": ("tests/serverless/test_commands.py", '"deploy", "--bucket"'),
    "runs ls": ("tests/flows/test_runs_command.py", '"ls"'),
    "serve": ("tests/flows/test_deployments.py", '"serve"'),
    "simulate": ("tests/flows/test_simulate.py", '"simulate"'),
    "tenants": ("tests/flows/tenant_commands.py", '"watch"'),
    "train config.yaml": ("tests/flows/test_project.py", '"train", "config.yaml"'),
    "train docs/recipes": ("tests/docs/test_pages.py", "cross_check(config)"),
    "versions list ann.yaml": ("tests/flows/test_tenants.py", '"tenants", "config", "lake"'),
}
"""By the beginning of a command: where it is run, and what stands there. Of the recipes that want GPUs it is the
dry run."""
EMPTY = "no such samples"


def about_a_run(command: Command) -> bool:
    return not elsewhere(command) and any(word.startswith("my-run") for word in command.words)


def elsewhere(command: Command) -> tuple[str, str] | None:
    told = " ".join(command.words[1:])
    return next((where for start, where in ELSEWHERE.items() if told.startswith(start)), None)


@each(of("rollmill", whole=True))
def test_a_whole_command_is_run_by_a_test(command: Command) -> None:
    if (where := elsewhere(command)) is not None:
        file, text = where
        assert text in (ROOT / file).read_text(), f"{file} does not run it any more"
    else:
        assert about_a_run(command) or command.words[1] in DEMO or " ".join(command.words) in RUN


@pytest.mark.full
@pytest.mark.server
@pytest.mark.timeout(1200)
def test_the_demo_shows_what_it_learned_and_its_services_come_up_again(tmp_path: Path) -> None:
    def run(*words: str, home: Path | None = None) -> str:
        own = {"PYTHONPATH": str(ROOT)} | ({"ROLLMILL_HOME": str(home)} if home else {})
        code, told = ran("flows.cli", *words, cwd=tmp_path, log=tmp_path / "log", **own)
        assert code == 0, f"{words}:\n{told[-4000:]}"
        return told

    home = tmp_path / "demo"
    try:
        said = run("demo")
        told = json.loads((home / "report.json").read_text())["figures"]
        found = {figure["name"]: figure["value"] for figure in told}
        assert found["heldout_reward_after"] > found["heldout_reward_before"] + 0.1, found
        assert all((home / name).stat().st_size > 5_000 for name in ("reward.png", "timeline.png"))
        assert f"ROLLMILL_HOME={home.name} rollmill up" in said
        assert "Prefect UI" in run("up", home=home)
        run("doctor", home=home)
    finally:
        assert "stopped" in run("down", home=home)


@pytest.mark.full
@pytest.mark.server
@pytest.mark.timeout(1500)
def test_every_command_about_a_run_runs_on_one(rollmill: Rollmill, tmp_path: Path) -> None:
    import yaml

    from flows.configure import PRESETS

    tree = yaml.safe_load((PRESETS / "frozen_lake.yaml").read_text())
    tree |= {"name": "my-run", "pools": {"type": "local", "cpu": 64, "lambda": 8}, "evaluation": {"problems": 8}}
    tree["training"] |= {"steps": 3, "groups_per_step": 4, "group_size": 4}
    config = tmp_path / "my-run.yaml"
    config.write_text(yaml.safe_dump(tree))
    code, output = rollmill("train", str(config))
    assert code == 0, output
    code, listed = rollmill("samples", "ls", str(config), "--trained")
    uid = re.search(r"^ *(\d+\.\d+) ", listed, re.MULTILINE)
    assert code == 0 and uid is not None, listed
    known = {
        "my-run.yaml": str(config),
        "other-run": "my-run",
        "compared.png": str(tmp_path / "compared.png"),
        "12.0": uid[1],
        "42": "1",
        "3": "0",
        "all.parquet": str(tmp_path / "all.parquet"),
        "training.steps=200": "training.steps=1",
        "training.steps=400": "training.steps=4",
    }
    late = ("rollback", "stop")
    told = dict.fromkeys(c.words[1:] for c in of("rollmill", whole=True) if about_a_run(c) and c.words[2] not in late)
    for at, command in enumerate(told):
        words = [known.get(word, word) for word in command if word != "--follow"]  # which ends when interrupted
        if words[0] == "train" and not {"--resume", "--dry-run"} & {*words}:
            words += ["--set", f"name=begun-{at}"]
        if words[0] == "export":
            words[words.index("--to") + 1] = str(tmp_path / f"out-{at}")
        code, output = rollmill(*words)
        assert code == 0 or (code == 2 and EMPTY in output), f"{' '.join(command)}:\n{output}"
    code, output = rollmill("runs", "stop", "my-run")
    assert code == 2 and "no flow run trains" in output, output
    code, output = rollmill("versions", "rollback", str(config), "1")
    assert code == 0, output
