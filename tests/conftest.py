"""Fixtures of all tests: real servers on free ports, in directories of their own, gone at the end."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from infra.services import supervisor
from infra.services.endpoints import GIVEN, Endpoints, S3Endpoint, environment
from tests.command_line import Rollmill

os.environ["COLUMNS"] = "300"  # read once, by whichever test first brings the command line: no table is cut

# that examples are made slowly is the machine's doing
ANY = settings(suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("any", ANY)
settings.register_profile("deterministic", ANY, derandomize=True, deadline=None, database=None, print_blob=False)
settings.load_profile("any")


@pytest.fixture(scope="module", autouse=True)
def servers_are_named_for_one_file() -> Iterator[None]:
    """What a file of tests names in the environment as a server of the user's own is gone when that file ends: others
    must not find servers that nobody gave them."""
    before = {name: os.environ.get(name) for names in GIVEN.values() for name in names}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Endpoint]:
    """A real S3 server (about 1 s). Shared by the session: use your own prefix. Mark the test `server`."""
    home = tmp_path_factory.mktemp("s3")
    try:
        yield supervisor.up(home, supervisor.AUTO, ["s3"]).need_s3()
    finally:
        supervisor.down(home)


@pytest.fixture
def own_store(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of that of `moto_url`, which the environment names as a store of the user's own."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", moto_url)
    return moto_url


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    """S3, Prefect and MLflow (about 12 s). Shared by the session. Mark the test `server`."""
    home = tmp_path_factory.mktemp("services")
    try:
        yield supervisor.up(home, supervisor.AUTO)
    finally:
        supervisor.down(home)


@pytest.fixture(scope="session")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def rollmill(services: Endpoints, shared_home: Path) -> Iterator[Rollmill]:
    """The command line on `services`. The environment of this process names them and the home, too, for the tests of
    one file."""
    ours = environment(services) | {"ROLLMILL_HOME": str(shared_home), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ours.items():
            patch.setenv(name, value)
        yield Rollmill(shared_home, {**os.environ})


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    """An S3 server in this process, for tests that need no durable one. Shared by the session."""
    from moto.server import ThreadedMotoServer  # seconds, which most tests need not pay

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()
