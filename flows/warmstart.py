"""The warm start flow: supervised learning on the environment's own expert, before the first version.

Invariant: it yields a Hugging Face directory, and the same configuration yields the same one: it is kept by the
hash of what made it, and made once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from time import monotonic, sleep

from prefect import flow

from flows.home import Home
from flows.prepare import base_model
from flows.session import PERIOD_S, Session
from flows.told import noted, run_flow
from rl.config.load import dumps
from rl.config.run import RunConfig
from rl.errors import DeadlineExceeded
from rl.placement import placement_of
from tasks.warmstart import warmstart_process


def initial_model(session: Session) -> Path:
    """The weights that version 0 publishes."""
    if session.config.model.warmstart is None:
        return base_model(session.config, Home.default().models)
    session.console.print("warm start on the expert's demonstrations", highlight=False)
    return run_flow(warmstart, session.config.name, session)


@flow(name="warmstart", flow_run_name="warmstart {name}", validate_parameters=False, persist_result=False)
@noted
def warmstart(name: str, session: Session) -> Path:
    """Teach the base model by demonstrations; the directory of the result. Raises ProcessFailed,
    Crashed, DeadlineExceeded."""
    config, client = session.config, session.client
    target = Home.default().models / f"warm-{_digest(config)}"
    if (target / "config.json").exists():
        return target
    out = target.with_name(f"{target.name}.{os.getpid()}")
    where = placement_of(warmstart_process).preferred()
    child = client.submit(
        warmstart_process,
        session.key,
        str(session.config_file),
        str(Home.default().models),
        str(out),
        resources={where.value: 1},
        pure=False,
    )
    end = monotonic() + config.deadlines.warmstart
    while not child.done():
        session.orders.check()
        if monotonic() > end:
            raise DeadlineExceeded(
                f"warm start: not done within deadlines.warmstart ({config.deadlines.warmstart:g} s)"
            )
        sleep(PERIOD_S)
    child.result()
    try:
        out.rename(target)
    except OSError:  # another process made the same one first
        shutil.rmtree(out, ignore_errors=True)
    return target


def _digest(config: RunConfig) -> str:
    """Of everything that the warm start depends on; it trains the base, whatever adapter comes upon it."""
    tree = json.loads(dumps(config))
    parts = {key: tree[key] for key in ("model", "domains", "seed", "rollout")}
    del parts["model"]["lora"]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
