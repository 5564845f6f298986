"""Suspend, update, resume: order, pairing, retries, deadline."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from infra.proxy.client import ControlRefused, NotServed, ProxyUnavailable
from infra.training.swap import PAUSE_S, Engines, SwapTimeout
from rl.errors import DeadlineExceeded, Fenced, ProtocolViolation
from rl.protocol import Phase, StepProtocol


class Control:
    """Notes calls; raises what `failures` holds for a call, once each."""

    def __init__(self, **failures: Any) -> None:
        self.calls: list[str] = []
        self.failures = failures
        self.suspended = False

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.failures.get(name):
            raise self.failures[name].pop(0)

    def suspend(self) -> None:
        self._call("suspend")
        self.suspended = True

    def prefetch(self, version: int) -> None:
        self._call("prefetch")

    def update(self, version: int, oldest_viable: int) -> None:
        self._call("update")

    def resume(self) -> None:
        self._call("resume")
        self.suspended = False


def engines(control: Control, start_s: float = 0.0) -> Engines:
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    return Engines(control, deadline_s=10, start_s=start_s, clock=lambda: now[0], pause=pause)


def at_get_batch() -> StepProtocol:
    protocol = StepProtocol(1)
    protocol.enter(Phase.GET_BATCH)
    return protocol


def updated(protocol: StepProtocol) -> bool:
    """Whether the swap went through all its phases: only then another one is out of turn everywhere."""
    trial = copy.deepcopy(protocol)
    with pytest.raises(ProtocolViolation):
        trial.enter(Phase.SUSPEND)
    return not protocol.suspended


@pytest.mark.parametrize("start", [at_get_batch, lambda: StepProtocol(0)])
def test_swap_goes_through_the_phases(start: Callable[[], StepProtocol]) -> None:
    protocol, control = start(), Control()
    engines(control).swap(protocol, 3, 2)
    assert control.calls == ["suspend", "update", "resume"]
    assert updated(protocol)


@pytest.mark.parametrize("call", ["suspend", "update", "resume"])
@pytest.mark.parametrize("error", [ProxyUnavailable("gone"), NotServed("the job runs, but it is not known yet")])
@pytest.mark.parametrize("start", [at_get_batch, lambda: StepProtocol(0)])
def test_an_absent_proxy_is_tried_again_from_suspend_on(
    call: str, start: Callable[[], StepProtocol], error: Exception
) -> None:
    protocol, control = start(), Control(**{call: [error, error]})
    engines(control).swap(protocol, 3, 2)
    assert control.calls[-3:] == ["suspend", "update", "resume"]
    assert updated(protocol) and not control.suspended


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (DeadlineExceeded("slow"), r"within 10 s \(deadlines.control\): slow"),
        (ProxyUnavailable("gone"), r"within 40 s \(deadlines.control \+ deadlines.start\): gone"),
    ],
)
def test_past_the_deadline_there_is_a_named_error(error: Exception, told: str) -> None:
    control = Control(suspend=[error] * 1000)
    with pytest.raises(SwapTimeout, match=f"did not take version 3 {told}"):
        engines(control, start_s=30).swap(at_get_batch(), 3, 2)


def test_engines_may_start_anew_at_every_swap() -> None:
    """Of 10 s of patience and 30 s to start, 35 s pass away, then one call is slow."""
    control = Control()
    ours = engines(control, start_s=30)
    for version in (3, 4):
        away: list[Exception] = [ProxyUnavailable("gone")] * int(35 / PAUSE_S)
        control.failures = {"suspend": [*away, DeadlineExceeded("slow")]}
        ours.swap(at_get_batch(), version, 2)
        assert control.calls[-3:] == ["suspend", "update", "resume"] and not control.failures["suspend"]


@pytest.mark.parametrize(
    "error", [Fenced("other"), ControlRefused("weights do not fit"), KeyboardInterrupt()]
)
def test_a_failed_update_still_resumes(error: BaseException) -> None:
    control = Control(update=[error])
    with pytest.raises(type(error)):
        engines(control).swap(at_get_batch(), 3, 2)
    assert control.calls == ["suspend", "update", "resume"] and not control.suspended


def test_an_ending_trainer_tries_nothing_again() -> None:
    control = Control(suspend=[ProxyUnavailable("gone")] * 2)
    ours = engines(control)
    ours.stop()
    with pytest.raises(ProxyUnavailable):
        ours.swap(at_get_batch(), 3, 2)
    assert control.calls == ["suspend", "resume"]


def test_prefetch_is_a_hint_but_a_fence_is_not() -> None:
    engines(Control(prefetch=[ProxyUnavailable("gone")])).prefetch(3)
    engines(Control(prefetch=[ControlRefused("no such version")])).prefetch(3)
    with pytest.raises(Fenced):
        engines(Control(prefetch=[Fenced("other")])).prefetch(3)
