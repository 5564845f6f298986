"""A well-known library of agents, unmodified and under its own interpreter, against the proxy."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from rl.sessions import Said, chosen
from tests.proxy.agents.qwen import Lesson, save_qwen
from tests.proxy.agents.serving import serving
from tests.proxy.agents.words import ANSWER, CALL, QUESTION

pytestmark = pytest.mark.slow

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "properties": {"a": {"title": "A", "type": "integer"}, "b": {"title": "B", "type": "integer"}},
            "required": ["a", "b"],
            "title": "add_args",
            "type": "object",
            "additionalProperties": False,
        },
        "strict": True,
    },
}
"""As the library describes the function."""
ASKED = [Said("system", "Use the tool."), Said("user", QUESTION)]
LESSON = Lesson([ASKED, [Said("tool", "5")]], [CALL, ANSWER], [TOOL])


async def test_an_agent_of_openai_agents_is_recorded_without_drift(tmp_path: Path) -> None:
    python = Path(sys.prefix) / "share" / "rollmill" / "openai_agents" / "bin" / "python"
    if not python.exists():
        pytest.fail("openai-agents is not installed: run `make agents`")
    model = save_qwen(tmp_path / "model", [LESSON])
    async with serving(model, tmp_path / "proxy") as run:
        opened = await run.open()
        script = Path(__file__).parent / "openai_agents.py"
        process = await asyncio.create_subprocess_exec(
            str(python), "-I", str(script), opened.base_url, opened.token, opened.model, stdout=-1, stderr=-1
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), 120)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, err.decode()
        assert out.decode() == f"[(2, 3)] {ANSWER}\n"
        record = await run.close(opened)
    assert record.drift == {} and len(chosen(record.turns)) == len(record.turns) == 2
