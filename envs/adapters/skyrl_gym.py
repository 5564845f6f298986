"""Environments of SkyRL-Gym, unchanged, on problems from a file.

What an environment would have put in place of the policy's own words (`postprocessed_action`) is not taken: a
trajectory holds what was sampled.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from envs.adapters.translation import plain
from envs.protocol import Hints, Needs, Step, SyncEnvironment, in_split
from rl.errors import ConfigError
from rl.trajectory import Message, Problem


class SkyRLGym(SyncEnvironment):
    """The environment registered as `id`, with the configuration `options`.

    `problems` is a JSON-lines file whose rows have SkyRL's columns: `prompt`, a list of messages, and what the
    environment wants beside it (`reward_spec`, ...). The split is decided by the prompt.
    """

    hints: ClassVar[Hints] = Hints(expected_turns=3, prompt_tokens=200, response_tokens=200)
    needs: ClassVar[Needs] = Needs(memory_mb=8)

    def __init__(self, id: str, problems: str, options: dict[str, Any] | None = None):
        try:
            import skyrl_gym
        except ModuleNotFoundError as error:
            raise ConfigError("environment skyrl_gym needs its package; run `pip install skyrl-gym`") from error
        try:
            skyrl_gym.spec(id)
        except skyrl_gym.error.Error as error:
            raise ValueError(f"id ({id!r}) is not registered: {error}") from error
        if not Path(problems).is_file():
            raise ValueError(f"problems ({problems!r}) is no file")
        self._id, self._file, self._options = id, problems, options or {}
        self._env: Any = None

    def reset_sync(self, problem: Problem) -> list[Message]:
        import skyrl_gym
        from omegaconf import OmegaConf

        row = random.Random(problem.seed).choice(_rows(self._file, problem.split))
        extras = {key: value for key, value in row.items() if key != "prompt"}
        self._env = skyrl_gym.make(self._id, env_config=OmegaConf.create(self._options), extras=extras)
        prompt, _ = self._env.init(row["prompt"])
        return [Message(message["role"], message["content"]) for message in prompt]

    def step_sync(self, action: str) -> Step:
        answer = self._env.step(action)
        text = "\n".join(message["content"] for message in answer["observations"])
        ended = bool(answer["done"])
        info = plain({**(answer["metadata"] or {}), "metrics": self._env.get_metrics()})
        return Step(Message("user", text), float(answer["reward"]), ended, info=info)

    def close_sync(self) -> None:
        if self._env is not None:
            self._env.close()


@cache
def _rows(file: str, split: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in Path(file).read_text().splitlines() if line.strip()]
    mine = [row for row in rows if in_split(json.dumps(row["prompt"]), split)]
    if not mine:
        raise ConfigError(f"problems: {file} has {len(rows)} rows and none for the split {split}; add more")
    return mine
