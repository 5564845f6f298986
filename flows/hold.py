"""Being the one flow run that trains a run.

Invariants
- Of all flow runs of one run's prefix at most one holds it: a concurrency limit of one on Prefect's server, under a
  lease that its holder renews, so that it comes free after the death of the holder, on whatever machine.
- What died on this machine is seen at once: it is marked Crashed, and its lease is given back.
- A server that restarts forgets its leases and keeps the slots they took. One that no living flow run is known to hold
  is freed, so that no run is held for ever by nobody.
- It spares two flows the trouble. What forbids two trainers is the log's fence, not this: a lease that can not be
  renewed ends nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from time import monotonic, sleep
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate
from prefect.client.schemas.objects import ConcurrencyLeaseHolder, StateType
from prefect.context import FlowRunContext

from flows.flow_runs import LEASE, Orders, crash_the_gone, flow_runs, run_tag, sign
from flows.told import ask
from rl.config.run import RunConfig
from rl.errors import RollmillError

LEASE_S = 60.0
"""The least that Prefect takes."""
RENEW_S = 15.0
WAIT_S = LEASE_S + 30.0
"""For a lease of which no living holder is known: it runs out, and the server looks every 15 s."""
SIGN_S = 10.0
"""The same where the last holder died on this machine: whoever came before this one would have signed by then."""
LOCKED = 423


class RunHeld(RollmillError):
    """Another flow run trains this run."""


@contextmanager
def held(config: RunConfig) -> Iterator[None]:
    """Hold the run for the duration of the block. Raises RunHeld. Outside of a flow run it does nothing."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or not isinstance(context.client, SyncPrefectClient):
        yield
        return
    client, this = context.client, context.flow_run.id
    leases = [lease for gone in crash_the_gone(client, run_tag(config)) if (lease := gone.labels.get(LEASE))]
    for lease in leases:
        _release(client, UUID(str(lease)))
    lease_id = _acquire(client, config, this, SIGN_S if leases else WAIT_S)
    sign(config, **{LEASE: str(lease_id)})
    ended = threading.Event()
    within = copy_context()  # of the server that this flow run is on
    renewing = threading.Thread(target=within.run, args=(_renew, lease_id, ended), name="hold", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        ended.set()
        _release(client, lease_id)


def _acquire(client: SyncPrefectClient, config: RunConfig, this: UUID, wait_s: float) -> UUID:
    limit, end, orders, freed = run_tag(config), monotonic() + wait_s, Orders.here(), False
    client.upsert_global_concurrency_limit_by_name(limit, 1)
    holder = ConcurrencyLeaseHolder(type="flow_run", id=this)
    while True:
        try:
            answer = client.increment_concurrency_slots_with_lease([limit], 1, "concurrency", LEASE_S, holder)
            return UUID(answer.json()["lease_id"])
        except httpx.HTTPStatusError as error:
            if error.response.status_code != LOCKED:
                raise
        others = [
            r.name
            for r in flow_runs(client, limit)
            if r.id != this and LEASE in r.labels and r.state_type in (StateType.RUNNING, StateType.CANCELLING)
        ]
        if not others and monotonic() > end and not freed:
            client.update_global_concurrency_limit(limit, GlobalConcurrencyLimitUpdate(active_slots=0))
            freed = True
            continue
        if others or monotonic() > end:
            who = f"by the flow run {others[0]!r}" if others else "by somebody else"
            raise RunHeld(
                f"run {config.prefix.rstrip('/')!r} is being trained {who}; wait for it, or end it with `rollmill "
                f"runs stop {config.prefix.rstrip('/')}`"
            )
        orders.check()
        sleep(1.0)


def _renew(lease: UUID, ended: threading.Event) -> None:
    with get_client(sync_client=True) as client:
        while not ended.wait(RENEW_S):
            with suppress(httpx.HTTPError):
                client.renew_concurrency_lease(lease, LEASE_S)


def _release(client: SyncPrefectClient, lease: UUID) -> None:
    ask(lambda: client.release_concurrency_slots_with_lease(lease))  # or it ran out before, or will by itself
