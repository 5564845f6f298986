"""`rollmill audit` on a run in a store."""

from __future__ import annotations

from tests.flows.conftest import Desk


def test_a_sound_run_is_told_so_and_a_spoilt_object_is_named(desk: Desk) -> None:
    desk.run.steps(4)
    said = desk.good("audit", "frozen_lake")
    assert "lost 0, doubled 0, staleness violations 0, unreadable 0, broken rules 0" in said and "4 states read" in said

    key = next(name for name in desk.run.names() if name.startswith("groups/"))
    desk.run.store.put(desk.run.prefix + key, b"not what was sealed")
    result = desk("audit", "frozen_lake")
    assert result.exit_code == 1 and key in result.output and "unreadable 0" not in result.output, result.output


def test_a_run_that_is_not_there_is_an_error_and_no_clean_one(desk: Desk) -> None:
    assert "has no version yet" in desk.bad("audit", "frozen_lake", sets=("name=mistyped",))
