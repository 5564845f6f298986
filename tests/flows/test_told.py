"""What a Prefect server that is away costs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows import told
from flows.told import PrefectAway, ask, noted, run_flow
from infra.services.processes import free_port


class Server(HTTPServer):
    """Answers `status` to all, and counts."""

    def __init__(self) -> None:
        self.asked, self.status = 0, 503

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked += 1
                self.send_response(server.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        server = self
        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(told, "_away", -told.AWAY_S)
    made = Server()
    threading.Thread(target=made.serve_forever, daemon=True).start()
    try:
        yield made
    finally:
        made.shutdown()
        made.server_close()


def test_a_server_is_asked_once_and_one_that_is_gone_is_left_alone(server: Server) -> None:
    address = {PREFECT_API_URL: f"http://127.0.0.1:{server.server_port}/api"}
    calls = []

    def look() -> int:
        calls.append(1)
        client.hello()
        return 1

    with temporary_settings(address), get_client(sync_client=True) as client:
        assert PREFECT_CLIENT_MAX_RETRIES.value() > 0
        assert ask(look) is None and server.asked == 1, "no retries"
        server.status = 200
        assert ask(look) == 1
        server.shutdown()
        server.server_close()
        assert ask(look) is None and len(calls) == 3
        assert ask(look) is None and len(calls) == 3, "left alone for a while"


def test_what_a_body_ended_with_is_the_end_of_its_flow(capsys: pytest.CaptureFixture[str]) -> None:
    away = httpx.ConnectError("refused")

    def told_nothing(body: object) -> None:  # as Prefect's engine does when it can not set the last state
        try:
            body()  # type: ignore[operator]
        except ValueError:
            raise away from None
        raise away

    assert run_flow(lambda: told_nothing(noted(lambda: 7))) == 7  # type: ignore[func-returns-value]
    assert "was not told" in capsys.readouterr().err

    def fail() -> None:
        raise ValueError("of the body")

    with pytest.raises(ValueError, match="of the body"):
        run_flow(lambda: told_nothing(noted(fail)))
    with pytest.raises(PrefectAway, match="start it, and try again"):
        run_flow(lambda: told_nothing(lambda: None))


def test_a_flow_that_can_not_begin_ends_by_name() -> None:
    @flow(name="never", validate_parameters=False, persist_result=False)
    @noted
    def never() -> None:
        raise AssertionError("it began")

    nowhere = {PREFECT_API_URL: f"http://127.0.0.1:{free_port(set())}/api"}
    with temporary_settings(nowhere), pytest.raises(PrefectAway, match="does not answer, and the flow can not begin"):
        run_flow(never)
