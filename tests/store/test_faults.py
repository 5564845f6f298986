"""Every way in which a request can fail, over a real connection: what is repeated, and how a final one is named."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from infra.store import clients
from infra.store.errors import (
    BucketMissing,
    NotFound,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreNotAtomic,
    StoreUnavailable,
)
from infra.store.objects import ObjectStore
from rl.config.infrastructure import StoreSection

BODY = b"0123456789"
LISTING = b'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>'


class Request(http.server.BaseHTTPRequestHandler):
    """A well-behaved S3 for one object, but for the faults that its server has in store."""

    protocol_version = "HTTP/1.1"
    server: Server

    def handle_request(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append(f"{self.command} {self.path}")
        (self.server.faults.pop(0) if self.server.faults else well)(self)

    do_GET = do_PUT = do_HEAD = do_POST = handle_request

    def answer(self, status: int, body: bytes = b"", length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.close_connection = length is not None

    def log_message(self, *_: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.faults: list[Fault] = []
        self.asked: list[str] = []
        self.ending = threading.Event()


Fault = Callable[[Request], None]


def well(request: Request) -> None:
    if request.command == "GET" and "list-type" in request.path:
        request.answer(200, LISTING)
    elif request.command == "GET" and (asked := request.headers.get("Range")):
        first, last = (int(n) for n in asked.removeprefix("bytes=").split("-"))
        piece = BODY[first : last + 1]
        request.answer(206, piece, Content_Range=f"bytes {first}-{first + len(piece) - 1}/{len(BODY)}")
    elif request.command == "GET":
        request.answer(200, BODY)
    else:
        request.answer(200)


def s3(status: int, code: str) -> Fault:
    """An error as S3 sends it."""
    return lambda r: r.answer(status, f'<?xml version="1.0"?><Error><Code>{code}</Code></Error>'.encode())


def says(status: int, body: bytes = b"", length: int | None = None, **headers: str) -> Fault:
    return lambda request: request.answer(status, body, length, **headers)


def hangs_up(request: Request) -> None:
    request.close_connection = True


def is_silent(request: Request) -> None:
    request.server.ending.wait(timeout=2)
    request.close_connection = True


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield made
    finally:
        made.ending.set()
        made.shutdown()
        thread.join()
        made.server_close()


@pytest.fixture
def server(running: Server) -> Server:
    running.faults, running.asked = [], []
    return running


@pytest.fixture(scope="module")
def store(running: Server) -> ObjectStore:
    section = StoreSection(endpoint_url=f"http://127.0.0.1:{running.server_port}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "anyone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
        patch.setattr(clients, "READ_TIMEOUT_S", 0.5)
        return ObjectStore(clients.client(section), section.bucket, pause=lambda seconds: None)


def hurried(store: ObjectStore) -> ObjectStore:
    """The same, for which the deadline passes with the third request."""
    ticks = iter(range(100))
    return ObjectStore(store.client, store.bucket, 3.0, clock=lambda: float(next(ticks)), pause=lambda seconds: None)


@dataclass
class Row:
    """What becomes of a fault in a GET, a PUT and a create: None when it is repeated, else the error's name."""

    fault: Fault
    get: type[StoreError] | None = None
    put: type[StoreError] | None = None
    create: type[StoreError] | None = None
    says: str = field(default="")

    @classmethod
    def final(cls, fault: Fault, name: type[StoreError], says: str = "") -> Row:
        return cls(fault, name, name, name, says)


HTML = b"<html><body>no such page</body></html>"
ROWS = {
    "internal": Row(s3(500, "InternalError")),
    "slow-down": Row(s3(503, "SlowDown")),
    "gateway-html": Row(says(502, HTML)),
    "gateway-timeout": Row(says(504)),
    "garbled-error": Row(says(500, b"<Error><Code>Inter")),
    "too-many": Row(says(429)),
    "request-timeout": Row(s3(400, "RequestTimeout")),
    "timeout-408": Row(says(408)),
    "damaged-on-the-way": Row(s3(400, "BadDigest")),
    "proxys-404": Row(says(404, HTML)),
    "aborted": Row(s3(409, "OperationAborted")),
    "hangs-up": Row(hangs_up),
    "silent": Row(is_silent),
    "full": Row(s3(507, "InsufficientStorage")),
    "conflict": Row(s3(409, "ConditionalRequestConflict"), StoreError, StoreError, None),
    "gone": Row(s3(404, "NoSuchKey"), NotFound, NotFound, None),
    "unknown-method": Row(s3(501, "NotImplemented"), StoreError, StoreError, StoreNotAtomic),
    "bad-request": Row.final(s3(400, "InvalidArgument"), StoreError, "InvalidArgument"),
    "clock": Row.final(s3(403, "RequestTimeTooSkewed"), StoreDenied, "clock"),
    "denied": Row.final(s3(403, "AccessDenied"), StoreDenied, "AWS_ACCESS_KEY_ID"),
    "unauthorised": Row.final(says(401), StoreDenied, "AWS_ACCESS_KEY_ID"),
    "no-bucket": Row.final(s3(404, "NoSuchBucket"), BucketMissing, "store.bucket"),
    "moved": Row.final(s3(301, "PermanentRedirect"), StoreError, "store.endpoint_url"),
    "moved-for-now": Row.final(s3(307, "TemporaryRedirect"), StoreError, "store.endpoint_url"),
    "other-region": Row.final(s3(400, "AuthorizationHeaderMalformed"), StoreError, "store.region"),
}


@pytest.mark.parametrize("operation", ["get", "put", "create"])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_fault_is_repeated_or_named(server: Server, store: ObjectStore, row: Row, operation: str) -> None:
    requests: dict[str, Callable[[], object]] = {
        "get": lambda: store.get("k"),
        "put": lambda: store.put("k", b"v"),
        "create": lambda: store.create("k", b"v", "nonce"),
    }
    server.faults = [row.fault]
    name = getattr(row, operation)
    if name is None:
        assert requests[operation]() in (BODY, None, True)
        assert len(server.asked) == 2
    else:
        with pytest.raises(name) as raised:
            requests[operation]()
        assert type(raised.value) is name and row.says in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "fault",
    [
        says(200, BODY[:4], length=len(BODY)),
        says(200, BODY, x_amz_checksum_crc32="AAAAAA=="),
    ],
    ids=["cut-short", "damaged"],
)
def test_a_body_that_is_not_whole_is_read_again(server: Server, store: ObjectStore, fault: Fault) -> None:
    server.faults = [fault]
    assert store.get("k") == BODY
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("fault", "requests"),
    [
        (says(200, BODY), 1),
        (says(206, BODY[2:5], Content_Range="bytes 2-4/10"), 2),
        (says(206, BODY[3:7], Content_Range="bytes 3-6/10"), 2),
        (says(206, BODY[2:6], Content_Range="bytes */10"), 2),
        (says(206, BODY[2:4], Content_Range="bytes 2-5/10"), 2),
    ],
    ids=["the-whole", "too-little", "another", "none", "less-than-it-says"],
)
def test_a_range_is_the_range_asked_for(server: Server, store: ObjectStore, fault: Fault, requests: int) -> None:
    server.faults = [fault]
    assert store.get_range("k", 2, 4) == BODY[2:6]
    assert len(server.asked) == requests


def test_a_range_may_reach_past_the_end(server: Server, store: ObjectStore) -> None:
    assert store.get_range("k", 8, 4) == BODY[8:]
    server.faults = [s3(416, "InvalidRange")]
    assert store.get_range("k", 20, 4) == b""
    assert len(server.asked) == 2


@pytest.mark.parametrize("body", [b"", LISTING[:-9], HTML, b"\x00\xff"], ids=["empty", "cut", "html", "noise"])
def test_a_listing_that_can_not_be_read_is_asked_again(server: Server, store: ObjectStore, body: bytes) -> None:
    server.faults = [says(200, body)]
    assert list(store.keys("p/")) == []
    assert len(server.asked) == 2


@pytest.mark.parametrize("fault", [s3(500, "InternalError"), s3(507, "InsufficientStorage")], ids=["500", "507"])
def test_writes_that_go_on_failing_while_reads_do_not_mean_a_full_disk(
    server: Server, store: ObjectStore, fault: Fault
) -> None:
    server.faults = [fault] * 3
    with pytest.raises(StoreFull, match="more space"):
        hurried(store).create("k", b"v", "nonce")


def test_a_server_that_fails_reads_too_is_not_called_full(server: Server, store: ObjectStore) -> None:
    server.faults = [s3(500, "InternalError")] * 1000
    with pytest.raises(StoreUnavailable) as raised:
        hurried(store).put("k", b"v")
    assert type(raised.value) is StoreUnavailable
