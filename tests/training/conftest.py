"""Fixtures of the trainer's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.training import setup
from tests.training.small import make_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random policy's directory."""
    setup.prepare_process(1)
    return make_base(tmp_path_factory.mktemp("base"))
