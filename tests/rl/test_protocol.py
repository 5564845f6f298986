"""The order of a step."""

from __future__ import annotations

import pytest

from rl.errors import ProtocolViolation
from rl.protocol import Phase, StepProtocol, phases


def test_the_six_steps_and_the_order_on_policy() -> None:
    swap = [Phase.SUSPEND, Phase.UPDATE, Phase.RESUME, Phase.RECOMPUTE]
    assert list(phases(1)) == list(phases(16)) == [Phase.GET_BATCH, *swap, Phase.TRAIN, Phase.COMMIT]
    assert list(phases(0)) == [*swap, Phase.GET_BATCH, Phase.TRAIN, Phase.COMMIT]


@pytest.mark.parametrize("alpha", [0, 1])
def test_every_illegal_order_raises_and_changes_nothing(alpha: int) -> None:
    order = phases(alpha)
    for at in range(2 * len(order)):
        for phase in Phase:
            protocol = StepProtocol(alpha)
            for done in (order * 3)[:at]:
                protocol.enter(done)
            before = protocol.phase
            if phase in (before, (order * 3)[at]):
                protocol.enter(phase)
                assert protocol.phase is phase
            else:
                with pytest.raises(ProtocolViolation):
                    protocol.enter(phase)
                assert protocol.phase is before
            assert protocol.suspended == (protocol.phase in (Phase.SUSPEND, Phase.UPDATE))


@pytest.mark.parametrize("alpha", [0, 1])
def test_a_failed_update_starts_the_step_over_and_only_that(alpha: int) -> None:
    for at, phase in enumerate(phases(alpha)):
        protocol = StepProtocol(alpha)
        for done in phases(alpha)[: at + 1]:
            protocol.enter(done)
        if phase in (Phase.SUSPEND, Phase.UPDATE):
            protocol.abandon_update()
            assert not protocol.suspended
            protocol.enter(phases(alpha)[0])
        else:
            with pytest.raises(ProtocolViolation):
                protocol.abandon_update()
