"""A whole run over a network that fails 5 % of all requests to the store, in every way."""

from __future__ import annotations

import pytest

from infra.services.endpoints import Endpoints
from infra.store.audit import audit
from infra.store.clients import READ_TIMEOUT_S
from infra.store.objects import ObjectStore
from rl.config.infrastructure import StoreSection
from tests.command_line import Rollmill
from tests.store.fault_proxy import bad_network

STEPS = 8


@pytest.mark.server
@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_run_completes_over_a_bad_network(rollmill: Rollmill, services: Endpoints) -> None:
    upstream = services.need_s3().endpoint_url
    with bad_network(upstream, share=0.05, seed=0, silence_s=READ_TIMEOUT_S + 2) as proxy:
        far = Rollmill(rollmill.home, rollmill.env | {"AWS_ENDPOINT_URL_S3": proxy.url})
        code, output = far(*far.train_arguments("bad-network", f"training.steps={STEPS}"), timeout=800)
    assert code == 0, output
    assert proxy.faults.total() >= 10
    config = rollmill.config("bad-network")
    found = audit(ObjectStore.connect(StoreSection(endpoint_url=upstream)), config.prefix)
    assert found.findings == []
    assert found.account.head == STEPS and found.account.trained
