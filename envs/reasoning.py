"""Puzzles of the library reasoning-gym: one question, one answer, scored by the library.

    user       Find the prime factorization of 546. ... Put your answer between <answer> and </answer>.
    assistant  2 * 273, and 273 is ... <answer>2 × 3 × 7 × 13</answer>
    user       right

Only families whose generator and scorer were read are here: none executes the answer, as some of the library do (by
`eval`, or by sympy's parser), and none draws from a global generator.

Invariants
- A problem is its question, and the split is decided by it.
- An answer longer than `LONGEST` is not looked at, so that scoring takes little time.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

from envs.protocol import Environment, Hints, Mistake, Step, in_split
from envs.tools import spoken
from rl.errors import ConfigError
from rl.stream import derive_seed
from rl.trajectory import Message, Problem

LONGEST = 1000
LEVELS = ("easy", "medium", "hard")
FAMILIES: dict[str, tuple[dict[str, float], dict[str, float], dict[str, float]]] = {
    "chain_sum": (
        {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
        {"min_terms": 3, "max_terms": 5, "min_digits": 2, "max_digits": 3},
        {"min_terms": 6, "max_terms": 10, "min_digits": 3, "max_digits": 5},
    ),
    "knights_knaves": ({"n_people": 2}, {"n_people": 3}, {"n_people": 5}),
    "leg_counting": (
        {"min_animals": 1, "max_animals": 3},
        {"min_animals": 4, "max_animals": 6},
        {"min_animals": 7, "max_animals": 10},
    ),
    "mini_sudoku": (
        {"min_empty": 4, "max_empty": 5},
        {"min_empty": 6, "max_empty": 8},
        {"min_empty": 9, "max_empty": 12},
    ),
    "prime_factorization": (
        {"min_value": 4, "max_value": 200},
        {"min_value": 200, "max_value": 2000},
        {"min_value": 2000, "max_value": 100_000},
    ),
    "shortest_path": (
        {"min_rows": 3, "max_rows": 4, "min_cols": 3, "max_cols": 4, "p_blocked": 0.2},
        {"min_rows": 5, "max_rows": 7, "min_cols": 5, "max_cols": 7, "p_blocked": 0.2},
        {"min_rows": 8, "max_rows": 12, "min_cols": 8, "max_cols": 12, "p_blocked": 0.2},
    ),
    "spell_backward": (
        {"min_word_len": 3, "max_word_len": 5},
        {"min_word_len": 6, "max_word_len": 7},
        {"min_word_len": 8, "max_word_len": 10},
    ),
    "word_sorting": (
        {"min_words": 3, "max_words": 4},
        {"min_words": 5, "max_words": 8},
        {"min_words": 10, "max_words": 16},
    ),
}
"""The library's options for each level."""
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*)</answer>", re.DOTALL)


class Reasoning(Environment):
    """A `family` of puzzles at a `level` of difficulty. The reward is 1 for a right answer, else 0, or with
    `credit: share` what the library gives for one that is right in part."""

    hints: ClassVar[Hints] = Hints(expected_turns=1, prompt_tokens=160, response_tokens=200)

    def __init__(
        self,
        family: str = "chain_sum",
        level: Literal["easy", "medium", "hard"] = "easy",
        credit: Literal["all", "share"] = "all",
    ):
        if family not in FAMILIES:
            raise ValueError(f"family ({family!r}) must be one of {', '.join(FAMILIES)}")
        if level not in LEVELS:
            raise ValueError(f"level ({level!r}) must be one of {', '.join(LEVELS)}")
        if credit not in ("all", "share"):
            raise ValueError(f"credit ({credit!r}) must be 'all' or 'share'")
        require_library("reasoning")
        self._family, self._level, self._credit = family, level, credit

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> None:
        """Import the library, which takes seconds."""
        environment = cls(**options)
        _puzzles(environment._family, environment._level)

    async def reset(self, problem: Problem) -> list[Message]:
        self._puzzle = await self.in_thread(lambda: self._draw(problem))
        text = f"{self._puzzle['question'].strip()}\n\nPut your answer between <answer> and </answer>."
        return [Message("user", text)]

    def _draw(self, problem: Problem) -> dict[str, Any]:
        puzzles, attempt = _puzzles(self._family, self._level), 0
        while not in_split((puzzle := puzzles[derive_seed(problem.seed, attempt)])["question"], problem.split):
            attempt += 1
        return puzzle

    async def step(self, action: str) -> Step:
        answers = _ANSWER.findall(spoken(action))
        if not answers or len(answers[-1]) > LONGEST:
            return _end("invalid", 0.0, Mistake.INVALID)
        try:
            score = float(_puzzles(self._family, self._level).score_answer(answers[-1].strip(), self._puzzle))
        except ValueError:  # how some scorers say that they can not read it
            return _end("invalid", 0.0, Mistake.INVALID)
        right = score >= 1.0
        return _end("right" if right else "wrong", score if self._credit == "share" else float(right))

    def fingerprint(self) -> object:
        return self._puzzle["question"]

    def expert_action(self) -> str:
        return f"<answer>{self._puzzle['answer']}</answer>"

    def random_action(self, rng: random.Random) -> str:
        """The answer to some other puzzle of the family."""
        return f"<answer>{_puzzles(self._family, self._level)[rng.getrandbits(60)]['answer']}</answer>"


def require_library(environment: str) -> None:
    """Raises ConfigError if reasoning-gym is not installed; does not import it."""
    if find_spec("reasoning_gym") is None:
        raise ConfigError(
            f"environment {environment} needs the library reasoning-gym; run `pip install 'rollmill[reasoning-gym]'`"
        )


@cache
def _puzzles(family: str, level: str) -> Any:
    """All puzzles of a family, indexed by seed. Nothing in them changes, so episodes share them."""
    from reasoning_gym.factory import create_dataset

    return create_dataset(family, seed=0, **FAMILIES[family][LEVELS.index(level)])


def _end(how: str, reward: float, error: str | None = None) -> Step:
    return Step(Message("user", how), reward, terminated=True, info={"end": how}, error=error)
