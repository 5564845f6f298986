"""A tenant's own keys on the real S3 server: they read what is the tenant's, whatever is tried."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from infra.services import supervisor
from infra.services.errors import ServiceNotUp
from infra.services.grants import grant, tenant_policy
from infra.services.supervisor import AUTO

pytestmark = [pytest.mark.server, pytest.mark.slow]

HERE = "rollmill"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "home"
    supervisor.down(tmp_path / "home")


def when_known(call: Callable[[], Any]) -> Any:
    """The server reads its credentials a moment after it was told to."""
    end = time.monotonic() + 20
    while True:
        try:
            return call()
        except ClientError:
            if time.monotonic() > end:
                raise


def test_a_tenants_keys_reach_its_own_prefix_and_nothing_else(home: Path):
    with pytest.raises(ServiceNotUp):
        grant("ann", "shop", home)
    root = supervisor.up(home, AUTO, ["s3"]).need_s3().client()
    for key in ("ann/lake/x", "annex/lake/x", "bob/lake/x", "services/shop/base/x", "services/shop/jobs/0"):
        root.put_object(Bucket=HERE, Key=key, Body=key.encode())
    granted = grant("ann", "shop", home)
    assert grant("ann", "shop", home) == granted and granted.secret_key not in repr(granted)
    ann = granted.client(attempts=1)

    def get(key: str) -> bytes:
        return ann.get_object(Bucket=HERE, Key=key)["Body"].read()

    def keys(prefix: str) -> list[str]:
        return [o["Key"] for o in ann.list_objects_v2(Bucket=HERE, Prefix=prefix).get("Contents", [])]

    assert when_known(lambda: get("ann/lake/x")) == b"ann/lake/x"
    assert get("services/shop/base/x") and keys("ann/") == ["ann/lake/x"]
    copied = {"Bucket": HERE, "Key": "ann/stolen", "CopySource": f"{HERE}/bob/lake/x"}
    tried: dict[str, Callable[[], Any]] = {
        "read": lambda: get("bob/lake/x"),
        "look at": lambda: ann.head_object(Bucket=HERE, Key="bob/lake/x"),
        "read one of a like name": lambda: get("annex/lake/x"),
        "climb": lambda: get("ann/../bob/lake/x"),
        "read the job book": lambda: get("services/shop/jobs/0"),
        "list": lambda: keys("bob/"),
        "list by a part of the name": lambda: keys("ann"),
        "list all": lambda: keys(""),
        "list in the old way": lambda: ann.list_objects(Bucket=HERE),
        "copy": lambda: ann.copy_object(**copied),
        "write": lambda: ann.put_object(Bucket=HERE, Key="bob/lake/y", Body=b""),
        "write its own": lambda: ann.put_object(Bucket=HERE, Key="ann/lake/y", Body=b""),
        "delete": lambda: ann.delete_object(Bucket=HERE, Key="bob/lake/x"),
        "delete its own": lambda: ann.delete_object(Bucket=HERE, Key="ann/lake/x"),
        "upload in parts": lambda: ann.create_multipart_upload(Bucket=HERE, Key="bob/lake/z"),
        "make a bucket": lambda: ann.create_bucket(Bucket="another"),
    }
    for what, call in tried.items():
        with pytest.raises(ClientError) as caught:
            call()
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] in (400, 403), what
    assert keys("ann/../bob/") == []
    many = ann.delete_objects(Bucket=HERE, Delete={"Objects": [{"Key": "bob/lake/x"}]})
    assert many["Errors"][0]["Code"] == "AccessDenied"
    left = [o["Key"] for o in root.list_objects_v2(Bucket=HERE)["Contents"] if not o["Key"].startswith("_")]
    assert left == ["ann/lake/x", "annex/lake/x", "bob/lake/x", "services/shop/base/x", "services/shop/jobs/0"]

    bob = grant("bob", "shop", home).client(attempts=1)
    assert when_known(lambda: bob.get_object(Bucket=HERE, Key="bob/lake/x")["Body"].read()) == b"bob/lake/x"
    assert get("ann/lake/x"), "the keys of the first go on"


def test_the_policy_for_aws_names_the_same():
    policy = tenant_policy("b", "ann", "shop")
    read, listed = policy["Statement"]
    assert read["Resource"] == ["arn:aws:s3:::b/ann/*", "arn:aws:s3:::b/services/shop/base/*"]
    assert listed["Condition"] == {"StringLike": {"s3:prefix": ["ann/*"]}}
    assert {action for s in policy["Statement"] for action in s["Action"]} == {"s3:GetObject", "s3:ListBucket"}
