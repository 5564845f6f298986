"""The pages follow from the code: every field, every error; recipes run; the site builds without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from flows.configure import cross_check, load_config
from flows.reference import configuration_page, models_in, named_errors, troubleshooting_page
from flows.sizing import tables
from rl.config.run import RunConfig
from sim.profiles import hardware, language_model
from tests.docs.commands import ROOT
from tests.test_errors import errors, import_everything

DOCS = ROOT / "docs"
RECIPES = sorted((DOCS / "recipes").glob("*.yaml"))


def every_field(model: type[BaseModel], seen: set[type]) -> set[tuple[type, str]]:
    if model in seen:
        return set()
    seen.add(model)
    found = {(model, field.alias or name) for name, field in model.model_fields.items() if name != "type"}
    for field in model.model_fields.values():
        for inner in models_in(field.annotation):
            found |= every_field(inner, seen)
    return found


def test_every_field_of_the_configuration_is_on_its_page_with_words() -> None:
    page = configuration_page(RunConfig, "Configuration", "")
    fields = every_field(RunConfig, set())
    assert len(fields) > 120
    for model, name in fields:
        assert any(_says(line, model, name) for line in page.splitlines() if line.startswith(f"| `{name}` |")), name
    assert "PydanticUndefined" not in page and "typing." not in page and "object at 0x" not in page


def _says(line: str, model: type[BaseModel], name: str) -> bool:
    field = next(f for n, f in model.model_fields.items() if (f.alias or n) == name)
    described = " ".join((field.description or "").split()).replace("<", "&lt;").replace("|", "\\|")
    kinds = ("| a section", "| a list of: a section")
    return described in line if described else any(kind in line for kind in kinds) or "anything" not in line


@pytest.mark.slow
def test_every_named_error_is_on_its_page_and_every_mend_is_of_one() -> None:
    mends = yaml.safe_load((DOCS / "mends.yaml").read_text())
    page = troubleshooting_page(mends)
    import_everything()
    ours = {kind for kind in errors() if kind.__module__.partition(".")[0] != "benchmarks"}
    names = {kind.__name__ for kind in ours if not kind.__module__.startswith("tests")} - {"RollmillError"}
    headings = set(re.findall(r"^## (\w+)$", page, re.MULTILINE))
    assert names == headings == {kind.__name__ for kind in named_errors()}
    assert set(mends) <= headings, set(mends) - headings
    assert all(kind.__doc__ for kind in named_errors()), [k.__name__ for k in named_errors() if not k.__doc__]
    assert page.count("**What to do.**") >= len(mends)


def test_what_is_said_to_fit_fits() -> None:
    found = tables()
    assert all(name in (DOCS / "sizing.md").read_text() for name in found)
    row = next(line for line in found["ENGINES"].splitlines() if line.startswith("| Qwen3-8B "))
    at_once = int(re.findall(r"(\d+) at once", row)[1])
    model, chip = language_model("Qwen3-8B"), hardware("H100")
    used = model.weight_bytes + at_once * 8192 * model.kv_bytes
    assert used <= 0.9 * chip.memory < used + 8192 * model.kv_bytes


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_passes_its_dry_run(recipe: Path, tmp_path: Path) -> None:
    from infra.models.tiny import write_tiny
    from rl.config.model import TinySection

    write_tiny(TinySection(hidden_size=32, layers=1), 0, tmp_path / "model")
    config = load_config(str(recipe), [f"model.source.path={tmp_path / 'model'}"])
    cross_check(config)
    assert recipe.name in (DOCS / "recipes.md").read_text()


@pytest.mark.parametrize("page", ["extend.md", "from_trl.md"])
def test_the_code_of_a_page_runs(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {"__name__": "page"})


async def test_the_environment_of_the_page_keeps_its_promises() -> None:
    from envs.check import Subject, examine

    source = re.findall(r"```python\n(.*?)```", (DOCS / "extend.md").read_text(), re.DOTALL)[0]
    names: dict = {"__name__": "page"}
    exec(compile(source, "extend.md", "exec"), names)
    findings = await examine(Subject(lambda: names["Guess"](), 10, problems=20))
    assert [f for f in findings if not f.ok] == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for page in ("index", "configuration", "troubleshooting", "sizing"):
        html = (tmp_path / "site" / f"{page}.html").read_text()
        assert "https://fonts" not in html
