"""Tasks and an environment as the library verifiers wants them: a number is guessed in turns with the environment, or
read with a tool. It runs under that library's own Python."""

from __future__ import annotations

import os
from collections.abc import Iterator

import verifiers.v1 as vf

NUMBER = 7


class NumberToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "number"

    @vf.tool
    def read(self, digits: int) -> str:
        """The number, for who knows no key."""
        return f"{0 if any('ROLLMILL' in name for name in os.environ) else NUMBER:0{digits}}"


class NumberTaskConfig(vf.TaskConfig):
    tool: bool = False
    broken: bool = False


class NumberTask(vf.Task[vf.TaskData, vf.State, NumberTaskConfig]):
    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        if self.config.broken:
            raise RuntimeError("the rules are lost")
        return float(trace.num_turns <= 2)

    @classmethod
    def toolsets(cls, config: NumberTaskConfig) -> list[vf.Toolset]:
        return [NumberToolset(vf.ToolsetConfig(runtime=vf.SubprocessConfig()))] if config.tool else []


class NumberConfig(vf.TasksetConfig):
    task: NumberTaskConfig = NumberTaskConfig()


class NumberTaskset(vf.Taskset[NumberTask, NumberConfig]):
    def load(self) -> Iterator[NumberTask]:
        for at in range(20):
            data = vf.TaskData(name=f"number {at}", system_prompt="Say a number.", prompt="Guess my number, 1 to 9.")
            yield NumberTask(data, self.config.task)


class NumberEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class NumberEnv(vf.Env[NumberEnvConfig]):
    async def run(self, task: NumberTask, agents: vf.Agents) -> None:
        won = 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                said = int("".join(c for c in segment.last_reply if c.isdigit()) or 0)
                if said == NUMBER:
                    won = 1.0
                    break
                segment = await interaction.turn("higher" if said < NUMBER else "lower")
        interaction.trace.record_reward("won", won, 1.0)


__all__ = ["NumberEnv", "NumberTaskset"]

if __name__ == "__main__":
    NumberToolset.run()
