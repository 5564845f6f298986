"""The traffic of `benchmarks.proxy`: multi-turn trajectories, the same whoever answers them.

Invariants: nothing depends on the model's answers but the history sent back (turns have a fixed length, and no token
stops one), so that both sides of a comparison generate equally many tokens; prompts are a function of the seed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from infra.engines.protocol import BASE, Generation, Sampling

Generate = Callable[[Sequence[int], Sampling, str, str], Awaitable[Generation]]
"""As `Engine.generate`: tokens, sampling, tenant, request."""


@dataclass(frozen=True)
class Shape:
    """Of every trajectory."""

    prompt: int
    """Tokens of the opening."""
    turns: int
    answer: int
    """Tokens that the model generates in each turn."""
    observation: int
    """Tokens that the environment adds after it."""
    vocabulary: int = 100


@dataclass
class Traffic:
    """What came of it."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    """Of the process that drove it."""
    tokens: int = 0
    latencies: list[float] = field(default_factory=list)


async def drive(
    generate: Generate, shape: Shape, seed: int, trajectories: int, at_once: int, tenants: Sequence[str] = (BASE,)
) -> Traffic:
    """Play the trajectories, `at_once` of them at any time; the tenants take turns."""
    found, numbers = Traffic(), count()
    begin, cpu = time.perf_counter(), time.process_time()

    async def play() -> None:
        while (number := next(numbers)) < trajectories:
            draw = random.Random(seed * 1_000_003 + number)
            history = [draw.randrange(4, shape.vocabulary) for _ in range(shape.prompt)]
            sampling = Sampling(1.0, shape.answer, (), None)
            for turn in range(shape.turns):
                start = time.perf_counter()
                answer = await generate(history, sampling, tenants[number % len(tenants)], f"{seed}.{number}-{turn}")
                found.latencies.append(time.perf_counter() - start)
                found.tokens += len(answer.token_ids)
                history += answer.token_ids
                history += [draw.randrange(4, shape.vocabulary) for _ in range(shape.observation)]

    await asyncio.gather(*(play() for _ in range(at_once)))
    found.seconds, found.cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    return found
