"""The whole process against a real S3 server, in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time

import pytest

from infra.engines.protocol import BASE, Sampling
from infra.proxy.auth import Keys
from infra.proxy.client import ControlClient, ProxyClient
from infra.proxy.listen import PortInUse
from infra.proxy.serve import serve
from infra.store.directories import push_directory
from infra.store.objects import ObjectStore
from rl.errors import RollmillError
from tests.proxy.conftest import Trainer, make_config

pytestmark = pytest.mark.server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until_served(control: ControlClient) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            if control.status(deadline_s=1.0).serving is not None:
                return
        except RollmillError:
            if time.monotonic() > end:
                raise
        time.sleep(0.05)


def test_serves_in_any_thread_until_it_is_stopped(s3, models, monkeypatch, tmp_path):
    for name, value in (("AWS_ACCESS_KEY_ID", s3.access_key), ("AWS_SECRET_ACCESS_KEY", s3.secret_key)):
        monkeypatch.setenv(name, value)
    config = make_config(name="serve", store={"bucket": s3.bucket, "endpoint_url": s3.endpoint_url})
    store = ObjectStore.connect(config.store)
    store.ensure_bucket()
    push_directory(store, f"{config.prefix}base/", models[0])
    Trainer(store, config).publish(models[1])
    port, stop = free_port(), threading.Event()
    url = f"http://127.0.0.1:{port}"
    keys = Keys.random()
    thread = threading.Thread(target=serve, args=(config, "127.0.0.1", port, tmp_path, stop, keys))
    thread.start()
    try:
        until_served(ControlClient(url, 5.0, key=keys.control))
        with pytest.raises(RollmillError, match="needs a key"):
            ControlClient(url, 5.0).status()
        with pytest.raises(RollmillError, match="not for the role rollout"):
            ControlClient(url, 5.0, fence=1, key=keys.rollout).suspend()
        assert [path.name for path in tmp_path.iterdir()] == [f"proxy-{os.getpid()}"]

        async def one() -> int:
            client = ProxyClient(url, keys.rollout)
            try:
                result = await client.generate(
                    trajectory="t",
                    request="r",
                    tenant=BASE,
                    token_ids=[1, 2],
                    sampling=Sampling(1.0, 5, ()),
                    start_version=0,
                    deadline_s=20,
                )
                return len(result.token_ids)
            finally:
                await client.close()

        assert asyncio.run(one()) == 5
        with pytest.raises(PortInUse, match=f"port {port} of 127.0.0.1 is in use"):
            serve(config, "127.0.0.1", port, tmp_path, threading.Event())
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive() and not list(tmp_path.iterdir())
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
