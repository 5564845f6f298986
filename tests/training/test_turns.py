"""The update queue: one after another on one thread, an answer for everybody, blame for who kills."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from infra.training.blame import Blame
from infra.training.turns import LetGo, Turns
from rl.fairness import TenantShare


@pytest.fixture
def turns(tmp_path: Path) -> Callable[..., Turns]:
    def make(**shares: TenantShare) -> Turns:
        made = Turns(0.0, 64, Blame(tmp_path / "trainer-0.turn"), clock=iter(range(10_000)).__next__)
        made.entitle({tenant: TenantShare() for tenant in "abc"} | shares)
        return made

    return make


def test_turns_are_taken_in_the_order_of_asking_and_on_one_thread(turns: Callable[..., Turns]) -> None:
    at, seen = turns(), list[tuple[str, int]]()

    def twice(tenant: str) -> str:
        seen.append((tenant, threading.get_ident()))
        return tenant * 2

    answers = {t: at.ask(t, partial(twice, t)) for t in "cab"}
    assert at.waiting == set("abc")
    assert [at.serve(0) for _ in range(4)] == ["c", "a", "b", None]
    assert seen == [(t, threading.get_ident()) for t in "cab"]
    assert {t: answer.result(0) for t, answer in answers.items()} == {"a": "aa", "b": "bb", "c": "cc"}
    assert at.busy_s == 3 and not at.waiting


def test_who_had_less_for_its_weight_and_who_is_preferred_go_first(turns: Callable[..., Turns]) -> None:
    at = turns(b=TenantShare(weight=10.0), c=TenantShare(priority=1))
    for tenant in "ab":
        at.ask(tenant, int)
        at.serve(0)
    for tenant in "abc":
        at.ask(tenant, int)
    assert [at.serve(0) for _ in range(3)] == ["c", "b", "a"]


def test_what_a_turn_raises_is_its_tenants_alone(turns: Callable[..., Turns]) -> None:
    at = turns()
    bad, good = at.ask("a", lambda: 1 // 0), at.ask("b", lambda: 7)
    assert [at.serve(0), at.serve(0)] == ["a", "b"]
    with pytest.raises(ZeroDivisionError):
        bad.result(0)
    assert good.result(0) == 7


@pytest.mark.parametrize("how", ["withdraw", "leave", "close"])
def test_who_does_not_wait_any_more_is_let_go(turns: Callable[..., Turns], how: str) -> None:
    at = turns()
    answer, other = at.ask("a", lambda: pytest.fail("not begun")), at.ask("b", lambda: 1)
    {
        "withdraw": lambda: at.withdraw("a"),
        "leave": lambda: at.entitle({"b": TenantShare()}),
        "close": at.close,
    }[how]()
    with pytest.raises(LetGo):
        answer.result(0)
    if how == "close":
        with pytest.raises(LetGo):
            at.ask("c", int).result(0)
        assert at.serve(0) is None
    else:
        assert at.serve(0) == "b" and other.result(0) == 1


def test_errands_are_done_before_the_next_turn(turns: Callable[..., Turns]) -> None:
    at, order = turns(), list[str]()
    at.ask("a", lambda: order.append("turn"))
    at.errand(lambda: order.append("errand"))
    assert at.serve(0) == "a" and order == ["errand", "turn"]


def test_one_who_asks_wakes_the_optimizers_thread(turns: Callable[..., Turns]) -> None:
    at = turns()
    threading.Timer(0.05, at.ask, ("a", int)).start()
    assert at.serve(30) == "a"


def lost() -> None:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700)


def test_a_lost_device_ends_the_process_and_is_held_against_the_tenant(
    turns: Callable[..., Turns], tmp_path: Path
) -> None:
    at = turns()
    answer = at.ask("a", lost)
    with pytest.raises(torch.AcceleratorError):
        at.serve(0)
    assert isinstance(answer.exception(0), torch.AcceleratorError)
    assert Blame(tmp_path / "trainer-0.turn").strikes == {"a": 1}


def test_an_orderly_end_in_a_turn_is_nobodys_fault(turns: Callable[..., Turns], tmp_path: Path) -> None:
    at = turns()

    def end() -> None:
        raise SystemExit(143)

    answer = at.ask("a", end)
    with pytest.raises(SystemExit):
        at.serve(0)
    assert isinstance(answer.exception(0), LetGo)
    assert Blame(tmp_path / "trainer-0.turn").strikes == {}


def test_deaths_in_a_row_are_counted_and_a_turn_that_ends_forgives_them(tmp_path: Path) -> None:
    file = tmp_path / "trainer-3.turn"
    assert Blame(file).strikes == {}
    for deaths in (1, 2):
        Blame(file).begin("a")  # and dies
        assert Blame(file).strikes == {"a": deaths}
        assert Blame(file).strikes == {"a": deaths}  # dead between turns: nobody's
    blame = Blame(file)
    blame.begin("b")
    assert Blame(file).strikes == {"a": 2, "b": 1}
    blame.end("b")
    blame.begin("a")
    blame.end("a")
    assert Blame(file).strikes == {}
    file.write_text("{")
    assert Blame(file).strikes == {}
