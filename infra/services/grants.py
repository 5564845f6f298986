"""Credentials of the embedded S3 server that reach what is one tenant's, and nothing else; for AWS a policy that says
the same.

Invariants: a tenant has one pair of keys, made on first use; they may read and list `<tenant>/` and read the base of
the service, and change nothing: whatever is to be changed is asked for through the service. Who holds the server's own
keys can do everything.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
from pathlib import Path
from typing import Any

from infra.services import seaweed, state
from infra.services.endpoints import BUCKET, S3Endpoint
from infra.services.errors import ServiceNotUp
from infra.services.supervisor import default_data_dir, locked
from rl.config.run import service_prefix


def grant(tenant: str, service: str, data_dir: Path | None = None) -> S3Endpoint:
    """The endpoint with the tenant's own keys, which work from now on. Raises ServiceNotUp without a running server."""
    home = data_dir or default_data_dir()
    with locked(home):
        record = state.load(home).get("s3")
        server = record.identity.process() if record is not None and record.identity is not None else None
        if record is None or server is None:
            raise ServiceNotUp("s3")
        path = seaweed.identities(home)
        told = json.loads(path.read_text())
        name = f"tenant-{tenant}"
        mine = next((one for one in told["identities"] if one["name"] == name), None)
        if mine is None:
            keys = {"accessKey": secrets.token_hex(10).upper(), "secretKey": secrets.token_urlsafe(30)}
            mine = {"name": name, "credentials": [keys], "actions": []}
            told["identities"].append(mine)
        mine["actions"] = sorted({*mine["actions"], *_actions(tenant, service)})
        draft = path.with_suffix(".tmp")
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(told, file)
        draft.replace(path)
        server.send_signal(signal.SIGHUP)  # it reads its credentials anew
        keys = mine["credentials"][0]
        return S3Endpoint(seaweed.endpoint(home, record.port).endpoint_url, keys["accessKey"], keys["secretKey"])


def _actions(tenant: str, service: str) -> list[str]:
    own = f"{BUCKET}/{tenant}/*"
    return [f"Read:{own}", f"List:{own}", f"Read:{BUCKET}/{service_prefix(service)}base/*"]


def tenant_policy(bucket: str, tenant: str, service: str) -> dict[str, Any]:
    """The same as an IAM policy, for a user or role of the tenant on AWS."""
    arn = f"arn:aws:s3:::{bucket}"
    objects = [f"{arn}/{tenant}/*", f"{arn}/{service_prefix(service)}base/*"]
    return {
        "Version": "2012-10-17",
        "Statement": [
            {"Sid": "ReadOwn", "Effect": "Allow", "Action": ["s3:GetObject"], "Resource": objects},
            {
                "Sid": "ListOwn",
                "Effect": "Allow",
                "Action": ["s3:ListBucket"],
                "Resource": [arn],
                "Condition": {"StringLike": {"s3:prefix": [f"{tenant}/*"]}},
            },
        ],
    }
