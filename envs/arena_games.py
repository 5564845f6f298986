"""Games of the library textarena for one player, who has to ask well: Mastermind and Guess The Number.

    user       You are playing Mastermind. ...
    assistant  [1 2 3 4]
    user       Submitted [1 2 3 4]. Feedback: 1 black peg(s), 1 white peg(s).
    ...

The library checks and answers each guess. Finding what is hidden within the guesses allowed gives 1, all else 0: the
library's rewards for coming close are left out, for whoever guesses at random comes close. The last guess of a turn
counts. One turn without a proper guess is answered, a second in a row ends the game.

Invariants
- A problem is what is hidden, and the split is decided by it.
- Nothing draws from Python's global generator, as the library would: its modules draw from a generator of the calling
  thread's own, and a SyncEnvironment has a thread of its own.
"""

from __future__ import annotations

import importlib
import random
import re
import threading
from abc import abstractmethod
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from itertools import permutations, product
from typing import Any, ClassVar

from envs.protocol import Hints, Mistake, Step, SyncEnvironment, in_split
from envs.tools import spoken
from rl.errors import ConfigError
from rl.stream import derive_seed
from rl.trajectory import Message, Problem

_GUESS = re.compile(r"\[[0-9 ]{1,60}\]")


class UnexpectedEnd(Exception):
    """The library ended a game that its player neither won nor spoilt."""


class _OwnRandom:
    """In place of the module `random`: the generator of this thread, or the module where a thread has none."""

    def __init__(self) -> None:
        self._threads = threading.local()

    def give(self) -> None:
        """Give this thread a generator; textarena seeds it."""
        self._threads.generator = random.Random()

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self._threads, "generator", random), name)


_RANDOM = _OwnRandom()


@cache
def _game_class(name: str) -> Any:
    core = importlib.import_module("textarena.core")
    module = importlib.import_module(f"textarena.envs.{name}.env")
    for user in (core, module):
        user.random = _RANDOM  # type: ignore[attr-defined]
    return getattr(module, f"{name}Env")


class ArenaGame(SyncEnvironment):
    """Of a game, its name in textarena, its options there, and what is hidden."""

    game: ClassVar[str]

    def __init__(self, guesses: int, options: Mapping[str, Any]):
        if find_spec("textarena") is None:
            name = type(self).__name__
            raise ConfigError(f"environment {name} needs textarena; run `pip install 'rollmill[textarena]'`")
        self._guesses, self._options = guesses, options
        self._made = 0
        self._tried: list[tuple[int, ...]] = []

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> None:
        """Import the library, which takes seconds."""
        cls(**options)
        _game_class(cls.game)

    @abstractmethod
    def hidden(self) -> tuple[int, ...]:
        """What is to be found."""

    def reset_sync(self, problem: Problem) -> list[Message]:
        _RANDOM.give()
        self._play = _game_class(self.game)(max_turns=self._guesses, **self._options)
        attempt = 0
        while True:
            self._play.reset(num_players=1, seed=derive_seed(problem.seed, attempt))
            if in_split(self.hidden(), problem.split):
                return [Message("user", self._said())]
            attempt += 1

    def step_sync(self, action: str) -> Step:
        state, guesses = self._play.state, _GUESS.findall(spoken(action))
        errors = state.error_count
        done, _ = self._play.step(guesses[-1] if guesses else "")
        said = self._said()
        if state.error_count > errors or state.game_info[0]["invalid_move"]:
            return _end("invalid", 0.0, Mistake.INVALID) if done else Step(Message("user", said), error=Mistake.INVALID)
        self._made += 1
        self._tried.append(tuple(map(int, guesses[-1][1:-1].split())))
        if done and state.rewards != {0: 1}:
            raise UnexpectedEnd(f"textarena ended {self.game} after {self._made} guesses, rewards {state.rewards!r}")
        if done or self._made >= self._guesses:
            return _end("found", 1.0) if done else _end("out of guesses", 0.0)
        return Step(Message("user", said))

    def _said(self) -> str:
        """What the game, and not the player, said since the last turn."""
        _, messages = self._play.get_observation()
        return "\n".join(text.strip() for speaker, text, _ in messages if speaker == -1)

    def fingerprint(self) -> object:
        return self.hidden()


class Mastermind(ArenaGame):
    """A code of `digits` digits from 1 to `largest`, each once unless `repeats`; `guesses` may be made. More digits
    and larger ones are harder."""

    game: ClassVar[str] = "Mastermind"
    hints: ClassVar[Hints] = Hints(expected_turns=6, prompt_tokens=130, response_tokens=12)

    def __init__(self, digits: int = 3, largest: int = 5, repeats: bool = False, guesses: int = 8):
        if not 2 <= digits <= 5:
            raise ValueError(f"digits ({digits}) must be from 2 to 5")
        if not digits < largest <= 9:
            raise ValueError(f"largest ({largest}) must be from {digits + 1} to 9")
        if guesses < 1:
            raise ValueError(f"guesses ({guesses}) must be at least 1")
        options = {"code_length": digits, "num_numbers": largest, "duplicate_numbers": repeats}
        super().__init__(guesses, options)
        self._digits, self._largest, self._repeats = digits, largest, repeats

    def hidden(self) -> tuple[int, ...]:
        return tuple(self._play.state.game_state["secret_code"])

    def expert_action(self) -> str:
        """The first code that agrees with all answers."""
        signs, of = range(1, self._largest + 1), self._digits
        codes = product(signs, repeat=of) if self._repeats else permutations(signs, of)
        answers = [(guess, pegs(guess, self.hidden())) for guess in self._tried]
        return _guess(next(code for code in codes if all(pegs(g, code) == answer for g, answer in answers)))

    def random_action(self, rng: random.Random) -> str:
        signs = range(1, self._largest + 1)
        return _guess(rng.choices(signs, k=self._digits) if self._repeats else rng.sample(signs, self._digits))


class GuessTheNumber(ArenaGame):
    """A number from 1 to `largest`; each answer says higher or lower, and `guesses` may be made. The fewer guesses
    beyond the logarithm of `largest`, the harder."""

    game: ClassVar[str] = "GuessTheNumber"
    hints: ClassVar[Hints] = Hints(expected_turns=5, prompt_tokens=150, response_tokens=5)

    def __init__(self, largest: int = 100, guesses: int = 7):
        if not 10 <= largest <= 10**6:
            raise ValueError(f"largest ({largest}) must be from 10 to 1000000")
        if not (needed := largest.bit_length()) <= guesses < largest // 2:
            raise ValueError(f"guesses ({guesses}) must be from {needed}, what it takes, to {largest // 2 - 1}")
        super().__init__(guesses, {"min_number": 1, "max_number": largest})
        self._largest = largest

    def hidden(self) -> tuple[int, ...]:
        return (self._play.game_number,)

    def expert_action(self) -> str:
        (number,), guesses = self.hidden(), [guess for (guess,) in self._tried]
        low = max([1, *(guess + 1 for guess in guesses if guess < number)])
        high = min([self._largest, *(guess - 1 for guess in guesses if guess > number)])
        return _guess([(low + high) // 2])

    def random_action(self, rng: random.Random) -> str:
        return _guess([rng.randint(1, self._largest)])


def pegs(guess: tuple[int, ...], code: tuple[int, ...]) -> tuple[int, int]:
    """Black and white pegs: digits at their place, and digits at another."""
    black = sum(one == other for one, other in zip(guess, code, strict=True))
    return black, sum(min(guess.count(sign), code.count(sign)) for sign in {*guess}) - black


def _guess(numbers: tuple[int, ...] | list[int]) -> str:
    return f"[{' '.join(map(str, numbers))}]"


def _end(how: str, reward: float, error: str | None = None) -> Step:
    return Step(Message("user", how), reward, terminated=True, info={"end": how}, error=error)
