"""Fixtures of all tests: real servers on free ports, in directories of their own, gone at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.services import supervisor
from infra.services.endpoints import Endpoints, S3Endpoint


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Endpoint]:
    """A real S3 server (about 1 s). Shared by the session: use your own prefix. Mark the test `server`."""
    home = tmp_path_factory.mktemp("s3")
    try:
        yield supervisor.up(home, supervisor.AUTO, ["s3"]).need_s3()
    finally:
        supervisor.down(home)


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    """S3, Prefect and MLflow (about 12 s). Shared by the session. Mark the test `server`."""
    home = tmp_path_factory.mktemp("services")
    try:
        yield supervisor.up(home, supervisor.AUTO)
    finally:
        supervisor.down(home)
