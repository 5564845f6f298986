"""The lease of a run: whoever follows it ends when it is given up, and when its holder is gone."""

import threading

from distributed import Variable

from infra.compute import signals
from infra.compute.signals import follow, wanted


def test_followers_go_on_while_the_run_is_wanted_and_end_when_it_is_not(client):
    stop = threading.Event()
    with wanted(client, "a"), follow("a", stop, client.scheduler.address):
        assert not stop.wait(2 * signals.LOOK_S + 0.5)
        with wanted(client, "b"):
            pass  # another run's end is no business of this one
        assert not stop.is_set()
    assert stop.wait(10)


def test_a_lease_that_nobody_renews_ends_its_followers(client, monkeypatch):
    monkeypatch.setattr(signals, "LEASE_S", 1.5)
    Variable("rollmill-lease-dead", client=client).set(7)  # what a driver leaves behind that was killed
    stop = threading.Event()
    with follow("dead", stop, client.scheduler.address):
        assert stop.wait(20)


def test_a_scheduler_that_is_gone_ends_the_followers(monkeypatch):
    monkeypatch.setattr(signals, "LEASE_S", 0.5)
    stop = threading.Event()
    with follow("any", stop, "tcp://127.0.0.1:9"):
        assert stop.wait(20)


def test_all_that_follow_one_run_share_one_watch_and_may_leave_and_come_again(client):
    first, second, third = (threading.Event() for _ in range(3))
    address = client.scheduler.address

    def watching() -> int:
        return sum(thread.name == "follow-shared" for thread in threading.enumerate())

    with wanted(client, "shared"):
        with follow("shared", first, address):
            with follow("shared", second, address):
                assert watching() == 1
            assert second.is_set() and not first.is_set()
        with follow("shared", third, address):
            assert not third.wait(2 * signals.LOOK_S)
            late = follow("shared", first, address)
            first.clear()
            late.__enter__()
    assert first.wait(10)
    late.__exit__(None, None, None)
