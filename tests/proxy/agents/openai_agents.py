"""An agent made with the library openai-agents, as its documentation has it; run by the library's own interpreter:

    python openai_agents.py BASE_URL API_KEY MODEL
"""

from __future__ import annotations

import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

CALLS = []


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    CALLS.append((a, b))
    return a + b


def main() -> None:
    base_url, api_key, model = sys.argv[1:]
    set_tracing_disabled(True)
    served = OpenAIChatCompletionsModel(model, AsyncOpenAI(base_url=base_url, api_key=api_key))
    agent = Agent(name="calculator", instructions="Use the tool.", tools=[add], model=served)
    result = Runner.run_sync(agent, "What is 2 and 3?")
    print(CALLS, result.final_output)


if __name__ == "__main__":
    main()
