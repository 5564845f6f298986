"""A new environment is one short file and an entry point, in a package of the user's own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.check import Subject, examine
from envs.registry import environment_class, make_environment
from rl import plugins
from rl.config.work import DomainSection

FILE = '''"""Say the word backwards."""

import random

from envs.protocol import Environment, Step, in_split
from rl.trajectory import Message, Problem


class Backwards(Environment):
    """Words of `letters` letters."""

    def __init__(self, letters: int = 5):
        self.letters, self.word = letters, ""

    async def reset(self, problem: Problem) -> list[Message]:
        rng = random.Random(problem.seed)
        while not self.word or not in_split(self.word, problem.split):
            self.word = "".join(rng.choices("abcdefgh", k=self.letters))
        return [Message("user", f"Say backwards: {self.word}")]

    async def step(self, action: str) -> Step:
        right = action.strip() == self.word[::-1]
        return Step(Message("user", "right" if right else "wrong"), float(right), terminated=True)

    def expert_action(self) -> str:
        return self.word[::-1]
'''
ENTRY_POINT = """[rollmill.environments]
backwards = my_words:Backwards
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package as pip leaves it."""
    (tmp_path / "my_words.py").write_text(FILE)
    metadata = tmp_path / "my_words-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-words\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINT)
    monkeypatch.syspath_prepend(str(tmp_path))
    clear = [found for found in vars(plugins).values() if hasattr(found, "cache_clear")]
    for function in clear:
        function.cache_clear()
    yield
    for function in clear:
        function.cache_clear()
    sys.modules.pop("my_words", None)
    importlib.invalidate_caches()


def test_a_new_environment_is_under_60_lines() -> None:
    assert len(FILE.splitlines()) < 60


@pytest.mark.usefixtures("installed")
async def test_it_is_found_by_its_name_and_keeps_the_promises() -> None:
    domain = DomainSection(name="words", environment="backwards", environment_options={"letters": 6})
    assert environment_class("backwards").__module__ == "my_words"
    findings = await examine(Subject(lambda: make_environment(domain), problems=10))
    assert [f for f in findings if not f.ok] == []
