"""The S3 client of a process: where it connects, and how long it waits.

Invariants: one client per process, endpoint and identity (a client does not survive a fork); a custom endpoint
is addressed by path; botocore repeats nothing by itself, `infra.store.objects` does. The client is boto3's, but for a
GET, PUT and LIST of its own (`infra.store.lean`), unless the endpoint is reached through a proxy.
"""

from __future__ import annotations

import logging
import os
import threading
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.session
import urllib3
from botocore.client import Config
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from infra.store.lean import LeanClient
from rl.config.infrastructure import StoreSection

CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 10.0
"""Silence on a socket, not the length of a transfer."""
CONNECTIONS = 32
"""Kept open."""

log = logging.getLogger(__name__)
_making = threading.Lock()


def client(section: StoreSection) -> Any:
    """This process's S3 client for a configuration. Sends nothing yet."""
    identity = (os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_PROFILE"))
    with _making:
        return _client(os.getpid(), explicit_endpoint(section), section.region, identity)


def explicit_endpoint(section: StoreSection) -> str | None:
    """The endpoint that the configuration or the environment names; None means AWS itself."""
    return section.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


@lru_cache(maxsize=16)
def _client(pid: int, endpoint: str | None, region: str, identity: tuple[str | None, ...]) -> Any:
    """One client per process (hence `pid`), endpoint and identity."""
    session = botocore.session.get_session()
    config: dict[str, Any] = {}
    if endpoint is not None:
        config["s3"] = {"addressing_style": "path"}
        parts = urlsplit(endpoint)
        if parts.hostname in ("localhost", "::1") or (parts.hostname or "").startswith("127."):
            config["proxies"] = {}  # a proxy of the environment must not catch loopback traffic
        elif parts.scheme == "http":
            log.warning("%s: plain http to another machine: samples and weights travel unencrypted", endpoint)
    client = boto3.session.Session(botocore_session=session).client(
        "s3",
        endpoint_url=endpoint,
        region_name=region,
        config=Config(
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            retries={"total_max_attempts": 1},
            max_pool_connections=CONNECTIONS,
            **config,
        ),
    )
    if config.get("proxies", get_environ_proxies(client.meta.endpoint_url)):
        return client
    certificates = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE", True)
    connections = urllib3.PoolManager(
        timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S),
        maxsize=CONNECTIONS,
        cert_reqs="CERT_REQUIRED",
        ca_certs=get_cert_path(certificates),
    )
    return LeanClient(client, connections, session.get_credentials())


def is_aws(endpoint: str) -> bool:
    """Whether an endpoint is AWS's own, where buckets are never made unasked."""
    return (urlsplit(endpoint).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
