"""What a flow run makes of what becomes of it on a real Prefect server."""

from __future__ import annotations

import os
import socket
from uuid import uuid4

import psutil
import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.context import FlowRunContext
from prefect.states import Cancelling, Crashed

from flows import flow_runs
from flows.flow_runs import BEGAN, GONE, HOST, PID, Orders, StopOrdered, is_gone
from flows.told import noted, run_flow
from infra.services.processes import Identity
from tests.flows.test_hold import client

__all__ = ["client"]  # a fixture


@pytest.mark.server
def test_one_that_was_taken_for_gone_says_that_it_lives(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow_runs, "LOOK_S", 0.0)

    @flow(validate_parameters=False, persist_result=False)
    def living() -> StateType | None:
        context, orders = FlowRunContext.get(), Orders.here()
        assert context is not None and context.flow_run is not None
        this = context.flow_run.id
        client.set_flow_run_state(this, Crashed(message=GONE), force=True)
        orders.check()
        state = client.read_flow_run(this).state_type
        client.set_flow_run_state(this, Cancelling(), force=True)
        with pytest.raises(StopOrdered):
            orders.check()
        return state

    assert living() is StateType.RUNNING


@pytest.mark.server
def test_one_that_somebody_deleted_trains_on_to_its_end(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flow_runs, "LOOK_S", 0.0)

    @flow(validate_parameters=False, persist_result=False)
    @noted
    def training() -> int:
        context, orders = FlowRunContext.get(), Orders.here()
        assert context is not None and context.flow_run is not None
        client.delete_flow_run(context.flow_run.id)
        orders.check()
        return 7

    assert run_flow(training) == 7
    assert "has no such flow run any more" in capsys.readouterr().err


def test_who_is_gone_is_told_by_more_than_a_pid() -> None:
    here = Identity.of(psutil.Process())

    def signed(pid: int, began: float, boot: str, host: str = socket.gethostname()) -> FlowRun:
        return FlowRun(flow_id=uuid4(), labels={HOST: host, PID: str(pid), BEGAN: f"{began!r} {boot}"})

    assert not is_gone(signed(os.getpid(), here.began, here.boot))
    assert is_gone(signed(os.getpid(), here.began - 60, here.boot)), "as where a container is started again"
    assert is_gone(signed(os.getpid(), here.began, "another start"))
    assert not is_gone(signed(os.getpid(), here.began - 60, here.boot, host="elsewhere")), "nobody can tell from here"
    assert not is_gone(FlowRun(flow_id=uuid4(), labels={HOST: socket.gethostname(), PID: ""}))
