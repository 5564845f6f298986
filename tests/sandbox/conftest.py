"""The sandbox under test. A Linux machine that can not have it fails these tests, and says how to mend that: code
that nobody tried to break out of must not run. Elsewhere there is nothing to test."""

from __future__ import annotations

import sys

import pytest

from infra.sandbox.limits import Limits
from infra.sandbox.sandbox import Sandbox

LIMITS = Limits(
    seconds=4, cpu_seconds=2, memory_mb=128, processes=8, disk_mb=4, disk_files=256, file_mb=2, output_kb=16
)


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    if sys.platform != "linux":
        pytest.skip("the full sandbox needs Linux")
    return Sandbox(LIMITS)
