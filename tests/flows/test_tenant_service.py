"""A service as those who use it see it, on a store alone."""

from __future__ import annotations

from pathlib import Path

from flows.tenant_service import Tenants, load_service
from infra.store.objects import ObjectStore
from tests.store.runs import Run


def test_a_log_that_can_not_be_read_hides_the_figures_of_its_job_alone(
    own_store: str, tmp_path: Path
) -> None:
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
