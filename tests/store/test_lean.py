"""The GET, PUT and LIST that are not boto3's: sent to where boto3 sends them, with its headers and its signature."""

from __future__ import annotations

import string
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qsl, quote, urlsplit

import boto3
import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest, AWSResponse
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import NoCredentialsError
from hypothesis import given
from hypothesis import strategies as st

from infra.store.lean import LeanClient, sign

ODD = "run/a b+c~d/é%20&=:@;,!*'()$/日本-_.parquet"
BY_PATH = Config(s3={"addressing_style": "path"})
PLACES = {
    "aws": dict(region_name="eu-west-1"),
    "aws-us-east-1": dict(region_name="us-east-1"),
    "aws-china": dict(region_name="cn-north-1"),
    "endpoint": dict(region_name="us-east-1", endpoint_url="http://127.0.0.1:8333", config=BY_PATH),
    "endpoint-with-a-path": dict(region_name="us-east-1", endpoint_url="https://store.example/s3/", config=BY_PATH),
}
DECIDING = ("if-none-match", "range", "x-amz-meta-nonce", "x-amz-security-token", "x-amz-checksum-mode")
"""Headers that change what the server does."""
PUT = dict(Body=b"body", IfNoneMatch="*", Metadata={"nonce": "n1"})
GET = dict(Range="bytes=2-5")
LIST = dict(Prefix=ODD, StartAfter=ODD + "0")
MORE = dict(Prefix=ODD, ContinuationToken="a+b/c=&d")


class Sent(Exception):
    """A request that is not sent."""

    def __init__(self, request: Any) -> None:
        self.request = request


class Connections:
    """They lead nowhere."""

    def connection_from_url(self, url: str) -> Connections:
        self.url = url
        return self

    def urlopen(self, method: str, path: str, body: bytes, headers: dict[str, str], **_: Any) -> Any:
        raise Sent(AWSRequest(method=method, url=self.url + path, headers=headers, data=body))


def both(operation: str, place: dict[str, Any], **arguments: Any) -> tuple[Any, Any]:
    """The lean client's request, and boto3's."""

    def stop(request: Any, **_: Any) -> None:
        raise Sent(request)

    identity = Credentials("key", "secret", "token")
    client = boto3.client(
        "s3",
        aws_access_key_id=identity.access_key,
        aws_secret_access_key=identity.secret_key,
        aws_session_token=identity.token,
        **place,
    )
    client.meta.events.register("before-send.s3", stop)
    found = []
    for made in (LeanClient(client, Connections(), identity), client):  # type: ignore[arg-type]
        with pytest.raises(Sent) as sent:
            getattr(made, operation)(**arguments)
        found.append(sent.value.request)
    return found[0], found[1]


@pytest.mark.parametrize("bucket", ["rollmill", "with.dots"])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(
    ("operation", "more"),
    [
        ("put_object", PUT | {"Key": ODD}),
        ("get_object", GET | {"Key": ODD}),
        *(("list_objects_v2", m) for m in (LIST, MORE)),
    ],
    ids=["put", "get", "list", "list-more"],
)
def test_the_request_is_boto3s(operation: str, more: dict[str, Any], place: dict[str, Any], bucket: str) -> None:
    ours, theirs = both(operation, place, Bucket=bucket, **more)
    (ours_at, ours_asks), (theirs_at, theirs_asks) = (url.url.partition("?")[::2] for url in (ours, theirs))
    assert (ours.method, ours_at) == (theirs.method, theirs_at)
    assert parse_qsl(ours_asks) == sorted(parse_qsl(theirs_asks))
    held = {name: value.decode() if isinstance(value, bytes) else value for name, value in theirs.headers.items()}
    theirs_by_name = {name.lower(): value for name, value in held.items()}
    for name in DECIDING:
        assert ours.headers.get(name) == theirs_by_name.get(name), name


NAMES = st.text(string.ascii_lowercase + "-", min_size=1, max_size=12).map(lambda name: f"x-amz-meta-{name}")
VALUES = st.text(string.ascii_letters + string.digits + "+/=*", min_size=1, max_size=20)


@given(
    key=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    headers=st.dictionaries(NAMES, VALUES, max_size=3),
    token=st.none() | VALUES,
    secret=VALUES,
    now=st.datetimes(datetime(2020, 1, 1), datetime(2040, 1, 1)),
    method=st.sampled_from(["GET", "PUT"]),
    body=st.binary(max_size=10),
    prefix=st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
def test_the_signature_is_botocores(
    key: str,
    headers: dict[str, str],
    token: str | None,
    secret: str,
    now: datetime,
    method: str,
    body: bytes,
    prefix: str | None,
) -> None:
    identity = Credentials("key", secret, token)
    url = f"http://store.example:8333/bucket/{quote(key, safe='/~')}"
    url += "" if prefix is None else f"?list-type=2&prefix={quote(prefix, safe='-_.~')}"
    request = AWSRequest(method=method, url=url, headers=headers, data=body)
    with patch("botocore.auth.get_current_datetime", lambda: now):
        S3SigV4Auth(identity, "s3", "eu-west-1").add_auth(request)

    where, frozen = urlsplit(url), identity.get_frozen_credentials()
    digest = request.headers["X-Amz-Content-SHA256"]
    ours = sign(
        frozen, "eu-west-1", now.replace(tzinfo=UTC), method, where.netloc, where.path, headers, digest, where.query
    )
    assert ours["authorization"] == request.headers["Authorization"]
    assert ours["x-amz-date"] == request.headers["X-Amz-Date"]


PAGE = """<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name><Prefix>a%2Bb</Prefix>{encoding}
<Contents><Key>{key}</Key><LastModified>2026-01-02T03:04:05.678Z</LastModified><ETag>&quot;e&quot;</ETag><Size>7</Size>
<Owner><ID>o</ID></Owner><StorageClass>STANDARD</StorageClass></Contents><IsTruncated>{truncated}</IsTruncated>{more}
</ListBucketResult>"""


@pytest.mark.parametrize(
    "page",
    [
        PAGE.format(key="a+b%2B%C3%A9/%25", encoding="<EncodingType>url</EncodingType>", truncated="false", more=""),
        PAGE.format(
            key="a+b%2Bé&amp;", encoding="", truncated="true",
            more="<NextContinuationToken>x&amp;+/=</NextContinuationToken>",
        ),
        "<ListBucketResult><IsTruncated>false</IsTruncated><KeyCount>0</KeyCount></ListBucketResult>",
        "<ListBucketResult/>",
    ],
    ids=["encoded", "plain", "empty", "mute"],
)  # fmt: skip
def test_a_page_reads_as_boto3_reads_it(page: str) -> None:
    client = boto3.client("s3", aws_access_key_id="key", aws_secret_access_key="secret", region_name="us-east-1")
    answer = SimpleNamespace(status=200, headers={"date": "Fri, 02 Jan 2026 03:04:06 GMT"}, data=page.encode())
    client.meta.events.register("before-send.s3", lambda **_: _Answer(answer))
    connections = SimpleNamespace(connection_from_url=lambda _: SimpleNamespace(urlopen=lambda *_, **__: answer))
    lean = LeanClient(client, connections, Credentials("key", "secret"))  # type: ignore[arg-type]
    ours, theirs = (made.list_objects_v2(Bucket="b", Prefix="p") for made in (lean, client))
    assert ours["ResponseMetadata"]["HTTPHeaders"]["date"] == theirs["ResponseMetadata"]["HTTPHeaders"]["date"]
    for name in ("IsTruncated", "NextContinuationToken"):
        assert ours.get(name) == theirs.get(name), name
    kept = [{name: entry[name] for name in ("Key", "Size", "LastModified")} for entry in theirs.get("Contents", ())]
    assert list(ours.get("Contents", ())) == kept


class _Answer(AWSResponse):
    """A served answer, for botocore."""

    def __init__(self, answer: SimpleNamespace) -> None:
        super().__init__("http://store.example", answer.status, answer.headers, None)
        self._content = answer.data


def test_without_credentials_nothing_is_sent() -> None:
    client = boto3.client("s3", region_name="us-east-1")
    with pytest.raises(NoCredentialsError):
        LeanClient(client, Connections(), None).get_object(Bucket="b", Key="k")  # type: ignore[arg-type]


def test_renewed_credentials_are_used() -> None:
    identity = Credentials("old", "secret")
    made = LeanClient(boto3.client("s3", region_name="us-east-1"), Connections(), identity)  # type: ignore[arg-type]
    identity.access_key = "new"
    with pytest.raises(Sent) as sent:
        made.get_object(Bucket="b", Key="k")
    assert "Credential=new/" in sent.value.request.headers["authorization"]
