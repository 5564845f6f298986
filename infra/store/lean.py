"""The three requests of the hot path, GET and PUT of an object and a listing, at less than half of what boto3 spends on
them; the rest is boto3's. That price is paid in Python, under the interpreter's lock: for models of the API, rules of
the endpoint and dozens of hooks, which for these requests come to a URL, a signature and a few headers; and for the
dates of a listing.

Invariants
- A `LeanClient` is called as the boto3 client, for the arguments that the store uses, and answers and fails as it does:
  the errors are botocore's, with the server's status and code. Redirects are not followed; nothing is repeated.
- Same endpoint, identity, certificates and timeouts as the boto3 client behind it: both are made of one session
  (`infra.store.clients`).
- What arrives is what was sent: a PUT is signed over its body's SHA-256, a GET is checked against its length, and
  against the object's CRC32 where the server tells it.
"""

from __future__ import annotations

import hmac
import io
import re
import zlib
from base64 import b64encode
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from typing import Any
from urllib.parse import quote, unquote_plus, urlsplit
from xml.etree import ElementTree

import urllib3
from botocore.credentials import Credentials, ReadOnlyCredentials
from botocore.exceptions import (
    ClientError,
    EndpointConnectionError,
    FlexibleChecksumError,
    HTTPClientError,
    NoCredentialsError,
    ReadTimeoutError,
)
from botocore.parsers import ResponseParserError
from urllib3 import exceptions as wire

_WORD = re.compile(rb"<Code>([^<]*)</Code>")
_MESSAGE = re.compile(rb"<Message>([^<]*)</Message>")


class LeanClient:
    """A boto3 client of S3 (`client`, of which all else is taken) with its own GET, PUT and LIST. Safe to share between
    threads, not between processes."""

    def __init__(self, client: Any, connections: urllib3.PoolManager, credentials: Credentials | None) -> None:
        self._client, self._connections, self._credentials = client, connections, credentials
        self._pools: dict[str, urllib3.HTTPConnectionPool] = {}
        endpoint = urlsplit(client.meta.endpoint_url)
        self._scheme, self._host, self._path = endpoint.scheme, endpoint.netloc, endpoint.path.rstrip("/")
        self._by_path = (client.meta.config.s3 or {}).get("addressing_style") == "path"
        self._region = client.meta.region_name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def get_object(self, *, Bucket: str, Key: str, Range: str | None = None) -> dict[str, Any]:
        """As boto3's; the body is read already."""
        headers = {"x-amz-checksum-mode": "ENABLED"} | ({} if Range is None else {"range": Range})
        answer = self._send("GetObject", "GET", Bucket, Key, headers, b"")
        told, found = answer.headers.get("x-amz-checksum-crc32", "-"), _crc32(answer.data)
        if answer.status == 200 and "-" not in told and told != found:  # with a "-" it is one of parts, not of this
            raise FlexibleChecksumError(error_msg=f"{Key}: the body's CRC32 is {found}, the server says {told}")
        made = {"Body": io.BytesIO(answer.data), "ContentLength": len(answer.data)}
        place = answer.headers.get("content-range")
        return made if place is None else made | {"ContentRange": place}

    def put_object(
        self,
        *,
        Bucket: str,
        Key: str,
        Body: bytes,
        IfNoneMatch: str | None = None,
        Metadata: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """As boto3's."""
        headers = {f"x-amz-meta-{name}": value for name, value in (Metadata or {}).items()}
        if IfNoneMatch is not None:
            headers["if-none-match"] = IfNoneMatch
        answer = self._send("PutObject", "PUT", Bucket, Key, headers | {"x-amz-checksum-crc32": _crc32(Body)}, Body)
        return {"ETag": answer.headers.get("etag", "")}

    def list_objects_v2(
        self, *, Bucket: str, Prefix: str, StartAfter: str | None = None, ContinuationToken: str | None = None
    ) -> dict[str, Any]:
        """As boto3's, without what the server says of the request itself."""
        asked = {"continuation-token": ContinuationToken, "encoding-type": "url", "list-type": "2", "prefix": Prefix}
        asked["start-after"] = StartAfter
        query = "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in asked.items() if value is not None)
        answer = self._send("ListObjectsV2", "GET", Bucket, None, {}, b"", query)
        return {**_page(answer.data), "ResponseMetadata": {"HTTPHeaders": {"date": answer.headers.get("date")}}}

    def _send(
        self,
        operation: str,
        method: str,
        bucket: str,
        key: str | None,
        headers: dict[str, str],
        body: bytes,
        query: str = "",
    ) -> urllib3.BaseHTTPResponse:
        """The answer with its whole body; `query` is encoded, and in order. Raises ClientError for any but 2xx, and
        botocore's errors of a connection."""
        host, path = self._host, self._path
        if self._by_path or "." in bucket:  # no certificate is good for a name with more dots
            path = f"{path}/{bucket}"
        else:
            host = f"{bucket}.{host}"
        if key is not None:
            path = f"{path}/{quote(key, safe='/~')}"
        if self._credentials is None:
            raise NoCredentialsError()
        identity, now = self._credentials.get_frozen_credentials(), datetime.now(UTC)
        path = path or "/"
        signed = sign(identity, self._region, now, method, host, path, headers, sha256(body).hexdigest(), query)
        pool = self._pools.get(host)
        if pool is None:
            pool = self._pools[host] = self._connections.connection_from_url(f"{self._scheme}://{host}")
        try:
            answer = pool.urlopen(
                method,
                f"{path}?{query}" if query else path,
                body,
                signed,
                retries=False,
                redirect=False,
                assert_same_host=False,
                decode_content=False,
            )
        except wire.ReadTimeoutError as error:
            raise ReadTimeoutError(endpoint_url=f"{self._scheme}://{host}{path}", error=error) from error
        except (wire.NewConnectionError, wire.ConnectTimeoutError) as error:
            raise EndpointConnectionError(endpoint_url=f"{self._scheme}://{host}{path}", error=error) from error
        except wire.HTTPError as error:
            raise HTTPClientError(error=error) from error
        if not 200 <= answer.status < 300:
            raise ClientError(_error(answer.status, answer.data), operation)
        return answer


def sign(
    identity: ReadOnlyCredentials,
    region: str,
    now: datetime,
    method: str,
    host: str,
    path: str,
    headers: dict[str, str],
    body_sha256: str,
    query: str = "",
) -> dict[str, str]:
    """The headers of a request with its signature (AWS's version 4, for S3). `path` and `query` are encoded, `query` is
    in order, the names of `headers` are in lower case, `now` is in UTC."""
    moment = now.strftime("%Y%m%dT%H%M%SZ")
    headers = {**headers, "host": host, "x-amz-date": moment, "x-amz-content-sha256": body_sha256}
    if identity.token:
        headers["x-amz-security-token"] = identity.token
    names = sorted(headers)
    signed = ";".join(names)
    lines = "".join(f"{name}:{headers[name].strip()}\n" for name in names)
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    digest = sha256(f"{method}\n{path}\n{query}\n{lines}\n{signed}\n{body_sha256}".encode()).hexdigest()
    told = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{digest}"
    signature = hmac.digest(_signing_key(identity.secret_key, scope), told.encode(), "sha256").hex()
    credential = f"Credential={identity.access_key}/{scope}"
    headers["authorization"] = f"AWS4-HMAC-SHA256 {credential}, SignedHeaders={signed}, Signature={signature}"
    return headers


@lru_cache(maxsize=8)
def _signing_key(secret: str, scope: str) -> bytes:
    key = b"AWS4" + secret.encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def _crc32(body: bytes) -> str:
    return b64encode(zlib.crc32(body).to_bytes(4)).decode()


def _page(body: bytes) -> dict[str, Any]:
    """A page of a listing. Raises ResponseParserError for what is none, as botocore does."""
    found: list[dict[str, Any]] = []
    page: dict[str, Any] = {}
    encoded = False
    try:
        for element in ElementTree.fromstring(body):
            name, text = _local(element), element.text or ""
            if name == "Contents":
                entry = {_local(field): field.text or "" for field in element}
                written = datetime.fromisoformat(entry["LastModified"])
                found.append({"Key": entry["Key"], "Size": int(entry["Size"]), "LastModified": written})
            elif name == "IsTruncated":
                page[name] = text == "true"
            elif name == "NextContinuationToken":
                page[name] = text
            elif name == "EncodingType":
                encoded = text == "url"
    except (ElementTree.ParseError, KeyError, ValueError) as error:
        raise ResponseParserError(f"not a listing: {error}; it begins {body[:200]!r}") from error
    if encoded:
        for entry in found:
            entry["Key"] = unquote_plus(entry["Key"])
    return page | {"Contents": found} if found else page


def _local(element: ElementTree.Element) -> str:
    """The tag's name without its namespace."""
    return element.tag.rpartition("}")[2]


def _error(status: int, body: bytes) -> dict[str, Any]:
    """The answer as botocore gives it; the code is the status where the body is not S3's."""
    word, message = _WORD.search(body), _MESSAGE.search(body)
    error = {"Code": word[1].decode(errors="replace") if word else str(status)}
    if message:
        error["Message"] = message[1].decode(errors="replace")
    return {"Error": error, "ResponseMetadata": {"HTTPStatusCode": status}}
