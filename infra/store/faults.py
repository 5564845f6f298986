"""Which failures of a request may pass when it is repeated."""

from __future__ import annotations

from botocore.exceptions import ClientError, FlexibleChecksumError, HTTPClientError, IncompleteReadError
from botocore.exceptions import ConnectionError as BotoConnectionError

_PASSING = (HTTPClientError, BotoConnectionError, IncompleteReadError, FlexibleChecksumError)
_PASSING_CODES = {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "OperationAborted"}


def status(error: ClientError) -> int:
    """HTTP status of an answer; 0 when there was none."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def passes(error: Exception) -> bool:
    """Whether repeating the request may help."""
    if isinstance(error, ClientError):
        return status(error) >= 500 or status(error) == 429 or error.response["Error"]["Code"] in _PASSING_CODES
    return isinstance(error, _PASSING)


def unsettled(error: Exception) -> bool:
    """The same for a conditional create: also a conflict with one in flight (409), and a winner that is gone,
    or not yet to be seen, when it is looked at (404 of an object)."""
    if isinstance(error, ClientError) and error.response["Error"]["Code"] != "NoSuchBucket":
        return passes(error) or status(error) in (404, 409)
    return passes(error)
