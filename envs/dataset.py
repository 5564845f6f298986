"""A Hugging Face dataset as a stream of problems: one row, one question, one answer.

    user       Natalia sold clips to 48 of her friends in April, and then she sold half as many in May. ...
    assistant  48 + 24 = 72
    user       right

The dataset is a name on the hub, a directory that `save_to_disk` wrote, or files (Parquet, JSON lines, CSV). The last
`info` has the right answer, and so rewards such as `math` and `exact_match` compare with it; without them, an answer
that says the same, whatever its case and punctuation, earns 1.

Invariants
- Every row of a split is drawn once before any is drawn again, then in another order; equal indices draw equal rows.
- The split is decided by the prompt: rows with one prompt are on one side, also with splits of the dataset's own.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar

from envs.answers import same
from envs.protocol import Environment, Hints, Mistake, Step, in_split
from envs.tools import spoken
from rl.errors import ConfigError
from rl.stream import derive_seed
from rl.trajectory import Message, Problem

READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
"""The reader of `datasets` for files of each kind."""
INSTALL = "environment dataset needs the library datasets; run `pip install datasets`"


@dataclass(frozen=True)
class Source:
    """Where the rows are, and which of their columns are what."""

    path: str
    name: str | None
    split: str
    held_out_split: str | None
    revision: str | None
    prompt: str
    answer: str
    difficulty: str | None


class Dataset(Environment):
    """The rows of `split` of the dataset at `path` (of its configuration `name`, at `revision`).

    `prompt` is a text with the names of columns in braces, or one such name whose column holds messages; `answer` and
    `difficulty` name columns. What follows the last `answer_after` in its column is the answer (`"####"` for GSM8K).
    One fifth of the prompts is held out, unless `held_out_split` names a split for it. `system` goes before every
    prompt.
    """

    hints: ClassVar[Hints] = Hints(expected_turns=1, prompt_tokens=200, response_tokens=300)

    def __init__(
        self,
        path: str,
        name: str | None = None,
        split: str = "train",
        held_out_split: str | None = None,
        revision: str | None = None,
        prompt: str = "{prompt}",
        answer: str = "answer",
        answer_after: str | None = None,
        difficulty: str | None = None,
        system: str | None = None,
    ):
        if Path(path).suffix in READERS and not Path(path).is_file() and "*" not in path:
            raise ValueError(f"path ({path!r}) is no file")
        if not columns_of(prompt) or "" in columns_of(prompt):  # braces with nothing in them take a value by its place
            raise ValueError(f"prompt ({prompt!r}) names no column; write one in braces, such as {{question}}")
        if answer_after == "":
            raise ValueError("answer_after ('') is empty, and follows nothing; leave it away for the whole column")
        self._source = Source(path, name, split, held_out_split, revision, prompt, answer, difficulty)
        self._after, self._system = answer_after, system
        self._answer = ""
        self._info: dict[str, Any] = {}

    @classmethod
    def fetch(cls, options: Mapping[str, Any]) -> None:
        """Download the dataset into the cache of `datasets`."""
        cls.prepare(options)

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> None:
        """Open the dataset, which is read from disk as it is needed. Raises ConfigError."""
        table(cls(**options)._source)

    async def reset(self, problem: Problem) -> list[Message]:
        found = await self.in_thread(lambda: table(self._source).draw(problem))
        self._answer = str(found[self._source.answer])
        if self._after is not None:
            self._answer = self._answer.rpartition(self._after)[2]
        self._answer = self._answer.strip()
        self._info = {"answer": self._answer}
        if self._source.difficulty is not None:
            self.difficulty = found[self._source.difficulty]
        opening = messages(self._source.prompt, found)
        return [Message("system", self._system), *opening] if self._system is not None else opening

    async def step(self, action: str) -> Step:
        given = spoken(action).strip()
        right = bool(given) and same(given, self._answer)
        error = None if given else Mistake.INVALID
        told = Message("user", "right" if right else "wrong")
        return Step(told, float(right), terminated=True, info=self._info, error=error)

    def expert_action(self) -> str:
        return self._answer


@dataclass(frozen=True)
class Table:
    """The rows of a dataset, and which of them are of each split."""

    rows: Mapping[str, Any]
    """By split: what `datasets` opened."""
    places: Mapping[str, list[int]]
    """By split: the numbers of its rows."""

    def draw(self, problem: Problem) -> dict[str, Any]:
        """The row of a problem: its index counts through the rows, and then again in another order."""
        places = self.places[problem.split]
        found: dict[str, Any] = self.rows[problem.split][places[_shuffled(len(places), problem)]]
        return found


def _shuffled(count: int, problem: Problem) -> int:
    epoch, at = divmod(problem.index, count)
    return _order(count, derive_seed("dataset", problem.split, epoch))[at]


@lru_cache(maxsize=4)
def _order(count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(count), count)


@cache
def table(source: Source) -> Table:
    """The dataset, opened once per process. Raises ConfigError for one that is not there or has other columns."""
    train = _opened(source, source.split)
    held_out = train if source.held_out_split is None else _opened(source, source.held_out_split)
    wanted = {*columns_of(source.prompt), source.answer} | ({source.difficulty} if source.difficulty else set())
    for rows in (train, held_out):
        if missing := wanted.difference(rows.column_names):
            raise ConfigError(
                f"environment_options: dataset {source.path!r} has no column {min(missing)!r}; it has "
                f"{', '.join(rows.column_names)}"
            )
    prompts = [_text(source, row) for row in train]
    if source.held_out_split is None:
        places = {
            split: [at for at, prompt in enumerate(prompts) if in_split(prompt, split)]
            for split in ("train", "heldout")
        }
    else:
        kept = {_text(source, row) for row in held_out}
        places = {
            "train": [at for at, prompt in enumerate(prompts) if prompt not in kept],
            "heldout": list(range(len(held_out))),
        }
    for split, numbers in places.items():
        if not numbers:
            raise ConfigError(f"environment_options.path: {source.path!r} has no row for the split {split}; add more")
    return Table({"train": train, "heldout": held_out}, places)


def _opened(source: Source, split: str) -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ConfigError(INSTALL) from error
    path = Path(source.path)
    try:
        if path.suffix in READERS:
            return datasets.load_dataset(READERS[path.suffix], data_files={split: source.path}, split=split)
        if path.is_dir() and any(path.glob("**/state.json")):
            found = datasets.load_from_disk(source.path)
            return found[split] if isinstance(found, datasets.DatasetDict) else found
        return datasets.load_dataset(source.path, source.name, split=split, revision=source.revision)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"environment_options.path: dataset {source.path!r}, split {split!r}, can not be opened: {error}; "
            "`rollmill env prepare dataset --set path=...` fetches one"
        ) from error


def columns_of(prompt: str) -> set[str]:
    """The columns that a prompt names. Raises ValueError for braces that do not match."""
    return {field for _, field, _, _ in string.Formatter().parse(prompt) if field is not None}


def messages(prompt: str, row: Mapping[str, Any]) -> list[Message]:
    """The opening of a row."""
    only = prompt[1:-1]
    if isinstance(row.get(only), list):
        return [Message(message["role"], message["content"]) for message in row[only]]
    return [Message("user", prompt.format_map(row))]


def _text(source: Source, row: Mapping[str, Any]) -> str:
    return json.dumps([(m.role, m.content) for m in messages(source.prompt, row)], ensure_ascii=False)
