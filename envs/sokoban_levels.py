"""Boards of Sokoban: moves, levels drawn by playing backwards, and a solver.

Invariants
- A board is a value; equal boards have equal texts.
- A drawn level can be solved: every pull of its making, undone, is a push.
- The solver gives moves that solve, or None; it is bounded by `SEARCHED` states.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

Cell = tuple[int, int]
MOVES: dict[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
SEARCHED = 5_000


def add(cell: Cell, move: Cell) -> Cell:
    """The neighbour in that direction."""
    return cell[0] + move[0], cell[1] + move[1]


def _back(cell: Cell, move: Cell) -> Cell:
    return cell[0] - move[0], cell[1] - move[1]


@dataclass(frozen=True)
class Board:
    """A square room; `floor` are its cells without walls, (row, column) from 1 to `size`."""

    size: int
    floor: frozenset[Cell]
    goals: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    @property
    def solved(self) -> bool:
        return self.boxes == self.goals

    def after(self, name: str) -> Board:
        """The board after a move; the same if it can not be made."""
        target = add(self.player, MOVES[name])
        beyond = add(target, MOVES[name])
        if target not in self.floor:
            return self
        if target not in self.boxes:
            return replace(self, player=target)
        if beyond not in self.floor or beyond in self.boxes:
            return self
        return replace(self, player=target, boxes=self.boxes - {target} | {beyond})

    def text(self) -> str:
        side = range(self.size + 2)
        return "\n".join("".join(self._sign((row, column)) for column in side) for row in side)

    def _sign(self, cell: Cell) -> str:
        if cell not in self.floor:
            return "#"
        free, on_goal = ("@", "+") if cell == self.player else ("$", "*") if cell in self.boxes else (" ", ".")
        return on_goal if cell in self.goals else free

    def walks(self) -> dict[Cell, list[str]]:
        """Shortest walks of the player to every cell that it reaches without a push."""
        ways: dict[Cell, list[str]] = {self.player: []}
        queue = deque(ways)
        while queue:
            cell = queue.popleft()
            for name, move in MOVES.items():
                following = add(cell, move)
                if following in self.floor and following not in self.boxes and following not in ways:
                    ways[following] = [*ways[cell], name]
                    queue.append(following)
        return ways


def draw(rng: random.Random, size: int, boxes: int, pulls: int, wall_share: float) -> Board | None:
    """A level with every box away from the goals, by at most `pulls` pulls; None if this attempt gave no such."""
    cells = [(row, column) for row in range(1, size + 1) for column in range(1, size + 1)]
    floor = [cell for cell in cells if rng.random() >= wall_share]
    if len(floor) <= boxes:
        return None
    *goals, player = rng.sample(floor, boxes + 1)
    board = Board(size, frozenset(floor), frozenset(goals), frozenset(goals), player)
    for _ in range(pulls):
        reached = board.walks()
        choices = [
            (box, move)
            for box in sorted(board.boxes)
            for move in MOVES.values()
            if add(box, move) in reached and add(add(box, move), move) in board.floor - board.boxes
        ]
        if not choices:
            break
        box, move = rng.choice(choices)
        to = add(box, move)
        board = replace(board, boxes=board.boxes - {box} | {to}, player=add(to, move))
    if board.boxes & board.goals:
        return None
    return replace(board, player=rng.choice(sorted(board.walks())))


def solve(board: Board) -> list[str] | None:
    """Moves that solve the board, found best first by how far boxes are from goals; None if there are none, or none
    were found in `SEARCHED` states."""
    far = _distances(board)
    if any(box not in far for box in board.boxes):
        return None
    seen: set[tuple[frozenset[Cell], Cell]] = set()
    queue: list[tuple[int, int, Board, list[str]]] = [(0, 0, board, [])]
    count = 0  # breaks ties, for boards have no order
    while queue and len(seen) < SEARCHED:
        _, _, now, moves = heapq.heappop(queue)
        if now.solved:
            return moves
        walks = now.walks()
        state = (now.boxes, min(walks))
        if state in seen:
            continue
        seen.add(state)
        for box in sorted(now.boxes):
            for name, move in MOVES.items():
                start, to = _back(box, move), add(box, move)
                if start in walks and to in far and to not in now.boxes:
                    pushed = replace(now, player=box, boxes=now.boxes - {box} | {to})
                    way = [*moves, *walks[start], name]
                    count += 1
                    heapq.heappush(queue, (len(way) + 3 * sum(far[b] for b in pushed.boxes), count, pushed, way))
    return None


def _distances(board: Board) -> Mapping[Cell, int]:
    """Pushes that a box alone needs from each cell to its nearest goal; a cell without any is dead."""
    far = dict.fromkeys(sorted(board.goals), 0)
    queue = deque(far)
    while queue:
        cell = queue.popleft()
        for move in MOVES.values():
            before = _back(cell, move)
            if before in board.floor and _back(before, move) in board.floor and before not in far:
                far[before] = far[cell] + 1
                queue.append(before)
    return far
