"""Frozen lake told in words: random maps, and after every move one word for each neighbouring cell.

    user       up:wall down:hole left:near right:far
    assistant  [left]
    user       up:near down:far left:wall right:hole
    ...

`wall` is the edge (a move into it stays in place), `hole` ends the episode with reward 0, `near` is closer to
the goal and `far` is not (Manhattan distance). Reaching the goal gives 1. An unreadable move ends the episode
with 0, as do `max_steps` moves. The map is never shown, so each answer of the environment is needed for the
next move. The ice may be slippery: with probability `slip` a move goes to one of the two sides instead.

Invariants: every map has a path from start to goal of at least two moves; a problem is its map with start and
goal, and the split is decided by those; where the n-th move slips is drawn from the problem's seed.
"""

from __future__ import annotations

import random
import re
from collections import deque
from typing import ClassVar

from envs.protocol import Environment, Hints, Mistake, Step, in_split
from rl.stream import derive_seed
from rl.trajectory import Message, Problem

Cell = tuple[int, int]
MOVES: dict[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
RANDOM_SHARE = 0.5
INSTRUCTIONS = (
    "You walk on a frozen lake towards a goal. Each message tells what lies in every direction: wall (you "
    "would stay in place), hole (you would fall in and fail), near (closer to the goal) or far (not closer). "
    "Answer with one move and nothing else: [up], [down], [left] or [right]."
)
SLIPPERY = " The ice is slippery: a move may go to one of the two sides instead."
_MOVE = re.compile(r"\[(up|down|left|right)\]")


class FrozenLake(Environment):
    """A `size` x `size` map where each cell is a hole with probability `hole_share`; `max_steps` moves at
    most, each of which slips to a side with probability `slip`.

    `instructions` opens with a system message that explains the task, for models that were not warm-started
    on it. The demonstrator of `expert_action` moves at random half of the time, which leaves room to learn
    from reward.
    """

    hints: ClassVar[Hints] = Hints(expected_turns=4, prompt_tokens=12, response_tokens=2)

    def __init__(
        self,
        size: int = 4,
        hole_share: float = 0.28,
        max_steps: int = 8,
        instructions: bool = False,
        slip: float = 0.0,
    ):
        if not 2 <= size <= 64:
            raise ValueError(f"size ({size}) must be from 2 to 64")
        if not 0 <= hole_share <= 0.5:
            raise ValueError(f"hole_share ({hole_share}) must be from 0 to 0.5: beyond, few maps have a path")
        if max_steps < 2:
            raise ValueError(f"max_steps ({max_steps}) must be at least 2, the shortest path of any map")
        if not 0 <= slip <= 0.9:
            raise ValueError(f"slip ({slip}) must be from 0 to 0.9: beyond, moves hardly ever go where they should")
        self._size, self._hole_share, self._max_steps, self._slip = size, hole_share, max_steps, slip
        self._instructions = instructions
        self._holes: frozenset[Cell] = frozenset()
        self._position: Cell = (0, 0)
        self._goal: Cell = (0, 0)
        self._steps = 0
        self._demonstrator = random.Random()
        self._ice = random.Random()

    async def reset(self, problem: Problem) -> list[Message]:
        rng = random.Random(problem.seed)
        while not self._draw(rng, problem.split):
            pass
        self._steps = 0
        self._demonstrator = random.Random(derive_seed("demonstrator", problem.seed))
        self._ice = random.Random(derive_seed("ice", problem.seed))
        opening = [Message("user", self._observe())]
        instructions = INSTRUCTIONS + SLIPPERY * (self._slip > 0)
        return [Message("system", instructions), *opening] if self._instructions else opening

    def _draw(self, rng: random.Random, split: str) -> bool:
        """Draw a map; False if it can not be used."""
        cells = [(row, column) for row in range(self._size) for column in range(self._size)]
        frozen = {cell for cell in cells if rng.random() < self._hole_share}
        self._position, self._goal = rng.sample(cells, 2)
        self._holes = frozenset(frozen - {self._position, self._goal})
        self._fingerprint = (sorted(self._holes), self._position, self._goal)
        self.difficulty = len(self._path())
        return self.difficulty >= 2 and in_split(self._fingerprint, split)

    def fingerprint(self) -> object:
        return self._fingerprint

    async def step(self, action: str) -> Step:
        move = _MOVE.fullmatch(action)
        if move is None:
            return _end("invalid", 0.0, Mistake.INVALID)
        self._steps += 1
        target = _add(self._position, self._slipped(MOVES[move[1]]))
        if self._inside(target):
            self._position = target
        if self._position == self._goal:
            return _end("goal", 1.0)
        if self._position in self._holes:
            return _end("hole", 0.0)
        if self._steps >= self._max_steps:
            return _end("time", 0.0)
        return Step(Message("user", self._observe()))

    def _slipped(self, move: Cell) -> Cell:
        """Where a move goes: there, or with probability `slip` to one of its two sides."""
        slips, side = self._ice.random() < self._slip, self._ice.choice((1, -1))
        return (side * move[1], side * move[0]) if slips else move

    def expert_action(self) -> str:
        if self._demonstrator.random() < RANDOM_SHARE:
            return f"[{self._demonstrator.choice(list(MOVES))}]"
        return f"[{self._path()[0]}]"

    def random_action(self, rng: random.Random) -> str:
        return f"[{rng.choice(list(MOVES))}]"

    def _observe(self) -> str:
        return " ".join(f"{name}:{self._status(_add(self._position, move))}" for name, move in MOVES.items())

    def _status(self, cell: Cell) -> str:
        if not self._inside(cell):
            return "wall"
        if cell in self._holes:
            return "hole"
        return "near" if self._distance(cell) < self._distance(self._position) else "far"

    def _inside(self, cell: Cell) -> bool:
        return 0 <= cell[0] < self._size and 0 <= cell[1] < self._size

    def _distance(self, cell: Cell) -> int:
        return abs(cell[0] - self._goal[0]) + abs(cell[1] - self._goal[1])

    def _path(self) -> list[str]:
        """A shortest way to the goal; empty if there is none."""
        queue: deque[tuple[Cell, list[str]]] = deque([(self._position, [])])
        seen = {self._position}
        while queue:
            cell, path = queue.popleft()
            if cell == self._goal:
                return path
            for name, move in MOVES.items():
                following = _add(cell, move)
                if self._inside(following) and following not in seen and following not in self._holes:
                    seen.add(following)
                    queue.append((following, [*path, name]))
        return []


def _add(cell: Cell, move: Cell) -> Cell:
    return cell[0] + move[0], cell[1] + move[1]


def _end(how: str, reward: float, error: str | None = None) -> Step:
    return Step(Message("user", how), reward, terminated=True, info={"end": how}, error=error)
