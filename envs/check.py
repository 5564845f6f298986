"""Examines an environment from outside: does it keep the promises of `envs.protocol`?

Invariants
- Every check ends, within `DEADLINE_S` each, whatever the environment does; what it raises is a finding.
- What passes says what was seen, what fails also says the mend.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import fmean
from time import perf_counter

import psutil

from envs.calls import Overdue, bounded
from envs.episodes import Episode, Say, act, at_random, expert, open_episode, play
from envs.protocol import Environment
from envs.threads import in_daemon
from rl.stream import derive_seed
from rl.trajectory import Problem

DEADLINE_S = 120.0
BLOCKED_S = 0.25
"""A call that keeps the event loop for longer keeps every other episode of the worker waiting."""
GONE_S = 5.0
"""How long after `close` child processes may take to end."""
BADLY = 0.75
"""Share of the expert's mean reward (of 1 where there is none) that an agent at random must stay below."""
NONSENSE = ("", " ", "hello", "\x00\ud7ff\U0001f600", "{" * 2000, "<tool_call>", "</think>", "a\n" * 5000)


class Wrong(Exception):
    """A check failed; the message is what was found."""


@dataclass(frozen=True)
class Finding:
    """What one check saw."""

    name: str
    ok: bool
    found: str
    mend: str


@dataclass(frozen=True)
class Subject:
    """What is examined, and how much of it."""

    make: Callable[[], Environment]
    max_turns: int = 10
    problems: int = 50
    """Episodes per score, and problems of each split that are compared."""

    @asynccontextmanager
    async def instance(self) -> AsyncIterator[Environment]:
        environment = await in_daemon(self.make, "construct")
        try:
            yield environment
        finally:
            await environment.close()

    @staticmethod
    def problem(at: int, split: str = "train") -> Problem:
        return Problem(at, "check", at, derive_seed("check", split, at), split)

    async def episode(self, problem: Problem, say: Say) -> Episode:
        async with self.instance() as environment:
            return await play(environment, problem, say, self.max_turns)

    async def transcript(self, problem: Problem, say: Say) -> list[object]:
        """All that an episode shows."""
        async with self.instance() as environment:
            episode = await play(environment, problem, say, self.max_turns)
            ends = [(s.reward, s.terminated, s.truncated, s.error, json.dumps(s.info)) for s in episode.steps]
            return [*episode.messages, *ends, json.dumps(list(environment.tools)), repr(environment.fingerprint())]

    async def fingerprint(self, problem: Problem) -> str:
        async with self.instance() as environment:
            episode = await open_episode(environment, problem)
            found = environment.fingerprint()
            return repr(found if found is not None else episode.messages)

    async def has_expert(self) -> bool:
        async with self.instance() as environment:
            await open_episode(environment, self.problem(0))
            try:
                environment.expert_action()
            except NotImplementedError:
                return False
            return True

    async def agent(self, seed: int) -> Say:
        return expert if await self.has_expert() else at_random(seed)


async def episodes(subject: Subject) -> str:
    """Openings, steps and infos are well-formed, and an episode ends."""
    say = await subject.agent(0)
    played = [await subject.episode(subject.problem(at), say) for at in range(5)]
    if say is expert and not all(episode.ended for episode in played):
        raise Wrong(f"its own expert does not end an episode within {subject.max_turns} turns")
    return f"{max(len(e.steps) for e in played)} turns at most, rewards {sorted({e.reward for e in played})}"


async def closing(subject: Subject) -> str:
    """`close` may come at any time and again."""
    async with subject.instance() as unused:
        await unused.close()
    async with subject.instance() as opened:
        await open_episode(opened, subject.problem(0))
        await opened.close()
    return "twice, before and after reset"


async def nonsense(subject: Subject) -> str:
    """Whatever a policy writes is answered, and earns nothing."""
    named = 0
    for text in NONSENSE:
        async with subject.instance() as environment:
            episode = await open_episode(environment, subject.problem(0))
            try:
                step = await act(environment, episode, text)
            except Exception as error:
                raise Wrong(f"the action {text[:20]!r} raised {error!r}") from error
        if (step.reward or 0.0) > 0:
            raise Wrong(f"the action {text[:20]!r} earned {step.reward}")
        named += step.error is not None
    return f"{len(NONSENSE)} actions answered, {named} named as mistakes"


async def determinism(subject: Subject) -> str:
    """Equal problems and actions give equal episodes, whatever else draws random numbers."""
    state = random.getstate()
    try:
        for at in range(5):
            twice = []
            for noise in (1, 2):
                random.seed(noise)
                twice.append(await subject.transcript(subject.problem(at), at_random(at)))
                random.seed(noise)
                twice.append(await subject.transcript(subject.problem(at), await subject.agent(at)))
            for first, again in zip(twice[:2], twice[2:], strict=True):
                if first != again:
                    one, other = next(pair for pair in zip(first, again, strict=False) if pair[0] != pair[1])
                    raise Wrong(f"problem {at} differs when repeated: {str(one)[:100]}, then {str(other)[:100]}")
    finally:
        random.setstate(state)
    return "5 problems, each played twice"


async def independence(subject: Subject) -> str:
    """Instances side by side do not see each other."""
    alone = [await subject.transcript(subject.problem(at), await subject.agent(at)) for at in range(3)]
    says = [await subject.agent(at) for at in range(3)]
    together = await asyncio.gather(*(subject.transcript(subject.problem(at), say) for at, say in enumerate(says)))
    if alone != list(together):
        raise Wrong("episodes played side by side differ from each played alone")
    return "3 episodes side by side equal each alone"


async def splits(subject: Subject) -> str:
    """The seed decides the problem, and no held-out problem occurs in training."""
    count = subject.problems
    train = {await subject.fingerprint(subject.problem(at)) for at in range(count)}
    held_out = {await subject.fingerprint(subject.problem(at, "heldout")) for at in range(count)}
    if count > 1 and len(train) < 2:
        raise Wrong(f"{count} seeds gave one and the same problem")
    if common := train & held_out:
        raise Wrong(f"{len(common)} problems occur in both splits, such as {min(common)[:100]}")
    return f"{len(train)} and {len(held_out)} problems from {count} seeds each, none in both"


async def scores(subject: Subject) -> str:
    """Skill pays: an agent that acts at random scores badly, an expert well."""

    async def mean(say: Callable[[int], Say]) -> float:
        return fmean([(await subject.episode(subject.problem(at), say(at))).reward for at in range(subject.problems)])

    blind = await mean(at_random)
    if not await subject.has_expert():
        if blind >= BADLY:
            raise Wrong(f"at random {blind:.2f}")
        return f"at random {blind:.2f}; no expert, so a warm start can not use it"
    skilled = await mean(lambda _: expert)
    found = f"at random {blind:.2f}, expert {skilled:.2f}"
    if blind >= skilled * (BADLY if skilled > 0 else 1):
        raise Wrong(found)
    return found


async def tools(subject: Subject) -> str:
    """Tools are shown as chat templates want them."""
    async with subject.instance() as environment:
        await open_episode(environment, subject.problem(0))
        try:
            functions = [tool["function"] for tool in environment.tools]
            names = [f["name"] for f in functions if f["description"] is not None and f["parameters"] is not None]
        except (KeyError, TypeError) as error:
            raise Wrong(f"a schema lacks {error}") from error
    if len(set(names)) < len(names):
        raise Wrong(f"two tools have one name in {', '.join(names)}")
    return ", ".join(names) or "none"


async def patience(subject: Subject) -> str:
    """Calls leave the event loop free, and one that is cancelled can be followed by `close`."""
    gap = 0.0

    async def tick() -> None:
        nonlocal gap
        last = perf_counter()
        while True:
            await asyncio.sleep(0.005)
            now = perf_counter()
            gap, last = max(gap, now - last), now

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    try:
        await subject.episode(subject.problem(0), await subject.agent(0))
        await asyncio.sleep(0.01)  # the last gap counts, too
    finally:
        ticking.cancel()
    if gap > BLOCKED_S:
        raise Wrong(f"a call kept the event loop for {gap:.2f} s")
    async with subject.instance() as environment:
        episode = await open_episode(environment, subject.problem(0))
        step = asyncio.create_task(act(environment, episode, environment.random_action(random.Random(0))))
        await asyncio.sleep(0)
        step.cancel()
        await asyncio.wait({step}, timeout=DEADLINE_S / 4)
        if not step.done():
            raise Wrong("a step that was cancelled goes on")
    return f"event loop kept for {gap * 1000:.0f} ms at most"


async def leftovers(subject: Subject) -> str:
    """Nothing outlives `close`."""
    process = psutil.Process()
    before = {child.pid for child in process.children(recursive=True)}
    async with subject.instance() as environment:
        await open_episode(environment, subject.problem(0))
        during = [child for child in process.children(recursive=True) if child.pid not in before]
        if len(during) > environment.needs.processes:
            raise Wrong(f"{len(during)} child processes, but needs.processes is {environment.needs.processes}")
    _, alive = await in_daemon(lambda: psutil.wait_procs(during, timeout=GONE_S), "leftovers")
    if alive:
        raise Wrong(f"{len(alive)} child processes are alive after close")
    return f"{len(during)} child processes, all gone"


CHECKS: tuple[tuple[Callable[[Subject], Awaitable[str]], str], ...] = (
    (episodes, "give Steps and Messages as envs.protocol says; end with terminated=True"),
    (closing, "make close idempotent, and safe before reset"),
    (nonsense, "answer what can not be read with Step(..., error=Mistake.INVALID); raise only for your own failures"),
    (
        determinism,
        "draw from random.Random(problem.seed) only, never from a global generator, a clock or a set's order",
    ),
    (independence, "keep state in the instance, not in the class or module"),
    (splits, "draw problems until in_split(fingerprint, problem.split) says yes; see envs.protocol"),
    (scores, "reward what was solved, not what was said; override random_action if its form is special"),
    (tools, 'give {"type": "function", "function": {"name", "description", "parameters"}}, or use envs.tools'),
    (patience, "use SyncEnvironment or `await self.in_thread(...)` for what blocks"),
    (leftovers, "end child processes in close, and declare how many there are in needs"),
)


async def examine(subject: Subject) -> list[Finding]:
    """Every check, in order; each goes on where an earlier one failed."""
    findings = []
    for check, mend in CHECKS:
        try:
            ok, found = True, await bounded(check(subject), DEADLINE_S)
        except Overdue:
            ok, found = False, f"did not end within {DEADLINE_S:g} s"
        except Wrong as wrong:
            ok, found = False, str(wrong)
        except Exception as error:
            ok, found = False, f"raised {error!r}"
        findings.append(Finding(check.__name__, ok, found, mend))
    return findings
