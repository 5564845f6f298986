"""Commands in this process, on a run that is there already."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from infra.store.objects import ObjectStore
from rl.config.infrastructure import StoreSection
from tests.store.runs import Run


@dataclass
class Desk:
    """Commands in this process, on a store in memory, and a run to use them on."""

    run: Run
    name: str

    def __call__(self, *arguments: str, sets: tuple[str, ...] = ()) -> Result:
        from flows.cli import app

        chosen = [a for value in (f"name={self.name}", "domains.0.name=maze", *sets) for a in ("--set", value)]
        return CliRunner().invoke(app, [*arguments, *chosen], env={"COLUMNS": "200"})

    def good(self, *arguments: str, sets: tuple[str, ...] = ()) -> str:
        result = self(*arguments, sets=sets)
        assert result.exit_code == 0, result.output
        return result.output

    def bad(self, *arguments: str, sets: tuple[str, ...] = ()) -> str:
        """The one line of an error."""
        result = self(*arguments, sets=sets)
        assert result.exit_code == 2 and "Traceback" not in result.output, result.output
        assert len(result.output.strip().splitlines()) == 1, result.output
        return result.output


@pytest.fixture
def desk(own_store: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("ROLLMILL_HOME", str(tmp_path / "home"))
    store = ObjectStore.connect(StoreSection())
    store.ensure_bucket()
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)[:60].strip("-")
    return Desk(Run(store, f"default/{name}/", tmp_path / "states"), name)
