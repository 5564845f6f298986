"""Questions that an encyclopedia answers: the policy searches it, reads, and says the answer.

    user       What is the capital of the country whose highest point is Emi Koussi?
    assistant  <tool_call>{"name": "search", "arguments": {"query": "highest point Emi Koussi"}}</tool_call>
    tool       31. Chad: Geography -- ... highest point: [Emi Koussi] 3,415 m ...
    assistant  <tool_call>{"name": "search", "arguments": {"query": "Chad capital"}}</tool_call>
    tool       33. Chad: Government -- ... Capital, name: N'Djamena ...
    assistant  N'Djamena

The reward is 1 if the answer is the right one, else 0.

Invariants
- Every question has one answer, and it stands in a document.
- The split is decided by what is asked of whom, not by the words of the question: no fact that is asked in one split
  is asked in the other.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from envs.answers import same
from envs.data.corpus import CORPORA, build, connect, find
from envs.data.facts import CLUES, QUESTIONS, Fact, is_clue, search_words
from envs.data.knowledge import RECIPE, collect, fill
from envs.data.text_search import terms
from envs.protocol import Hints, Needs, Step, in_split
from envs.tools import ToolEnvironment, ToolError, tool, write_call
from rl.trajectory import Message, Problem

INSTRUCTIONS = (
    "Answer the question from the encyclopedia. Search it, read what may hold the answer, then write the answer alone: "
    "a name or a number without its unit."
)


class KnowledgeSearch(ToolEnvironment):
    """Questions of from `hops_min` to `hops_max` hops: with 2, the country has to be found first.

    A search shows `results` documents, a reading at most `page_chars` characters: fewer are harder. `corpus` is all of
    the encyclopedia (`full`) or the excerpt that needs no preparation (`excerpt`).
    """

    hints: ClassVar[Hints] = Hints(expected_turns=4, prompt_tokens=100, response_tokens=30)
    needs: ClassVar[Needs] = Needs(memory_mb=16)

    def __init__(
        self,
        hops_min: int = 1,
        hops_max: int = 2,
        results: int = 5,
        page_chars: int = 1500,
        corpus: Literal["full", "excerpt"] = "full",
    ):
        if not 1 <= hops_min <= hops_max <= 2:
            raise ValueError(f"hops_min ({hops_min}) must be 1 or 2, and at most hops_max ({hops_max}), that 2 at most")
        if not 1 <= results <= 50:
            raise ValueError(f"results ({results}) must be from 1 to 50")
        if not 200 <= page_chars <= 20000:
            raise ValueError(f"page_chars ({page_chars}) must be from 200 to 20000")
        if corpus not in CORPORA:
            raise ValueError(f"corpus ({corpus!r}) must be one of {', '.join(CORPORA)}")
        self._hops, self._corpus = range(hops_min, hops_max + 1), corpus
        self._results, self._page = results, page_chars
        self._db: sqlite3.Connection | None = None

    @classmethod
    def fetch(cls, options: Mapping[str, Any]) -> None:
        build("knowledge_search", RECIPE, collect, fill)

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> None:
        if options.get("corpus", "full") == "full":
            find("knowledge_search", RECIPE)

    async def reset(self, problem: Problem) -> list[Message]:
        return await self.in_thread(lambda: self._open(problem))

    def _open(self, problem: Problem) -> list[Message]:
        self._db = connect("knowledge_search", self._corpus, fill)
        rng = random.Random(problem.seed)
        hops, clue = rng.choice(self._hops), None
        (count,) = next(self._rows("SELECT MAX(id) FROM facts"))
        while True:
            self._fact = Fact(*next(self._rows(f"{_FACT} id = ?", rng.randint(1, count))))
            if in_split(self.fingerprint(), problem.split) and (hops == 1 or (clue := self._clue(rng))):
                break
        subject = CLUES[clue.attribute].format(clue.value) if clue else self._fact.subject
        turns = [*self._findings(clue, clue.value)] if clue else []
        self._script = iter([*turns, *self._findings(self._fact, self._fact.subject)])
        return [Message("system", INSTRUCTIONS), Message("user", QUESTIONS[self._fact.attribute].format(subject))]

    def _clue(self, rng: random.Random) -> Fact | None:
        """Another fact of the same subject that is true of no other, and does not name it."""
        found = [Fact(*row) for row in self._rows(f"{_FACT} subject = ? ORDER BY id", self._fact.subject)]
        same_value = "SELECT COUNT(*) FROM facts WHERE attribute = ? AND value = ?"
        clues = [f for f in found if is_clue(f.attribute, self._fact.attribute) and f.subject not in f.value]
        alone = [f for f in clues if next(self._rows(same_value, f.attribute, f.value)) == (1,)]
        return rng.choice(alone) if alone else None

    def _findings(self, fact: Fact, known: str) -> Iterator[str]:
        """The turns up to a fact, of an expert who was shown where it stands."""
        ((text,),) = self._rows("SELECT text FROM documents WHERE rowid = ?", fact.document)
        yield write_call("search", query=f"{known} {search_words(fact.attribute)}")
        place = text.index(fact.evidence) + fact.evidence.rindex(fact.value)
        yield write_call("read", document=fact.document, page=place // self._page + 1)

    def _rows(self, sql: str, *values: Any) -> Iterator[Any]:
        assert self._db is not None, "reset comes before any call"
        return self._db.execute(sql, values)

    @tool
    def search(self, query: str) -> str:
        """The documents that fit the words of the query best: number, title and an excerpt."""
        words = terms(query)
        if not words:
            raise ToolError("give some words to search for")
        found: dict[int, str] = {}
        for operator in (" AND ", " OR "):  # documents with all of the words come first
            if len(found) < self._results:
                for at, title, part in self._rows(_SEARCH, operator.join(words), self._results):
                    found.setdefault(at, f"{at}. {title} -- {' '.join(part.split())}")
        return "\n".join([*found.values()][: self._results]) or "nothing found"

    @tool
    def read(self, document: int, page: int = 1) -> str:
        """One page of the document of that number."""
        known = 0 < document < 2**31  # more than that is no row's number
        row = next(self._rows("SELECT title, text FROM documents WHERE rowid = ?", document), None) if known else None
        if row is None:
            raise ToolError(f"there is no document {document}")
        title, text = row
        pages = max(1, -(-len(text) // self._page))
        if not 1 <= page <= pages:
            raise ToolError(f"document {document} has pages 1 to {pages}, not {page}")
        return f"{title} (page {page} of {pages})\n{text[(page - 1) * self._page : page * self._page]}"

    def answer(self, text: str) -> Step:
        right = same(text, self._fact.value)
        said = "right" if right else "wrong"
        info = {"end": said, "answer": self._fact.value, "attribute": self._fact.attribute}
        return Step(Message("user", said), float(right), terminated=True, info=info)

    async def close(self) -> None:
        if self._db is not None:
            await self.in_thread(self._db.close)

    def fingerprint(self) -> object:
        return [self._fact.attribute, self._fact.subject]

    def expert_action(self) -> str:
        return next(self._script, self._fact.value)


_SEARCH = (
    "SELECT rowid, title, snippet(documents, 2, '[', ']', '...', 16) FROM documents WHERE documents MATCH ? "
    "ORDER BY bm25(documents, 0, 4, 1), rowid LIMIT ?"
)
_FACT = "SELECT attribute, subject, value, document, evidence FROM facts WHERE"
