"""SQL tables: a transcript, answers found in another way, and queries that must do no more than read."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

from envs.answers import same
from envs.check import Subject, examine
from envs.episodes import at_random, expert, play
from envs.sql_tables import SqlTables
from envs.tools import write_call
from rl.stream import derive_seed
from rl.trajectory import Problem


def problem(seed: int, split: str = "train") -> Problem:
    return Problem(0, "test", 0, derive_seed("test", seed), split)


async def ask(environment: SqlTables, sql: str) -> tuple[str, str | None]:
    step = await environment.step(write_call("query", sql=sql))
    return step.observation.content, step.error


async def rows(environment: SqlTables, table: str) -> list[tuple[Any, ...]]:
    db = environment._db
    assert db is not None
    return await environment.in_thread(lambda: db.execute(f"SELECT * FROM {table}").fetchall())


async def test_transcript() -> None:
    environment = SqlTables(joins_min=1, joins_max=1, rows=60)
    episode = await play(environment, problem(1), expert, 10)
    await environment.close()
    assert [f"{m.role}: {m.content}" for m in episode.messages[1:]] == TRANSCRIPT
    assert (episode.reward, episode.steps[-1].info["end"]) == (1.0, "right")


async def test_answers_agree_with_counting_by_hand() -> None:
    """The rows are read one table at a time and joined here, not by SQLite."""
    counted = 0
    for seed in range(60):
        environment = SqlTables(joins_min=1, joins_max=1, rows=60)
        text = (await environment.reset(problem(seed)))[-1].content
        found = re.search(r": (\w+) of (\w+) whose \w+ is (\w+), .* above (\d+)\?", text)
        if found is not None and "average" not in text:
            child, parent = (rows(environment, name) for name in found.group(1, 2))
            category = {row[0]: row[-2] for row in await parent}
            numbers = [n for *_, n in (row for row in await child if category[row[2]] == found[3]) if n > int(found[4])]
            assert str(len(numbers) if text.startswith("How many") else sum(numbers)) == environment._right
            counted += 1
        await environment.close()
    assert counted >= 15


async def test_it_keeps_the_promises_of_an_environment() -> None:
    found = await examine(Subject(partial(SqlTables, rows=60), problems=15))
    assert [finding for finding in found if not finding.ok] == []


async def test_experts_are_always_right_and_random_agents_never() -> None:
    for joins in range(3):
        for seed in range(15):
            for say, reward in ((expert, 1.0), (at_random(seed), 0.0)):
                environment = SqlTables(joins, joins, rows=60)
                assert (await play(environment, problem(seed, "heldout"), say, 10)).reward == reward
                await environment.close()


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM {0}",
        "UPDATE {0} SET id = 1",
        "DROP TABLE {0}",
        "INSERT INTO {0} (id) VALUES (999)",
        "CREATE TABLE more (x)",
        "CREATE TEMP TABLE more (x)",
        "ATTACH DATABASE '/tmp/rollmill-attached' AS other",
        "PRAGMA writable_schema = 1",
        "VACUUM INTO '/tmp/rollmill-vacuum'",
        "SELECT load_extension('x')",
        "SELECT 1; SELECT 2",
        "SELECT zeroblob(1000000000)",
        "SELECT nothing FROM {0}",
        "SELECT CAST(x'ff' AS TEXT)",
        "SELECT '\x00'",
        "SELECT 1 -- " + "x" * 6000,
        "WITH RECURSIVE t (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT COUNT(*) FROM t",
        "WITH RECURSIVE t (n, s) AS (SELECT 1, zeroblob(4000) UNION SELECT n + 1, s FROM t) SELECT COUNT(*) FROM t",
        "BEGIN",
    ],
)
async def test_a_query_only_reads_and_always_ends(sql: str) -> None:
    environment = SqlTables(rows=60)
    await environment.reset(problem(0))
    table = environment._theme[0].name
    before = await ask(environment, f"SELECT * FROM {table}")
    _, error = await ask(environment, sql.format(table))
    assert error == "tool_error"
    assert await ask(environment, f"SELECT * FROM {table}") == before
    await environment.close()


async def test_the_limit_on_steps_is_each_querys_own() -> None:
    environment = SqlTables(rows=60)
    await environment.reset(problem(0))
    count = "WITH RECURSIVE t (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t WHERE n < 5000) SELECT COUNT(*) FROM t"
    assert {await ask(environment, count) for _ in range(20)} == {("COUNT(*)\n5000", None)}
    await environment.close()


async def test_long_results_are_cut() -> None:
    environment = SqlTables(rows=60)
    await environment.reset(problem(0))
    text, error = await ask(environment, f"SELECT id FROM {environment._theme[2].name}")
    assert error is None and text.splitlines() == ["id", *map(str, range(1, 21)), "(more rows)"]
    text, _ = await ask(environment, "SELECT hex(zeroblob(2000))")
    assert len(text) < 2100
    await environment.close()


def test_mistakes_in_options_are_named() -> None:
    with pytest.raises(ValueError, match=r"joins_min \(2\) must be from 0 to joins_max \(1\)"):
        SqlTables(2, 1)
    with pytest.raises(ValueError, match=r"rows \(5\) must be from 60"):
        SqlTables(rows=5)


@pytest.mark.parametrize(
    ("given", "right", "equal"),
    [
        ("1,234", "1234", True),
        (" 12.50. ", "12.5", True),
        ("-5", "5", False),
        ("1.5", "15", False),
        ("1,5", "15", False),
        ("The Côte d'Or.", "cote d'or", True),
        ("٣", "3", False),
        ("9" * 5000, "9", False),
        ("", "12", False),
        ("12 or 13", "12", False),
        ("nan", "inf", False),
    ],
)
def test_answers_are_compared_by_what_they_say(given: str, right: str, equal: bool) -> None:
    assert same(given, right) is equal


TRANSCRIPT = [
    "user: What is the sum of tickets: screenings of films whose genre is western, counting only screenings with "
    "tickets above 80?",
    'assistant: <tool_call>\n{"name": "schema", "arguments": {}}\n</tool_call>',
    "tool: CREATE TABLE studios (id INTEGER PRIMARY KEY, name TEXT, city TEXT, staff INTEGER)\n"
    "CREATE TABLE films (id INTEGER PRIMARY KEY, name TEXT, studio_id INTEGER REFERENCES studios (id), genre TEXT, "
    "minutes INTEGER)\n"
    "CREATE TABLE screenings (id INTEGER PRIMARY KEY, name TEXT, film_id INTEGER REFERENCES films (id), hall TEXT, "
    "tickets INTEGER)",
    'assistant: <tool_call>\n{"name": "query", "arguments": {"sql": "SELECT SUM(screenings.tickets) FROM screenings '
    "JOIN films ON screenings.film_id = films.id WHERE films.genre = 'western' AND screenings.tickets > 80\"}}\n"
    "</tool_call>",
    "tool: SUM(screenings.tickets)\n1051",
    "assistant: 1051",
    "user: right",
]
