"""Sokoban as text: push every box onto a goal. One turn makes one or more moves, and shows the board again.

    user       ######
               #  # #
               #@ # #
               # $  #
               #.  ##
               ######
    assistant  [right] [down]
    user       ######
               #  # #
               #  # #
               # @  #
               #.$ ##
               ######
    assistant  [right] [down] [left]
    user       solved

`#` wall, `@` player, `$` box, `.` goal, `*` box on a goal, `+` player on a goal. A move into a wall, or of a box that
can not move, is no mistake and does nothing. Solving gives 1. A turn that is no list of moves ends the episode with
0, as do `max_moves` moves.

Invariants
- Every level can be solved within `max_moves`: it was made by pulling boxes away from the goals, and solved again.
- A problem is its board, and the split is decided by it.
"""

from __future__ import annotations

import random
import re
from typing import ClassVar

from envs.protocol import Environment, Hints, Mistake, Step, in_split
from envs.sokoban_levels import MOVES, Board, add, draw, solve
from envs.tools import spoken
from rl.trajectory import Message, Problem

INSTRUCTIONS = (
    "You play Sokoban. # is a wall, @ you, $ a box, . a goal, * a box on a goal, + you on a goal. Push every box onto "
    "a goal; you can push one box at a time and can not pull. Answer with moves and nothing else, such as "
    "[left] [up] [up]. The moves are [up], [down], [left] and [right]."
)
DRAWS = 2000
_MOVE = re.compile(r"\[(up|down|left|right)\]")
_TURN = re.compile(r"(?:\[(?:up|down|left|right)\]\s*)+")


class LevelsTooRare(Exception):
    """The options allow too few levels."""


class Sokoban(Environment):
    """A room of `size` x `size` cells inside its walls, `wall_share` of them walls too, with `boxes` boxes that were
    pulled up to `pulls` times. More of any is harder; `max_moves` moves may be made.

    `instructions` opens with a system message that explains the task, for models that were not warm-started on it.
    The expert makes one push a turn, and is not optimal.
    """

    hints: ClassVar[Hints] = Hints(expected_turns=8, prompt_tokens=60, response_tokens=12)

    def __init__(
        self,
        size: int = 5,
        boxes: int = 1,
        pulls: int = 6,
        wall_share: float = 0.15,
        max_moves: int = 40,
        instructions: bool = False,
    ):
        if not 3 <= size <= 10:
            raise ValueError(f"size ({size}) must be from 3 to 10")
        if not 1 <= boxes <= min(3, size - 2):
            raise ValueError(f"boxes ({boxes}) must be from 1 to {min(3, size - 2)} at size {size}")
        if not boxes <= pulls <= 50:
            raise ValueError(f"pulls ({pulls}) must be from boxes ({boxes}) to 50")
        if not 0 <= wall_share <= 0.3:
            raise ValueError(f"wall_share ({wall_share}) must be from 0 to 0.3: beyond, boxes can hardly be moved")
        if max_moves < 10 * boxes:
            raise ValueError(f"max_moves ({max_moves}) must be at least 10 per box ({10 * boxes})")
        self._size, self._boxes, self._pulls, self._wall_share = size, boxes, pulls, wall_share
        self._max_moves, self._instructions = max_moves, instructions
        self._moves = 0
        self._plan: list[str] | None = None

    async def reset(self, problem: Problem) -> list[Message]:
        rng = random.Random(problem.seed)
        self._moves = 0
        self._board = await self.in_thread(lambda: self._draw(rng, problem.split))
        self._fingerprint = self._board.text()
        opening = [Message("user", self._fingerprint)]
        return [Message("system", INSTRUCTIONS), *opening] if self._instructions else opening

    def _draw(self, rng: random.Random, split: str) -> Board:
        for _ in range(DRAWS):
            board = draw(rng, self._size, self._boxes, self._pulls, self._wall_share)
            if board is None or not in_split(board.text(), split):
                continue
            self._plan = solve(board)
            if self._plan is not None and len(self._plan) <= self._max_moves:
                return board
        raise LevelsTooRare(f"sokoban: none of {DRAWS} drawn levels fits the options; raise max_moves or lower pulls")

    def fingerprint(self) -> object:
        return self._fingerprint

    async def step(self, action: str) -> Step:
        if _TURN.fullmatch(text := spoken(action)) is None:
            return _end("invalid", 0.0, Mistake.INVALID)
        for name in _MOVE.findall(text):
            self._moves += 1
            self._plan = self._plan[1:] if self._plan and self._plan[0] == name else None
            self._board = self._board.after(name)
            if self._board.solved:
                return _end("solved", 1.0)
            if self._moves >= self._max_moves:
                return _end("time", 0.0)
        return Step(Message("user", self._board.text()))

    def expert_action(self) -> str:
        """The moves up to the next push; any move where the level can no longer be solved."""
        if self._plan is None:
            self._plan = solve(self._board) or []
        turn, player = [], self._board.player
        for name in self._plan:
            turn.append(f"[{name}]")
            player = add(player, MOVES[name])
            if player in self._board.boxes:
                return " ".join(turn)
        return "[up]"

    def random_action(self, rng: random.Random) -> str:
        return f"[{rng.choice(list(MOVES))}]"


def _end(how: str, reward: float, error: str | None = None) -> Step:
    return Step(Message("user", how), reward, terminated=True, info={"end": how}, error=error)
