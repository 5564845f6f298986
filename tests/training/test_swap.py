"""Suspend, update, resume: order, pairing, retries, deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from infra.proxy.client import ControlRefused, ProxyUnavailable
from infra.training.swap import Engines, SwapTimeout
from rl.errors import Fenced
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


def engines(control: Control) -> Engines:
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    return Engines(control, deadline_s=10, clock=lambda: now[0], pause=pause)


def at_get_batch() -> StepProtocol:
    protocol = StepProtocol(1)
    protocol.enter(Phase.GET_BATCH)
    return protocol


@pytest.mark.parametrize("start", [at_get_batch, lambda: StepProtocol(0)])
def test_swap_goes_through_the_phases(start: Callable[[], StepProtocol]) -> None:
    protocol, control = start(), Control()
    engines(control).swap(protocol, 3, 2)
    assert control.calls == ["suspend", "update", "resume"]
    assert protocol.phase is Phase.RECOMPUTE


@pytest.mark.parametrize("call", ["suspend", "update", "resume"])
@pytest.mark.parametrize("start", [at_get_batch, lambda: StepProtocol(0)])
def test_an_absent_proxy_is_tried_again_from_suspend_on(call: str, start: Callable[[], StepProtocol]) -> None:
    protocol, control = start(), Control(**{call: [ProxyUnavailable("gone"), ProxyUnavailable("gone")]})
    engines(control).swap(protocol, 3, 2)
    assert control.calls[-3:] == ["suspend", "update", "resume"]
    assert protocol.phase is Phase.RECOMPUTE and not control.suspended


def test_past_the_deadline_there_is_a_named_error() -> None:
    control = Control(suspend=[ProxyUnavailable("gone")] * 1000)
    with pytest.raises(SwapTimeout, match=r"did not take version 3 within 10 s \(deadlines.control\): gone"):
        engines(control).swap(at_get_batch(), 3, 2)


@pytest.mark.parametrize(
    "error", [Fenced("other"), ControlRefused("weights do not fit"), KeyboardInterrupt()]
)
def test_a_failed_update_still_resumes(error: BaseException) -> None:
    control = Control(update=[error])
    with pytest.raises(type(error)):
        engines(control).swap(at_get_batch(), 3, 2)
    assert control.calls == ["suspend", "update", "resume"] and not control.suspended


def test_prefetch_is_a_hint_but_a_fence_is_not() -> None:
    engines(Control(prefetch=[ProxyUnavailable("gone")])).prefetch(3)
    engines(Control(prefetch=[ControlRefused("no such version")])).prefetch(3)
    with pytest.raises(Fenced):
        engines(Control(prefetch=[Fenced("other")])).prefetch(3)
