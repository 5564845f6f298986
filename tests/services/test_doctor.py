"""The doctor: every failure has a mend, and no failure is an exception."""

from __future__ import annotations

import shutil
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from infra.sandbox import sandbox
from infra.services import doctor
from infra.services.endpoints import S3Endpoint
from infra.services.supervisor import Ports
from rl.config.infrastructure import StoreSection


@pytest.mark.slow
def test_a_port_in_use_and_a_missing_package_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ["no-such-package>=1", "psutil>=999", "pydantic>=2"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: wanted)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = {c.name: c for c in doctor.checks(tmp_path, Ports(s3=port, prefect=0, mlflow=0))}
    assert not found["package no-such-package"].ok and "make install" in found["package no-such-package"].mend
    assert not found["package psutil"].ok and "999" in found["package psutil"].detail
    assert found["package pydantic"].ok
    assert not found["port of s3"].ok and "--s3-port" in found["port of s3"].mend
    assert str(port) in found["port of s3"].detail
    assert all(c.mend for c in found.values() if not c.ok)


def test_a_version_that_the_lock_does_not_name_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ["psutil"])
    monkeypatch.setattr(doctor, "_locked_versions", lambda: {"psutil": "0.1"})
    (check,) = doctor._dependencies()
    assert not check.ok and "0.1" in check.detail


def test_a_state_file_that_can_not_be_read_is_a_failing_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_dependencies", lambda: iter(()))
    (tmp_path / "services.json").write_text("[]")
    found = doctor.checks(tmp_path)
    assert not found[-1].ok and "rollmill down" in found[-1].mend


@pytest.mark.server
def test_the_atomicity_hook_is_called_and_its_error_becomes_a_mend(s3: S3Endpoint) -> None:
    calls: list[tuple[str, str]] = []

    def good(client: Any, bucket: str, prefix: str) -> None:
        calls.append((bucket, prefix))

    def bad(client: Any, bucket: str, prefix: str) -> None:
        raise RuntimeError("two winners")

    assert doctor._atomic(s3, good).ok and calls == [(s3.bucket, "_rollmill/doctor/")]
    check = doctor._atomic(s3, bad)
    assert not check.ok and "two winners" in check.detail and check.mend
    assert doctor._atomic(s3, None).ok, "the embedded server itself must pass the store's probe"


@pytest.mark.skipif(sys.platform != "linux", reason="the full sandbox needs Linux")
def test_the_sandbox_is_tried_and_where_it_is_not_to_be_had_the_mend_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor._sandbox()
    assert found.ok and found.detail.startswith("bubblewrap ") and "/python" in found.detail
    which = shutil.which
    sandbox._starter.cache_clear()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "which", lambda *_, **__: None)
            missing = doctor._sandbox()
        assert not missing.ok and missing.optional and missing.detail == "the program 'bwrap' is missing"
        assert "apt-get install bubblewrap" in missing.mend
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "which", lambda name, **k: which("false" if name == "bwrap" else name, **k))
            useless = doctor._sandbox()
        assert not useless.ok and "allow unprivileged user namespaces" in useless.mend
    finally:
        sandbox._starter.cache_clear()


def test_servers_of_ones_own_are_looked_at_in_the_place_of_the_embedded_ones(
    own_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

    monkeypatch.setattr(doctor, "_dependencies", lambda: iter(()))
    with HTTPServer(("127.0.0.1", 0), Healthy) as server, socket.socket() as closed:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        closed.bind(("127.0.0.1", 0))
        own = {
            "PREFECT_API_URL": f"http://127.0.0.1:{closed.getsockname()[1]}/api",
            "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{server.server_port}",
        }
        for name, value in own.items():
            monkeypatch.setenv(name, value)
        missing = StoreSection(bucket="nobody-made-it")
        monkeypatch.setattr("rl.config.infrastructure.StoreSection", lambda: missing)
        found = {c.name: c for c in doctor.checks(tmp_path)}
        server.shutdown()
    assert not any(name.startswith(("port of", "service ")) for name in found), found
    assert found["your mlflow"].ok and "answers" in found["your mlflow"].detail
    assert not found["your prefect"].ok and "PREFECT_API_URL" in found["your prefect"].mend
    assert not found["your s3"].ok and found["your s3"].optional and "store.bucket" in found["your s3"].mend
