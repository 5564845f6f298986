"""Math equivalence: what is equal, what is not even tried, and limits that hold in any thread."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards import mathematics, verifier
from rewards.mathematics import equivalent
from rewards.verifier import Verdict, Verifier, VerifierCrash, VerifierTimeout, shared
from tests.rewards.test_answers import view

LONG = 120.0
"""Seconds; a comparison takes milliseconds, the first one starts a process."""


@pytest.mark.parametrize(
    ("right", "given_", "expected"),
    [
        ("1/2", "0.5", True),
        (r"\frac{1}{2}", r"\frac{2}{4}", True),
        ("1000", "1,000", True),
        ("$12$", "12.", True),
        (r"2\sqrt{2}", r"\sqrt{8}", True),
        ("(x+1)^2", "x^2+2x+1", True),
        ("5", "x=5", True),
        (r"\sin x", r"\cos x", False),
        ("12", "13", False),
        ("1/2", "0.49", False),
        ("3", "no idea", False),
    ],
)
def test_equivalence(right: str, given_: str, expected: bool) -> None:
    assert equivalent(right, given_, LONG) is expected


@pytest.fixture
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison by a worker would fail."""
    monkeypatch.setattr(mathematics, "shared", None)


@pytest.mark.parametrize(
    "given_", ["9^{9^{9^{9}}}", "9**9**9", "2^{100000}", "10^12345", "99999!", "(9!)!", "1" * 501, ""]
)
def test_an_answer_larger_than_any_sensible_one_is_wrong_without_being_computed(given_: str, no_worker: None) -> None:
    assert not mathematics.math(view(rf"\boxed{{{given_}}}", answer="3"))["math"]


@given(st.fractions(max_denominator=1000))
def test_equal_numbers_need_no_worker(number: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mathematics, "shared", None)
        assert equivalent(str(number), f" {number} ", LONG)


def test_the_answer_is_what_is_boxed_else_tagged_else_the_last_line() -> None:
    assert mathematics.math(view(r"so \boxed{4}, not 5", answer="4")) == {"math": 1.0}
    assert mathematics.math(view("it is 5\n4\n\n", answer="4")) == {"math": 1.0}
    assert mathematics.math(view("<a>4</a> or 5", answer="4"), tag="a") == {"math": 1.0}
    assert mathematics.math(view("4", answer="4"), tag="a") == {"math": 0.0}
    assert mathematics.math(view(answer="4")) == {"math": 0.0}


def test_many_threads_share_the_workers() -> None:
    with ThreadPoolExecutor(8) as pool:
        pairs = [(rf"\frac{{{i}}}{{7}}", rf"\frac{{{2 * i}}}{{14}}") for i in range(1, 40)]
        verdicts = list(pool.map(lambda pair: shared().compare(*pair, LONG), pairs))
    assert set(verdicts) == {Verdict.EQUAL}


@pytest.fixture
def one() -> Iterator[Verifier]:
    made = Verifier(workers=1)
    yield made
    made.close()


def pid(one: Verifier) -> int:
    (worker,) = one._idle
    return worker._process.pid


@pytest.mark.slow
def test_an_answer_too_costly_to_compare_is_told_apart_and_its_worker_replaced(
    one: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier, "CPU_S", 1)
    with ThreadPoolExecutor(1) as pool:  # not the main thread, where an alarm might do
        assert pool.submit(one.compare, "3", "9^{9^{9^{9}}}", LONG).result() is Verdict.TOO_COSTLY
    assert one._idle == [] and one.compare("1/2", "0.5", LONG) is Verdict.EQUAL


@pytest.mark.slow
def test_a_machine_too_busy_is_a_failure_and_the_worker_is_gone(one: Verifier) -> None:
    assert one.compare("1/2", "0.5", LONG) is Verdict.EQUAL
    worker = pid(one)
    os.kill(worker, signal.SIGSTOP)  # as if it got no processor
    with pytest.raises(VerifierTimeout, match=r"within 0\.\d s"):
        one.compare("1/2", "0.5", 0.3)
    assert not psutil.pid_exists(worker)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_a_failure_and_replaced(one: Verifier) -> None:
    assert one.compare("1/2", "0.5", LONG) is Verdict.EQUAL
    os.kill(pid(one), signal.SIGKILL)
    with pytest.raises(VerifierCrash, match="ended with -9"):
        one.compare("1/2", "0.5", LONG)
    assert one.compare("1/2", "0.5", LONG) is Verdict.EQUAL


def test_no_free_worker_within_the_deadline_is_a_failure(one: Verifier) -> None:
    assert one._slots.acquire(timeout=1)
    with pytest.raises(VerifierTimeout, match="no free worker"):
        one.compare("1/2", "0.5", 0.05)
    one._slots.release()
