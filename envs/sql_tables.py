"""Questions about a database that the policy can only query: three tables made up anew for every problem.

    user       How many are there: players of teams whose league is north, ...?
    assistant  <tool_call>{"name": "schema", "arguments": {}}</tool_call>
    tool       CREATE TABLE teams (id INTEGER PRIMARY KEY, name TEXT, league TEXT, founded INTEGER) ...
    assistant  <tool_call>{"name": "query", "arguments": {"sql": "SELECT COUNT(*) FROM players JOIN ..."}}</tool_call>
    tool       COUNT(*)
               27
    assistant  27

The reward is 1 if the answer is the right one, else 0.

Invariants
- A query reads the tables and does nothing else; it ends within `STEPS` steps of SQLite's machine.
- The answer is never a single digit, so that guessing is no policy.
"""

from __future__ import annotations

import random
import sqlite3
from typing import ClassVar

from envs.answers import same
from envs.data.tables import ask, fill
from envs.protocol import Hints, Needs, Step, in_split
from envs.tools import ToolEnvironment, ToolError, tool, write_call
from rl.stream import derive_seed
from rl.trajectory import Message, Problem

STEPS = 200_000
"""Counted in SQLite's instructions, so that equal queries end equally on any machine. (A cached statement would go on
counting where it stopped: none is cached.)"""
ROWS, CHARACTERS = 20, 2000
INSTRUCTIONS = "Answer the question from the database. Look at its schema, query it, then write the answer alone."
_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_LIMITS = {sqlite3.SQLITE_LIMIT_LENGTH: 5000, sqlite3.SQLITE_LIMIT_SQL_LENGTH: 5000, sqlite3.SQLITE_LIMIT_COLUMN: 50}


class SqlTables(ToolEnvironment):
    """Questions that take from `joins_min` to `joins_max` joins (0 to 2), on tables of at most `rows` rows."""

    hints: ClassVar[Hints] = Hints(expected_turns=3, prompt_tokens=80, response_tokens=50)
    needs: ClassVar[Needs] = Needs(memory_mb=4)

    def __init__(self, joins_min: int = 0, joins_max: int = 2, rows: int = 200):
        if not 0 <= joins_min <= joins_max <= 2:
            raise ValueError(f"joins_min ({joins_min}) must be from 0 to joins_max ({joins_max}), and that 2 at most")
        if not 60 <= rows <= 2000:
            raise ValueError(f"rows ({rows}) must be from 60 to 2000")
        self._joins, self._rows = range(joins_min, joins_max + 1), rows
        self._db: sqlite3.Connection | None = None
        self._script = iter("")

    async def reset(self, problem: Problem) -> list[Message]:
        return await self.in_thread(lambda: self._open(problem))

    def _open(self, problem: Problem) -> list[Message]:
        rng = random.Random(problem.seed)
        self._db = db = sqlite3.connect(":memory:", isolation_level=None, cached_statements=0)
        self._theme = fill(db, rng, self._rows)
        content = [db.execute(f"SELECT * FROM {table.name}").fetchall() for table in self._theme]
        while True:
            question = ask(rng, self._theme, rng.choice(self._joins))
            self._right = str(db.execute(question.sql).fetchone()[0])
            self._print = derive_seed(question.text, content)
            if self._right != "None" and len(self._right) > 1 and in_split(self._print, problem.split):
                break
        db.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _READING else sqlite3.SQLITE_DENY)
        for limit, value in _LIMITS.items():
            db.setlimit(limit, value)
        calls = write_call("schema"), write_call("query", sql=question.sql)
        self._script = iter((*calls, self._right))
        return [Message("system", INSTRUCTIONS), Message("user", question.text)]

    @tool
    def schema(self) -> str:
        """The statements that made the tables."""
        return self._rows_of("SELECT sql FROM sqlite_master").partition("\n")[2]

    @tool
    def query(self, sql: str) -> str:
        """The rows of one SELECT of SQLite, 20 at most, under a line with the names of the columns."""
        return self._rows_of(sql)

    def _rows_of(self, sql: str) -> str:
        assert self._db is not None, "reset comes before any call"
        self._db.set_progress_handler(lambda: True, STEPS)
        try:
            cursor = self._db.execute(sql)
            rows = cursor.fetchmany(ROWS + 1)
            cursor.close()
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            interrupted = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT
            raise ToolError(f"the query takes more than {STEPS} steps" if interrupted else str(error)) from error
        lines = [[column[0] for column in cursor.description or ()], *rows[:ROWS]]
        text = "\n".join(" | ".join(map(str, line)) for line in lines)[:CHARACTERS]
        return f"{text}\n(more rows)" if len(rows) > ROWS else text

    def answer(self, text: str) -> Step:
        right = same(text, self._right)
        said = "right" if right else "wrong"
        return Step(Message("user", said), float(right), terminated=True, info={"end": said, "answer": self._right})

    async def close(self) -> None:
        if self._db is not None:
            await self.in_thread(self._db.close)

    def fingerprint(self) -> object:
        return self._print

    def expert_action(self) -> str:
        return next(self._script, self._right)
