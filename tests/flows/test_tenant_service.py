"""A service as those who use it see it, on a store alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.tenant_service import Tenants, load_service
from infra.store.objects import ObjectStore
from tests.store.runs import Run


def test_a_log_that_can_not_be_read_hides_the_figures_of_its_job_alone(
    moto_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_ENDPOINT_URL_S3": moto_url}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    service = load_service("lake", ["store.bucket=tenant-service"])
    store = ObjectStore.connect(service.store)
    store.ensure_bucket()
    tenants = Tenants(service)
    for tenant in ("ann", "bob", "cyd"):
        tenants.submit({"tenant": tenant, "name": "job", "domains": ["frozen_lake"]})
        run = Run(store, f"{tenant}/job/", tmp_path / tenant)
        run.steps(3)
    store.put("bob/job/log/0000000003.json", b'{"kind": "none of ours"}')
    rows = {row.job: row for row in tenants.figures()}
    assert {id: row.version for id, row in rows.items()} == {"ann/job": 2, "bob/job": 0, "cyd/job": 2}
    assert rows["ann/job"].unread is None and "bob/job/log/0000000003.json" in (rows["bob/job"].unread or "")
    assert "bob/job: its log can not be read" in tenants.table()
