"""Environments of verifiers 0.4, unchanged: the library plays, scores, and asks the policy through a session of the
proxy.

    environment: verifiers
    environment_options:
      python: .venv/share/rollmill/verifiers/bin/python
      env: {taskset: {id: my_tasks}, agent: {max_turns: 8}}

`env` is what the library's own configuration calls so. A seat without a runtime runs on this machine; one without a
harness, where neither taskset nor author brings one, is played by a chat with the task's tools that executes nothing.

Invariant: an episode that the library calls failed is a failure here, and never a reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from envs.adapters.child import ChildFailed
from envs.adapters.hosts import Host
from envs.agents import AgentEnvironment, ClientInfo, Outcome
from envs.protocol import Hints, Needs
from rl.errors import ConfigError
from rl.trajectory import Message, Problem

AGENT = "envs.adapters.verifiers_host:Verifiers"


class Verifiers(AgentEnvironment):
    """The environment that `env` configures, under the interpreter `python`, which needs the library and the taskset
    and nothing of ours. Its problems are the first `tasks` of the taskset, if it has so many; one fifth is held out.

    The reward is the mean over the trained seats; `info` holds the parts of the last one."""

    hints: ClassVar[Hints] = Hints(expected_turns=4, prompt_tokens=300, response_tokens=60)
    needs: ClassVar[Needs] = Needs(memory_mb=8, processes=1)

    def __init__(self, env: dict[str, Any], python: str, tasks: int = 1000):
        taskset = env.get("taskset")
        if not (isinstance(taskset, dict) and isinstance(taskset.get("id"), str)):
            raise ValueError("env must name a taskset, as in {taskset: {id: my_tasks}}")
        if tasks < 1:
            raise ValueError(f"tasks ({tasks}) must be at least 1")
        self._python, self._options = python, {"env": env, "tasks": tasks}

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> None:
        """Make it once, for what is wrong with it. Raises ConfigError."""
        made = cls(**options)

        async def probe() -> None:
            host = made._host()
            try:
                await host.started()
            finally:
                host.retire()
                await host.ended()

        try:
            asyncio.run(probe())
        except (ChildFailed, ValueError) as error:
            raise ConfigError(f"environment_options: the library can not make it: {error}") from error

    async def reset(self, problem: Problem) -> list[Message]:
        await self._host().started()
        return await super().reset(problem)

    async def run(self, problem: Problem, client: ClientInfo) -> Outcome:
        session = {"base_url": client.base_url, "api_key": client.api_key, "model": client.model}
        found = await self._host().play(problem, session)
        return Outcome(found["reward"], found["info"])

    def _host(self) -> Host:
        return Host.of(self._python, AGENT, self._options)
