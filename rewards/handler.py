"""The Lambda handler of every reward: one module, the same on AWS and on a laptop.

    event   {"reward": name, "options": {...}, "views": [view, ...]}
         or {"s3": {"bucket": ..., "key": ...}}                        an event above Lambda's 6 MB, as an object
    answer  {"results": [{"parts": {...}} or {"error": "..."}, ...]}    one for each view, in order

Invariants: no state between invocations but imported modules; only rewards that the bundle names for this function
can be called; one view that can not be scored costs itself only. An invocation that fails as a whole raises, and
Lambda reports it.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from rewards.protocol import TrajectoryView
from rewards.registry import reward_function, score_batch
from rl.errors import ConfigError, RewardFailure

MANIFEST = "rollmill.json"


def handler(event: dict[str, Any], context: Any) -> dict[str, Any]:
    """Score the views of one event."""
    if "s3" in event:
        event = _fetch(**event["s3"])
    path = _rewards().get(event["reward"])
    if path is None:
        raise ConfigError(f"the bundle has no reward {event['reward']!r}; deploy it: rollmill rewards deploy")
    views = [TrajectoryView.from_json(view) for view in event["views"]]
    outcomes = score_batch(reward_function(path), views, event["options"])
    return {"results": [{"error": str(o)} if isinstance(o, RewardFailure) else {"parts": o} for o in outcomes]}


@cache
def _rewards() -> dict[str, str]:
    """`module:attribute` by name, of all rewards of this function."""
    root = Path(os.environ["LAMBDA_TASK_ROOT"])
    return json.loads((root / MANIFEST).read_text())[os.environ["ROLLMILL_FUNCTION"]]["rewards"]


def _fetch(bucket: str, key: str) -> dict[str, Any]:
    return json.loads(_s3().get_object(Bucket=bucket, Key=key)["Body"].read())


@cache
def _s3() -> Any:
    import boto3  # of the runtime; takes a quarter of a second that small events need not wait for

    return boto3.client("s3")
