"""A whole run whose policy is an agent's model: nothing of the agent knows that it is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.chat import ChatCodec
from infra.store.browse import Browser, State, fates
from rl.records import Step
from tests.command_line import Rollmill
from tests.proxy.agents.qwen import save_qwen
from tests.proxy.agents.serving import LESSON

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.full]


def test_an_agent_is_trained_through_openais_api(rollmill: Rollmill, tmp_path: Path) -> None:
    model = save_qwen(tmp_path / "model", [LESSON], steps=70)
    config = {
        "name": "agent",
        "model": {"source": {"type": "pretrained", "path": str(model)}},
        "domains": [
            {
                "name": "adder",
                "environment": "agent",
                "environment_options": {"function": "tests.proxy.agents.solver:solve"},
                "max_turns": 4,
            }
        ],
        "rollout": {"max_new_tokens": 48, "max_tokens": 512},
        "training": {"steps": 2, "groups_per_step": 2, "group_size": 4, "learning_rate": 1e-4},
        "evaluation": {"problems": 0},
        "engine": {"max_batch": 16},
        "pools": {"type": "local", "cpu": 16, "lambda": 2},
        "deadlines": {"start": 600, "control": 600},
    }
    file = tmp_path / "agent.json"
    file.write_text(json.dumps(config))
    code, output = rollmill("train", str(file))
    assert code == 0, output
    log = rollmill.log("agent")
    records = list(log.records(1))
    steps = [record for record in records if isinstance(record, Step)]
    assert [step.version for step in steps] == [0, 1, 2]
    assert steps[1].metrics["fresh_gap_max"] < 1e-3, "the trainer sees other tokens than the engine did"
    browser = Browser(log.store, rollmill.config("agent").prefix, fates(records))
    trained = [sample for sample in browser.samples() if sample.fate.state is State.TRAINED]
    assert all(step.trained for step in steps[1:])
    assert len(trained) == sum(len(step.trained) for step in steps), "groups without signal are left out"
    codec = ChatCodec.from_directory(model)
    for member in (member for sample in trained for member in sample.group.members):
        member.check()
        said = [m.content for m in member.messages if m.role == "assistant"]
        assert member.turns == len(said) and member.reward == member.environment_reward
        assert list(member.token_ids[: member.prompt_length]) == codec.conversation(LESSON.messages[0], LESSON.tools)
    assert any(m.turns == 2 and m.info["called"] for sample in trained for m in sample.group.members)
