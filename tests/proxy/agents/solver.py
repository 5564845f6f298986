"""An agent for a run: a loop of tool calls as any harness has it, with a reward for coming close."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import Any

from openai import AsyncOpenAI

from envs.agents import ClientInfo, Outcome
from rl.trajectory import Problem
from tests.proxy.agents.words import ADD, ANSWER, QUESTION


async def solve(problem: Problem, client: ClientInfo) -> Outcome:
    """Ask, add up what the policy asks to add up, and compare its answer."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as agent:
        for _ in range(2):
            reply = await agent.chat.completions.create(model=client.model, messages=messages, tools=[ADD])
            said = reply.choices[0].message
            messages.append(said)
            if not said.tool_calls:
                break
            for call in said.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
    close = SequenceMatcher(None, said.content or "", ANSWER).ratio()
    return Outcome(close, {"called": any(m["role"] == "tool" for m in messages if isinstance(m, dict))})
