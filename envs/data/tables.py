"""Small databases made up from a seed, and questions about them with the query that answers each.

Three tables in a chain (teams, their players, the players' matches); every table has an id, a name, a category and a
number, every table but the first the id of its parent.

Invariants
- Everything is drawn from the generator given: equal states give equal databases and questions.
- Names are made up, so nothing can be known without a query.
"""

from __future__ import annotations

import random
import sqlite3
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """One table: `one` is the word for a row; `values` are those of the category, `low` to `high` the number's."""

    name: str
    one: str
    category: str
    values: tuple[str, ...]
    number: str
    low: int
    high: int


Chain = tuple[Table, Table, Table]
THEMES: tuple[Chain, ...] = (
    (
        Table("teams", "team", "league", ("north", "south", "east", "west"), "founded", 1890, 2020),
        Table("players", "player", "position", ("goalkeeper", "defender", "midfielder", "striker"), "age", 17, 39),
        Table("matches", "match", "weather", ("sun", "rain", "wind", "snow"), "passes", 5, 90),
    ),
    (
        Table("farms", "farm", "region", ("coast", "plain", "hills"), "hectares", 12, 400),
        Table("fields", "field", "soil", ("clay", "sand", "loam", "peat"), "slope", 0, 30),
        Table("harvests", "harvest", "crop", ("barley", "oats", "rye", "beets"), "tonnes", 2, 80),
    ),
    (
        Table("studios", "studio", "city", ("Oslo", "Quito", "Hanoi", "Accra"), "staff", 10, 300),
        Table("films", "film", "genre", ("drama", "comedy", "thriller", "western"), "minutes", 61, 190),
        Table("screenings", "screening", "hall", ("red", "blue", "green"), "tickets", 11, 250),
    ),
    (
        Table("ports", "port", "sea", ("inner", "outer", "polar"), "depth", 8, 40),
        Table("ships", "ship", "cargo", ("grain", "oil", "ore", "cars"), "crew", 9, 60),
        Table("voyages", "voyage", "season", ("spring", "summer", "autumn", "winter"), "days", 3, 70),
    ),
)
_SYLLABLES = ("ba", "dor", "fi", "gul", "ka", "lem", "mi", "nor", "pe", "rus", "sa", "tov", "ul", "vex", "wi", "zan")


@dataclass(frozen=True)
class Question:
    """A question and the query whose one row and one column is the answer."""

    text: str
    sql: str


def fill(db: sqlite3.Connection, rng: random.Random, rows: int) -> Chain:
    """Make the tables of a theme: `rows` in the last, fewer in those before."""
    theme = rng.choice(THEMES)
    parent: tuple[Table, int] | None = None
    for table, count in zip(theme, (max(3, rows // 20), max(6, rows // 5), rows), strict=True):
        key = f", {parent[0].one}_id INTEGER REFERENCES {parent[0].name} (id)" if parent else ""
        columns = f"id INTEGER PRIMARY KEY, name TEXT{key}, {table.category} TEXT, {table.number} INTEGER"
        db.execute(f"CREATE TABLE {table.name} ({columns})")
        names: dict[str, None] = {}
        while len(names) < count:
            names["".join(rng.choices(_SYLLABLES, k=3)).capitalize()] = None
        for at, name in enumerate(names):
            keys = [rng.randint(1, parent[1])] if parent else []
            row = [at + 1, name, *keys, rng.choice(table.values), rng.randint(table.low, table.high)]
            db.execute(f"INSERT INTO {table.name} VALUES ({', '.join('?' * len(row))})", row)
        parent = table, count
    return theme


def ask(rng: random.Random, theme: Chain, joins: int) -> Question:
    """A question that takes so many joins, 0 to 2."""
    top = rng.randint(0, 2 - joins)
    chain = theme[top : top + joins + 1]
    first, last = chain[0], chain[-1]
    tables = last.name
    for child, parent in zip(chain[:0:-1], chain[-2::-1], strict=True):
        tables += f" JOIN {parent.name} ON {child.name}.{parent.one}_id = {parent.name}.id"
    number, limit = f"{last.name}.{last.number}", rng.randint(last.low, (last.low + last.high) // 2)
    above = f"{number} > {limit}"
    if joins and rng.random() < 0.3:
        every = " of their ".join(table.name for table in reversed(chain[1:]))
        return Question(
            f"Which {first.one} has the highest sum of {last.number} over all of its {every} with {last.number} above "
            f"{limit}? Give its name, the first by alphabet if several have it.",
            f"SELECT {first.name}.name FROM {tables} WHERE {above} GROUP BY {first.name}.id "
            f"ORDER BY SUM({number}) DESC, {first.name}.name LIMIT 1",
        )
    value = rng.choice(first.values)
    where = f" WHERE {first.name}.{first.category} = '{value}' AND {above}"
    of = " of ".join(table.name for table in reversed(chain))
    rows = f"{of} whose {first.category} is {value}, counting only {last.name} with {last.number} above {limit}"
    return rng.choice(
        (
            Question(f"How many are there: {rows}?", f"SELECT COUNT(*) FROM {tables}{where}"),
            Question(f"What is the sum of {last.number}: {rows}?", f"SELECT SUM({number}) FROM {tables}{where}"),
            Question(
                f"What is the average {last.number}, rounded to two decimals: {rows}?",
                f"SELECT ROUND(AVG({number}), 2) FROM {tables}{where}",
            ),
        )
    )
