"""A small Qwen3 that has learned to make one call and to answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proxy.agents.qwen import save_qwen
from tests.proxy.agents.serving import LESSON


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen(tmp_path_factory.mktemp("taught") / "model", [LESSON])
