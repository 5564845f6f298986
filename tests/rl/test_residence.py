"""Who leaves memory: never who waits, and better than who was away the longest."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.residence import Residence


def misses(order: list[tuple[float, str]], room: int, choose: Callable[[Residence, list[str], float], str]) -> int:
    """How often one who comes is not there, when `choose` says who leaves."""
    residence, held, missed = Residence(), list[str](), 0
    for now, tenant in order:
        if tenant not in held:
            missed += 1
            if len(held) == room:
                held.remove(choose(residence, held, now))
            held.append(tenant)
        residence.used(tenant, now)
    return missed


def ours(residence: Residence, held: list[str], now: float) -> str:
    return residence.victim(held, (), now)


def longest_away(residence: Residence, held: list[str], now: float) -> str:
    return min(held, key=lambda tenant: residence._rhythms[tenant].last)


@pytest.mark.parametrize(("tenants", "room"), [(4, 3), (8, 6), (32, 8)])
def test_of_those_who_come_in_turn_most_that_have_room_stay(tenants: int, room: int) -> None:
    order = [(float(at), f"t{at % tenants}") for at in range(tenants * 20)]
    assert misses(order, room, longest_away) == len(order)  # the usual choice is the worst here
    kept = (room - 1) / (tenants - 1)
    assert misses(order, room, ours) <= len(order) * (1 - kept) + tenants


def test_who_comes_seldom_leaves_first() -> None:
    """Two come every second, two every ten: the two stay."""
    order = sorted(
        [(at + offset, name) for name, offset in (("a", 0.0), ("b", 0.3)) for at in range(60)]
        + [(10.0 * at + offset, name) for name, offset in (("y", 0.5), ("z", 0.7)) for at in range(6)]
    )
    assert misses(order, 3, ours) <= 20


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), room=st.integers(1, 5))
def test_who_waits_stays_unless_all_wait(seed: int, room: int) -> None:
    dice, residence = random.Random(seed), Residence()
    names = [f"t{n}" for n in range(8)]
    for now in range(40):
        residence.used(dice.choice(names), float(now))
        held = dice.sample(names, room)
        waiting = set(dice.sample(names, dice.randrange(8)))
        victim = residence.victim(held, waiting, float(now))
        assert victim in held
        assert victim not in waiting or waiting >= set(held)
