"""The store as paths that a user sees: `s3://bucket/tenant/run/groups/...` for pandas, polars and the CLI.

Invariants: same endpoint and credentials as the hot path; no directory cache, which would hide what other
processes write; an instance is not shared with a forked process.
"""

from __future__ import annotations

import s3fs

from infra.store.clients import CONNECT_TIMEOUT_S, READ_TIMEOUT_S, explicit_endpoint
from rl.config.infrastructure import StoreSection


def open_fs(section: StoreSection) -> s3fs.S3FileSystem:
    """A file system over the store's endpoint. Slower per object than `ObjectStore`; for people and tools."""
    endpoint = explicit_endpoint(section)
    config = {"connect_timeout": CONNECT_TIMEOUT_S, "read_timeout": READ_TIMEOUT_S}
    return s3fs.S3FileSystem(
        endpoint_url=endpoint,
        client_kwargs={"region_name": section.region},
        config_kwargs=config | ({"s3": {"addressing_style": "path"}} if endpoint else {}),
        use_listings_cache=False,
        skip_instance_cache=True,
    )
