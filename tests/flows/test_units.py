"""Every group's outcome leaves its unit exactly once, whatever happens in it."""

from queue import Queue
from types import SimpleNamespace

import pytest

from flows.units import Unit
from rl.errors import EnvironmentFailure
from rl.trajectory import Uid


@pytest.mark.parametrize(
    "error, reason",
    [
        (EnvironmentFailure("x"), "environment_error"),
        (OSError("no"), "stage_failure"),
        (KeyError("k"), "stage_failure"),
    ],
)
def test_any_failure_reaches_the_outbox_by_name(error, reason):
    outbox: Queue = Queue()
    unit = Unit(SimpleNamespace(uid=Uid(1, 0), results={}), outbox)

    def fail():
        raise error

    assert unit.run(fail).is_failed()
    assert unit.run(fail).is_failed()  # a second member of the same group
    assert outbox.get_nowait().failure.reason == reason
    assert outbox.empty()


def test_only_the_member_that_closes_the_group_reports_it():
    outbox: Queue = Queue()
    unit = Unit(SimpleNamespace(uid=Uid(1, 0), results={}), outbox)
    assert unit.run(lambda: None).is_completed()
    assert outbox.empty()
    assert unit.run(lambda: "sealed").is_completed()
    assert outbox.get_nowait().sealed == "sealed"
