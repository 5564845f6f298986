"""Engines over small random models. What every engine must do is tried on `engine`: the embedded one, and a vLLM server
that all tests of a session share."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.engines.hf import HFEngine
from infra.engines.protocol import Engine
from infra.engines.vllm import VLLMEngine
from infra.engines.vllm_server import VLLMServer
from infra.services.processes import free_port
from tests.engines.tiny_models import save_model

torch.set_num_threads(1)

ADAPTERS, RANK = 3, 8


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def two_models(tmp_path_factory: pytest.TempPathFactory, base: Path) -> list[Path]:
    return [base, save_model(tmp_path_factory.mktemp("second"), seed=21)]


@pytest.fixture
async def start(base: Path) -> AsyncIterator[Callable[..., HFEngine]]:
    """Make embedded engines that are closed at the end."""
    engines: list[HFEngine] = []

    def make(directory: Path = base, **options: Any) -> HFEngine:
        engines.append(HFEngine(directory, **{"device": "cpu", "base_version": 0, "max_batch": 8} | options))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.close()


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Iterator[VLLMServer]:
    """A minute to start. Mark the test `slow`."""
    server = VLLMServer(
        base,
        home=tmp_path_factory.mktemp("vllm"),
        port=free_port(set()),
        key=secrets.token_urlsafe(16),
        max_loras=ADAPTERS,
        max_lora_rank=RANK,
        max_num_seqs=16,
    )
    with server:
        server.wait_ready()
        yield server


@pytest.fixture(params=["hf", pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
async def engine(
    request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Engine]:
    """An engine that serves `base` as version 0."""
    if request.param == "hf":
        embedded = HFEngine(base, device="cpu", base_version=0, max_batch=8)
        yield embedded
        await embedded.close()
        return
    server = request.getfixturevalue("vllm_server")
    if not server.alive:
        server.start()
        server.wait_ready()
    remote = VLLMEngine(
        server.url,
        server.key,
        model_dir=base,
        staging=tmp_path_factory.mktemp("staging"),
        max_adapters=ADAPTERS,
        max_rank=RANK,
    )
    await remote.start()
    await remote.update_weights(0, base)  # the test before may have left others
    yield remote
    await remote.close()
