"""Where the embedded services answer, and the environment variables that tell child processes so.

These are plain values: safe to pickle and to hand to another process. They hold a secret (the S3 key), which
`repr` leaves out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.services.errors import ServiceNotUp

REGION = "us-east-1"
BUCKET = "rollmill"

# Switches of every library in the process tree that would otherwise report home.
NO_TELEMETRY = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


GIVEN = {
    "s3": (
        "AWS_ACCESS_KEY_ID",
        "AWS_PROFILE",
        "AWS_ENDPOINT_URL_S3",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    ),
    "prefect": ("PREFECT_API_URL",),
    "mlflow": ("MLFLOW_TRACKING_URI",),
}
"""By service: the variables of which each says that it is a server of the user's own."""


def given(service: str) -> bool:
    """Whether the environment names a server of the user's own."""
    return any(os.environ.get(variable) for variable in GIVEN[service])


@dataclass(frozen=True)
class S3Endpoint:
    """One S3 server: address, credentials and the bucket that exists on it."""

    endpoint_url: str
    access_key: str
    secret_key: str = field(repr=False)
    bucket: str = BUCKET
    region: str = REGION

    def client(self, *, connect_timeout: float = 2.0, read_timeout: float = 10.0, attempts: int = 2) -> Any:
        """A boto3 S3 client: path addressing, short timeouts (seconds), `attempts` tries per request in all.

        Make a new one after a fork. Proxies of the environment are ignored: the server is on loopback.
        """
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
            config=Config(
                s3={"addressing_style": "path"},
                connect_timeout=connect_timeout,
                read_timeout=read_timeout,
                retries={"total_max_attempts": attempts, "mode": "standard"},
                max_pool_connections=32,
                proxies={},
            ),
        )


@dataclass(frozen=True)
class Endpoints:
    """What `supervisor.up` started (or found running). A service that was not asked for is None."""

    data_dir: Path
    log_dir: Path
    s3: S3Endpoint | None = None
    prefect_api_url: str | None = None
    prefect_ui_url: str | None = None
    mlflow_uri: str | None = None

    def need_s3(self) -> S3Endpoint:
        """The S3 server, or `ServiceNotUp`."""
        if self.s3 is None:
            raise ServiceNotUp("s3")
        return self.s3


def environment(endpoints: Endpoints) -> dict[str, str]:
    """The variables that make boto3, s3fs, Prefect and MLflow in a child process use these endpoints.

    Holds the S3 secret: give it to child processes, do not print it. Telemetry is off in all of them.
    """
    env = dict(NO_TELEMETRY)
    if endpoints.s3 is not None:
        env |= {
            "AWS_ACCESS_KEY_ID": endpoints.s3.access_key,
            "AWS_SECRET_ACCESS_KEY": endpoints.s3.secret_key,
            "AWS_ENDPOINT_URL_S3": endpoints.s3.endpoint_url,
            "AWS_REGION": endpoints.s3.region,
            "AWS_DEFAULT_REGION": endpoints.s3.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    if endpoints.prefect_api_url is not None:
        env["PREFECT_API_URL"] = endpoints.prefect_api_url
    if endpoints.mlflow_uri is not None:
        env["MLFLOW_TRACKING_URI"] = endpoints.mlflow_uri
    # A proxy in the caller's environment must not catch loopback traffic.
    local = "127.0.0.1,localhost"
    for name in ("NO_PROXY", "no_proxy"):
        before = os.environ.get(name, "")
        env[name] = f"{before},{local}" if before and local not in before else before or local
    return env
