"""Bells: who is woken, when, and that nobody asks for nothing."""

from __future__ import annotations

from collections.abc import Hashable

from infra.store.arrivals import Arrivals
from infra.store.objects import ObjectStore
from infra.training.bells import Bells
from tests.store.memory_s3 import MemoryS3


class Board:
    """What is told to have arrived."""

    def __init__(self) -> None:
        self.told: dict[str, Hashable] = {}
        self.looks = 0

    def look(self) -> dict[str, Hashable]:
        self.looks += 1
        return dict(self.told)


def test_the_bell_of_whose_batch_arrived_rings_and_no_other() -> None:
    board = Board()
    bells = Bells(board.look)
    ann, bob = bells.hang("ann/walk"), bells.hang("bob/walk")
    board.told = {"ann/walk": 1, "gone/walk": 7}
    bells.listen()
    assert ann.is_set() and not bob.is_set()
    ann.clear()
    bells.listen()
    assert not ann.is_set(), "nothing new"
    board.told = {"ann/walk": 1, "bob/walk": 1}
    bells.listen()
    assert bob.is_set() and not ann.is_set()


def test_a_job_that_began_anew_keeps_its_new_bell() -> None:
    board = Board()
    bells = Bells(board.look)
    old = bells.hang("ann/walk")
    new = bells.hang("ann/walk")
    bells.take_down("ann/walk", old)
    board.told = {"ann/walk": 1}
    bells.listen()
    assert new.is_set() and not old.is_set()
    bells.take_down("ann/walk", new)
    looks = board.looks
    bells.listen()
    assert board.looks == looks, "with nobody to wake the store is not asked"


def test_another_rollout_rings_again_and_what_is_unreadable_tells_nothing() -> None:
    store = ObjectStore(MemoryS3(), "bucket")
    first = Arrivals(store, "shop")
    assert first.look() == {}
    first.tell({"ann/walk": 2})
    before = first.look()
    Arrivals(store, "shop").tell({"ann/walk": 2})
    assert first.look().keys() == before.keys() and first.look() != before, "its counts begin anew"
    store.put("services/shop/arrivals.json", b'{"jobs": [1]}')
    assert first.look() == {}
