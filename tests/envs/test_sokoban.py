"""Sokoban: rules, levels that can be solved, transcript, determinism, splits, and that it measures skill."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs import sokoban
from envs.check import Subject, examine
from envs.episodes import at_random, expert, play
from envs.protocol import Mistake
from envs.sokoban import LevelsTooRare, Sokoban
from envs.sokoban_levels import MOVES, Board, add, draw, solve
from rl.stream import derive_seed
from rl.trajectory import Message, Problem


def problem(seed: int, split: str = "train") -> Problem:
    return Problem(0, "sokoban", 0, derive_seed("test", seed), split)


def board(*rows: str) -> Board:
    """The board of a text, walls around it included."""
    signs = {(r, c): sign for r, row in enumerate(rows) for c, sign in enumerate(row)}

    def where(any_of: str) -> frozenset[tuple[int, int]]:
        return frozenset(cell for cell, sign in signs.items() if sign in any_of)

    (player,) = where("@+")
    return Board(len(rows) - 2, where(" @$.*+"), where(".*+"), where("$*"), player)


def rows(found: Board) -> list[str]:
    return found.text().splitlines()


@pytest.mark.parametrize(
    ("row", "right"),
    [
        ("#@   #", "# @  #"),
        ("#@$  #", "# @$ #"),
        ("#@$. #", "# @* #"),
        ("#@*  #", "# +$ #"),
        ("#@$$ #", "#@$$ #"),
        ("# @$##", "# @$##"),
        ("#@#  #", "#@#  #"),
        ("#@. .#", "# + .#"),
    ],
)
def test_a_move_walks_pushes_one_box_or_does_nothing(row: str, right: str) -> None:
    room = ["######", "######", "######", "######", "######"]
    assert rows(board(*room, row).after("right")) == [*room, right]


def test_a_solution_is_found_or_refused() -> None:
    easy = board("#####", "#. @#", "# $ #", "#   #", "#####")
    stuck = board("#####", "#$ @#", "# . #", "#   #", "#####")
    assert solve(easy) is not None and solve(stuck) is None


@given(st.integers(0, 10**9), st.integers(3, 6), st.integers(1, 2), st.integers(2, 10))
def test_every_level_can_be_solved_by_its_solution(seed: int, size: int, boxes: int, pulls: int) -> None:
    level = draw(random.Random(seed), size, min(boxes, size - 2), pulls, 0.15)
    if level is None:
        return
    moves = solve(level)
    assert moves and not level.boxes & level.goals
    for name in moves:
        level = level.after(name)
    assert level.solved


async def test_transcript() -> None:
    episode = await play(Sokoban(size=4, pulls=4), problem(9), expert, 20)
    assert [m.content.splitlines() for m in episode.messages] == [
        ["######", "#  # #", "#@ # #", "# $  #", "#.  ##", "######"],
        ["[right] [down]"],
        ["######", "#  # #", "#  # #", "# @  #", "#.$ ##", "######"],
        ["[right] [down] [left]"],
        ["solved"],
    ]
    assert episode.reward == 1.0 and episode.steps[-1].info == {"end": "solved"}


async def test_a_turn_may_hold_several_moves_and_an_unreadable_one_ends_with_nothing() -> None:
    environment = Sokoban()
    await environment.reset(problem(0))
    before = environment._board
    step = await environment.step("<think>[up] is wrong</think> [left] [right]\n[left]")
    assert step.observation == Message("user", before.after("left").after("right").after("left").text())
    assert not step.terminated and step.reward is None
    step = await environment.step("[left] and then [up]")
    assert (step.reward, step.terminated, step.error, step.info) == (0.0, True, Mistake.INVALID, {"end": "invalid"})


async def test_moves_are_bounded_also_within_a_turn() -> None:
    environment = Sokoban(max_moves=10)
    await environment.reset(problem(0))
    floor, player = environment._board.floor, environment._board.player
    wall = next(name for name, move in MOVES.items() if add(player, move) not in floor)
    step = await environment.step(f"[{wall}]" * 9)
    assert not step.terminated
    assert (await environment.step(f"[{wall}] [{wall}]")).info == {"end": "time"}


async def test_the_expert_goes_on_after_somebody_else_moved() -> None:
    solved = 0.0
    for seed in range(10):
        environment, rng = Sokoban(max_moves=80), random.Random(seed)
        await environment.reset(problem(seed))
        step = await environment.step(environment.random_action(rng))
        while not step.terminated:
            step = await environment.step(environment.expert_action())
        solved += step.reward or 0.0
    assert solved >= 8


@pytest.mark.parametrize("options", [{}, {"size": 6, "boxes": 2, "pulls": 12, "max_moves": 80}])
async def test_it_keeps_the_promises_of_an_environment(options: dict[str, Any]) -> None:
    findings = await examine(Subject(partial(Sokoban, **options), max_turns=40, problems=15))
    assert [f for f in findings if not f.ok] == []


async def test_more_pulls_are_harder() -> None:
    async def at_random_solved(pulls: int) -> float:
        played = [await play(Sokoban(pulls=pulls), problem(s), at_random(s), 40) for s in range(40)]
        return sum(episode.reward for episode in played)

    assert await at_random_solved(1) > 2 * await at_random_solved(12)


async def test_no_level_of_one_split_occurs_in_the_other() -> None:
    """On boards so small that levels repeat, so that a split by seed alone would be caught."""
    seen: dict[str, list[object]] = {"train": [], "heldout": []}
    for split, levels in seen.items():
        for seed in range(300):
            environment = Sokoban(size=3, pulls=1, wall_share=0.0)
            await environment.reset(problem(seed, split))
            levels.append(environment.fingerprint())
    assert len(set(seen["train"])) < 300 and not {*seen["train"]} & {*seen["heldout"]}


@pytest.mark.parametrize(
    "options",
    [
        {"size": 3, "pulls": 50, "wall_share": 0.3},
        {"size": 10, "boxes": 3, "pulls": 50, "max_moves": 30},
        {"size": 4, "boxes": 2, "pulls": 50, "wall_share": 0.3},
    ],
)
async def test_extreme_options_have_levels(options: dict[str, Any]) -> None:
    episode = await play(Sokoban(**options), problem(1, "heldout"), expert, 60)
    assert episode.reward == 1.0


async def test_options_that_allow_no_level_are_named_at_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sokoban, "solve", lambda _: None)
    with pytest.raises(LevelsTooRare, match="raise max_moves or lower pulls"):
        await Sokoban(size=3, pulls=1).reset(problem(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 2}, r"size \(2\) must be from 3 to 10"),
        ({"boxes": 4}, r"boxes \(4\) must be from 1 to 3 at size 5"),
        ({"pulls": 0}, r"pulls \(0\) must be from boxes \(1\)"),
        ({"wall_share": 0.5}, r"wall_share \(0.5\)"),
        ({"max_moves": 5}, r"max_moves \(5\)"),
    ],
)
def test_mistakes_in_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sokoban(**options)
