"""Where the interpreters of other libraries are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def python_of(library: str) -> str:
    """The interpreter that has that library; the test fails where it was not built."""
    python = Path(sys.prefix) / "share" / "rollmill" / library / "bin" / "python"
    if not python.exists():
        pytest.fail(f"{library} is not installed: run `make environments`")
    return str(python)
