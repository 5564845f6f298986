"""The policy itself as the judge, in a session of a real proxy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from infra.engines.protocol import BASE
from infra.judge import policy_client
from rewards.judge import RUBRIC, _question, judge
from rl.config.rewards import JudgeSection
from rl.sessions import Said
from tests.proxy.agents.qwen import Lesson, save_qwen
from tests.proxy.agents.serving import serving
from tests.rewards.test_answers import view


@pytest.mark.slow
async def test_the_policy_can_be_asked_through_the_runs_proxy(tmp_path: Path) -> None:
    question = [Said(m.role, m.content) for m in _question(view("hello"), RUBRIC, 20_000)]
    model = save_qwen(tmp_path / "model", [Lesson([question], ["GRADE: 8"])])
    async with serving(model, tmp_path / "cache") as run:
        ask = policy_client(JudgeSection(max_tokens=16), run.rollout, BASE, deadline_s=60)
        assert await asyncio.to_thread(lambda: judge(view("hello"), ask=ask)) == {"judge": 0.8}
