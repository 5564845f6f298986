"""Episodes of verifiers 0.4, in a process of its own (`envs.adapters.hosted`): the library's environments, tasks and
scoring as they are, with their model calls sent to one session of our proxy for each episode.

Invariants
- An episode that the library calls failed is an exception, never a reward.
- A session's key is known to one episode's client only; what the library starts does not inherit it.
- Seats that nobody gave a program are played by `Chat`, in this process, which executes nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
from contextlib import AsyncExitStack
from functools import cache
from itertools import count, islice
from typing import Any

import verifiers.v1 as vf
from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient, omit
from verifiers.v1.configs.env import default_agent_harness
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import bound_tool_message, is_context_overflow
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.utils.loaders import env_config_type, environment_class

from envs.protocol import in_split
from rl.trajectory import Problem

CHAT = "rollmill_chat"
"""What the library finds `Chat` by, as if it were a package."""
CALL_RETRIES = 5
"""Of a model call that meets a full or restarting proxy."""
_DENIED = re.compile(r"code\W+max_(turns|tokens)\b")
"""In what a session says that has no turns or tokens left, however often it was quoted on its way."""
RENEWED = 64
"""Episodes after which the library's servers are made anew: they keep a connection pool for every key they ever had."""


class VerifiersFailed(Exception):
    """An episode failed by the library's own account."""


class ChatConfig(vf.HarnessConfig):
    """Of `Chat`."""


class Chat(vf.Harness[ChatConfig]):
    """The model talks and calls the task's tools, until it says something without a call. The library's own program
    for this starts a process for each turn of a user, which takes seconds, and wants `uv` and a network."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        said = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or ()
        messages += map(message_to_wire, said)
        served = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        model = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=CALL_RETRIES, http_client=_connections())
        async with AsyncExitStack() as stack:
            tools, known, servers = await connect_mcp({"mcpServers": served}, stack)
            while True:
                try:
                    done = await model.chat.completions.create(
                        model=ctx.model, messages=messages, tools=tools or omit
                    )
                except APIStatusError as error:
                    if is_context_overflow(error) or _DENIED.search(str(error)):
                        break  # no further turn: what was said so far is scored
                    raise
                answered = done.choices[0].message
                messages.append(answered.model_dump(exclude_none=True))
                if not answered.tool_calls:
                    break
                call: Any
                for call in answered.tool_calls:
                    content = await self._answer(call, known, servers)
                    answer = {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": content}
                    messages.append(bound_tool_message(answer))
        return vf.ProgramResult(0, "", "")

    async def _answer(self, call: Any, known: dict[str, Any], servers: dict[str, Any]) -> Any:
        name = call.function.name
        if name not in known:
            return f"error: {name!r} is none of {', '.join(known) or 'no tools'}"
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except ValueError as error:
            return f"error: the arguments are not JSON: {error}"
        if not isinstance(arguments, dict):
            return "error: the arguments are not an object"
        return await call_mcp(servers, known, name, arguments)


@cache
def _connections() -> Any:
    """To the library's own server on loopback; whoever waits for an episode has the deadline."""
    return DefaultAsyncHttpxClient(timeout=None, trust_env=False)


class Serving:
    """The environment with its servers, for a number of episodes. They start and end in one task."""

    def __init__(self, make: Any):
        self.env = make()
        self.started = self.playing = 0
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wanted = asyncio.Event()
        self._task = asyncio.create_task(self._serve())

    async def opened(self) -> None:
        """Until it may be played on. Raises what kept it from that."""
        await asyncio.shield(self._opened)

    async def close(self) -> None:
        self._wanted.set()
        await self._task

    async def _serve(self) -> None:
        try:
            async with self.env.serving():
                self._opened.set_result(None)
                await self._wanted.wait()
        except Exception as error:
            if self._opened.done():
                raise
            self._opened.set_exception(error)


class Verifiers:
    """One environment of the library, `env` being its configuration there; the first `tasks` of an endless taskset
    are its problems."""

    def __init__(self, env: dict[str, Any], tasks: int):
        id, taskset = env.get("id", ""), env["taskset"]["id"]
        config = env_config_type(taskset, id).model_validate(seated(env))
        self._make = lambda: environment_class(taskset, id)(config)
        found = list(islice(self._make().taskset, tasks))
        self._tasks = {
            split: [task for at, task in enumerate(found) if in_split(at, split)] for split in ("train", "heldout")
        }
        self._numbers = count()

    async def __aenter__(self) -> Verifiers:
        self._serving = Serving(self._make)
        self._old: set[Serving] = set()
        await self._serving.opened()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await asyncio.gather(*(serving.close() for serving in (self._serving, *self._old)))

    async def play(self, problem: Problem, client: dict[str, Any]) -> dict[str, Any]:
        """One episode: `reward` and `info`. Raises VerifiersFailed."""
        tasks = self._tasks[problem.split]
        if not tasks:
            raise VerifiersFailed(f"the taskset has no tasks for the split {problem.split!r}; it needs more of them")
        task = tasks[random.Random(problem.seed).randrange(len(tasks))]
        if self._serving.started == RENEWED:
            self._old.add(self._serving)
            self._serving = Serving(self._make)
        serving = self._serving
        serving.started += 1
        serving.playing += 1
        key = f"ROLLMILL_API_KEY_{next(self._numbers)}"  # of a name that the library hands on to no process
        os.environ[key] = client["api_key"]
        try:
            await serving.opened()
            endpoint = vf.EvalClientConfig(base_url=client["base_url"], api_key_var=key)
            episode = await serving.env.run_episode(task, vf.ModelContext(client["model"], endpoint))
        finally:
            del os.environ[key]
            serving.playing -= 1
            if not serving.playing and serving in self._old:
                self._old.discard(serving)
                await serving.close()
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise VerifiersFailed("; ".join(f"{e.type}: {e.message}" for e in errors)[:2000] or "no reason was given")
        return outcome(episode)


def outcome(episode: vf.Episode) -> dict[str, Any]:
    """What the traces of the trained seats add up to: the mean of their rewards, the last one's parts."""
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if not traces:
        raise VerifiersFailed("no seat of the episode is trained")
    last = traces[-1]
    info = {
        "rewards": {name: reward.value for name, reward in last.rewards.items() if reward is not None},
        "metrics": {name: value for name, value in last.metrics.items() if value is not None},
        "stop": last.stop_condition,
        "truncated": any(trace.is_truncated for trace in traces),
        "task": episode.task.data.name or episode.task.data.idx,
    }
    reward = sum(trace.reward for trace in traces) / len(traces)
    return {"reward": float(reward), "info": info}


def seated(env: dict[str, Any]) -> dict[str, Any]:
    """The configuration with a place and a program for each seat that has none: this machine, and there `Chat`. What
    the taskset's author or the given configuration chose stays."""
    taskset, filled = env["taskset"]["id"], dict(env)
    bundled = default_agent_harness(taskset).id != "bash"
    for name, field in env_config_type(taskset, env.get("id", "")).model_fields.items():
        if isinstance(author := field.default, vf.AgentConfig):
            seat = dict(filled.get(name) or {})
            if "runtime" not in author.model_fields_set:
                seat.setdefault("runtime", {"type": "subprocess"})
            place = seat["runtime"]["type"] if "runtime" in seat else author.runtime.type
            if place == "subprocess" and author.harness is None and not bundled:
                seat.setdefault("harness", {"id": CHAT})
            filled[name] = seat
    return filled


__all__ = ["Chat"]
sys.modules[CHAT] = sys.modules[__name__]
