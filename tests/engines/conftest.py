"""Engines over small random models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.engines.hf import HFEngine
from tests.engines.tiny_models import save_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base"))


@pytest.fixture
async def start(base: Path) -> AsyncIterator[Callable[..., HFEngine]]:
    """Make engines that are closed at the end."""
    engines: list[HFEngine] = []

    def make(directory: Path = base, **options: Any) -> HFEngine:
        engines.append(HFEngine(directory, **{"device": "cpu", "base_version": 0, "max_batch": 8} | options))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.close()
