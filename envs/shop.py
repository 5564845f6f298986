"""A shop whose goods are the programs of Debian's archive: search, open, compare, then choose what is wished for.

    user       Choose a program of the section games. Wished for: kind of game: puzzle; implemented in: c; ...
    assistant  <tool_call>{"name": "search", "arguments": {"query": "puzzle game"}}</tool_call>
    tool       1. xye: penguin-like puzzle game ...
    assistant  <tool_call>{"name": "open", "arguments": {"name": "xye"}}</tool_call>
    tool       xye ... implemented in: c++
    assistant  <tool_call>{"name": "choose", "arguments": {"name": "xjig"}}</tool_call>

The reward is the share of the wishes that the chosen program fulfils; 0 for one of another section.

Invariants
- The wishes are attributes of one program, so that they can be fulfilled, and rare ones in its section, so that the
  first best program fulfils few; whichever program fulfils them is as good.
- A search sees names and descriptions only: whether a wish is fulfilled stands on a program's page.
- A problem is its opening text, and the split is decided by that text.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from envs.data.corpus import CORPORA, build, connect, find
from envs.data.debian_catalogue import FACETS, RECIPE, collect, fill
from envs.data.text_search import terms
from envs.protocol import Hints, Mistake, Needs, Step, in_split
from envs.tools import ToolEnvironment, ToolError, tool, write_call
from rl.trajectory import Message, Problem

RESULTS, COMPARED = 10, 4
SIZES = (30, 100, 300, 1000, 3000, 10000, 30000, 100000, 300000, 1000000, 10000000)
INSTRUCTIONS = (
    "You are shopping for a program. Search the shop, open or compare the pages of programs that may fit, then choose "
    "one: the more of the wishes it fulfils, the better."
)


@dataclass(frozen=True)
class Program:
    """What a page of the shop tells; `size` in kB."""

    name: str
    text: str
    section: str
    size: int
    tags: tuple[str, ...]
    rare: tuple[str, ...]
    """Those of the tags that less than a third of the section has: the others are no wishes worth the name."""

    def page(self) -> str:
        lines = (f"{self.name}: {self.text}", f"section: {self.section}", f"size: {self.size} kB")
        return "\n".join((*lines, *map(in_words, self.tags)))


def in_words(tag: str) -> str:
    """`use::editing` as `use: editing`."""
    facet, _, value = tag.partition("::")
    return f"{FACETS[facet]}: {value}"


class Shop(ToolEnvironment):
    """Programs with from `wishes_min` to `wishes_max` wishes beside section and size: more wishes are harder.

    `corpus` is the whole catalogue (`full`) or the excerpt that needs no preparation (`excerpt`).
    """

    hints: ClassVar[Hints] = Hints(expected_turns=5, prompt_tokens=150, response_tokens=30)
    needs: ClassVar[Needs] = Needs(memory_mb=8)

    def __init__(self, wishes_min: int = 2, wishes_max: int = 4, corpus: Literal["full", "excerpt"] = "full"):
        if not 1 <= wishes_min <= wishes_max <= 6:
            raise ValueError(
                f"wishes_min ({wishes_min}) must be from 1 to wishes_max ({wishes_max}), and that 6 at most"
            )
        if corpus not in CORPORA:
            raise ValueError(f"corpus ({corpus!r}) must be one of {', '.join(CORPORA)}")
        self._wishes, self._corpus = range(wishes_min, wishes_max + 1), corpus
        self._db: sqlite3.Connection | None = None

    @classmethod
    def fetch(cls, options: Mapping[str, Any]) -> None:
        build("shop", RECIPE, collect, fill)

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> None:
        if options.get("corpus", "full") == "full":
            find("shop", RECIPE)

    async def reset(self, problem: Problem) -> list[Message]:
        return await self.in_thread(lambda: self._open(problem))

    def _open(self, problem: Problem) -> list[Message]:
        self._db = connect("shop", self._corpus, fill)
        rng = random.Random(problem.seed)
        (count,) = self._db.execute("SELECT MAX(id) FROM programs").fetchone()
        while not in_split(text := self._draw(rng, count), problem.split):
            pass
        calls = write_call("search", query=self._target.text), write_call("open", name=self._target.name)
        self._script = iter(calls)
        return [Message("system", INSTRUCTIONS), Message("user", text)]

    def _draw(self, rng: random.Random, count: int) -> str:
        wishes = rng.choice(self._wishes)
        while True:
            self._target = self._program("id", rng.randint(1, count))
            if len(self._target.rare) >= wishes:
                break
        self._tags = sorted(rng.sample(self._target.rare, wishes))
        self._limit = next(size for size in SIZES if size >= self._target.size)
        wished = (*map(in_words, self._tags), f"size: {self._limit} kB at most")
        return "\n- ".join((f"Choose a program of the section {self._target.section}. Wished for:", *wished))

    def _program(self, column: Literal["id", "name"], value: int | str) -> Program:
        assert self._db is not None, "reset comes before any call"
        query = f"SELECT name, text, section, size, tags, rare FROM programs WHERE {column} = ?"
        row = self._db.execute(query, (value,)).fetchone()
        if row is None:
            raise ToolError(f"the shop has no program {value!r}")
        name, text, section, size, tags, rare = row
        return Program(name, text, section, size, tuple(tags.split()), tuple(rare.split()))

    @tool
    def search(self, query: str, page: int = 1) -> str:
        """Programs whose name or description has words of the query, ten a page, the best first."""
        words = " OR ".join(terms(query))
        if not words or not 1 <= page <= 100:
            raise ToolError("give some words to search for" if not words else f"page {page} is not from 1 to 100")
        assert self._db is not None, "reset comes before any call"
        start = (page - 1) * RESULTS
        rows = self._db.execute(
            "SELECT name, text FROM search WHERE search MATCH ? ORDER BY bm25(search, 4, 1, 1), rowid LIMIT ? OFFSET ?",
            (words, RESULTS, start),
        )
        found = "\n".join(f"{at}. {name}: {text}" for at, (name, text) in enumerate(rows, start + 1))
        return found or "nothing found"

    @tool
    def open(self, name: str) -> str:
        """The page of a program: section, size and attributes."""
        return self._program("name", name).page()

    @tool
    def compare(self, names: list[str]) -> str:
        """The pages of up to four programs."""
        if len(names) > COMPARED:
            raise ToolError(f"{len(names)} programs are too many to compare; {COMPARED} at most")
        return "\n\n".join(self._program("name", name).page() for name in names)

    @tool
    def choose(self, name: str) -> Step:
        """Take this program. It ends the shopping."""
        chosen = self._program("name", name)
        met = [tag in chosen.tags for tag in self._tags] + [chosen.size <= self._limit]
        reward = sum(met) / len(met) if chosen.section == self._target.section else 0.0
        info = {"chosen": name, "met": sum(met), "wishes": len(met), "section": chosen.section == self._target.section}
        return Step(Message("tool", f"{sum(met)} of {len(met)} wishes fulfilled"), reward, terminated=True, info=info)

    def answer(self, text: str) -> Step:
        return Step(Message("user", "Take a program by calling the tool choose."), error=Mistake.INVALID)

    async def close(self) -> None:
        if self._db is not None:
            await self.in_thread(self._db.close)

    def expert_action(self) -> str:
        return next(self._script, write_call("choose", name=self._target.name))
