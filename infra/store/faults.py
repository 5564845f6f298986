"""What a failed request means: it may pass when repeated, or it is final and has a name.

    may pass   408, 429, 5xx but 501; a connection refused, reset or silent; a body that is cut short, does not match
               its checksum or is no XML; a range answer of another range; a 404 that is not S3's own (a proxy's)
    final      301, 307: another endpoint or region; 400; 401, 403: credentials or clock; 404; 409; 416; 501
    at a conditional create, moreover: 409 and 404 may pass; 412 is an answer; 501 is StoreNotAtomic
"""

from __future__ import annotations

import re

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.parsers import ResponseParserError

from infra.store.errors import BucketMissing, NotFound, StoreDenied, StoreError, StoreFull, StoreNotAtomic


class Garbled(BotoCoreError):
    """An answer that is not what was asked for."""

    fmt = "the answer is not what was asked for: {reason}"


FAULTS = (BotoCoreError, ClientError, ResponseParserError)
"""All that a request may raise."""
_PASSING = (
    HTTPClientError,
    BotoConnectionError,
    IncompleteReadError,
    FlexibleChecksumError,
    ResponseParserError,
    Garbled,
)
_PASSING_CODES = {
    *("SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "OperationAborted"),
    *("BadDigest", "IncompleteBody", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"),  # cut on the way
}
_DENIED_CODES = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
_CLOCK_CODES = {"RequestTimeTooSkewed", "RequestExpired"}
_FULL_CODES = {"XMinioStorageFull", "QuotaExceeded", "InsufficientStorage"}
_PLACE_CODES = {"PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraint"}
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


def status(error: Exception) -> int:
    """HTTP status of an answer; 0 when there was none."""
    if not isinstance(error, ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code(error: Exception) -> str:
    """S3's word for an error, or the status as text where S3 sends no body; "" when the answer is not S3's."""
    return str(error.response["Error"].get("Code", "")) if isinstance(error, ClientError) else ""


def passes(error: Exception) -> bool:
    """Whether repeating the request may help."""
    if not isinstance(error, ClientError):
        return isinstance(error, _PASSING)
    number = status(error)
    if number == 501:
        return False
    if number == 404:
        # The answer to a HEAD has no body, so no reason either; any other without S3's reason is a proxy's.
        return code(error) in ("", "404") and not error.operation_name.startswith("Head")
    return number >= 500 or number in (408, 429) or code(error) in _PASSING_CODES


def unsettled(error: Exception) -> bool:
    """The same for a conditional create: also a conflict with one in flight (409), and a winner that is gone,
    or not yet to be seen, when it is looked at (404 of an object)."""
    return passes(error) or (status(error) in (404, 409) and code(error) != "NoSuchBucket")


def full(error: Exception) -> bool:
    """Whether the server says that it has no space left."""
    return status(error) == 507 or code(error) in _FULL_CODES


def piece(body: bytes, content_range: str | None, start: int, length: int) -> bytes:
    """The `length` bytes from `start`, fewer where the object ends before, out of the answer to a range request.

    Raises Garbled for another range, or for one that is not whole."""
    if content_range is None:  # the server sent the whole object, as it may
        return body[start : start + length]
    match = _CONTENT_RANGE.fullmatch(content_range)
    if match is None:
        raise Garbled(reason=f"Content-Range {content_range!r}")
    first, last, total = int(match[1]), int(match[2]), match[3]
    wanted = start + length - 1 if total == "*" else min(start + length, int(total)) - 1
    if (first, last) != (start, wanted) or len(body) != last - first + 1:
        raise Garbled(reason=f"{len(body)} bytes as {content_range!r} for bytes {start}-{start + length - 1}")
    return body


def page(answer: dict) -> dict:
    """The answer to a listing. Raises Garbled for one that does not say whether there is more, such as an empty one:
    it would read as "nothing there"."""
    if "IsTruncated" not in answer:
        raise Garbled(reason="a listing without IsTruncated")
    return answer


def named(error: Exception, where: str, what: str, bucket: str) -> StoreError:
    """The named error for a fault that does not pass. `what` is the request: its method and key."""
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return StoreDenied(f"{where}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if not isinstance(error, ClientError):
        return StoreError(f"{where}: {what}: {error}")
    number, word = status(error), code(error)
    if word == "NoSuchBucket" or (number == 404 and what == "HEAD (bucket)"):
        return BucketMissing(f"{where}: the bucket does not exist; create it, or correct store.bucket")
    if number == 404:
        return NotFound(bucket, what.split(" ", 1)[-1])
    if full(error):
        return StoreFull(f"{where}: {what}: {word}; {FREE}")
    if word in _CLOCK_CODES:
        return StoreDenied(f"{where}: {what}: {word}; this machine's clock and the server's differ: set them")
    if number in (401, 403) or word in _DENIED_CODES:
        return StoreDenied(f"{where}: {what}: {word}; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    said = f"{where}: {what}: {number} {word}: {error.response['Error'].get('Message', '')}"
    if number in (301, 302, 307, 308) or word in _PLACE_CODES:
        return StoreError(f"{said}; the bucket is elsewhere: correct store.endpoint_url or store.region")
    return StoreError(said)


def not_atomic(error: Exception, where: str) -> StoreNotAtomic:
    """For a server that answers a conditional create by saying that it does not know such a thing."""
    return StoreNotAtomic(f"{where}: refuses create-if-absent ({error}); use another S3 server")


FREE = "give the server more space, then go on: nothing acknowledged is lost"
"""The mend of StoreFull."""
