"""Where each reward of a run is scored: here, or by a function.

Invariants: a reward without the `@serverless` mark, and any reward of a run without the section `serverless`, is
scored in this process; what a function answers is checked like what a reward returns; whatever keeps a function from
answering is a RewardFailure. The local endpoint is started by the first call that needs it, and again if it died.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.judge import chat_client, policy_client
from infra.proxy.client import ProxyClient
from infra.serverless.bundle import Bundle, Function
from infra.serverless.client import FunctionClient, lambda_client
from infra.serverless.errors import ServerlessError
from infra.serverless.host import PREFIX, LocalHost
from infra.store import clients
from infra.store.objects import ObjectStore
from rewards.protocol import Ask, TrajectoryView
from rewards.registry import checked, reward_function, score, score_here
from rl.config.rewards import LambdaFunctions, LocalFunctions
from rl.config.run import RunConfig
from rl.config.work import DomainSection
from rl.errors import ConfigError, RewardFailure
from rl.serverless import merged, serverless_of

OURS = ("rl", "rewards")
"""The packages that every bundle has."""


def bundle_of(names: Iterable[str]) -> Bundle:
    """The functions of those among these rewards that have the mark. Raises ConfigError."""
    rewards = {name: reward_function(name) for name in names}
    marks = {name: mark for name, reward in rewards.items() if (mark := serverless_of(reward)) is not None}
    functions = []
    for function in sorted({mark.function for mark in marks.values()}):
        members = [name for name, mark in marks.items() if mark.function == function]
        wanted = merged(marks[name] for name in members)
        paths = {name: f"{rewards[name].__module__}:{rewards[name].__qualname__}" for name in members}
        functions.append(Function(function, wanted.memory_mb, wanted.timeout_s, paths))
    packages = {*OURS, *(rewards[name].__module__.partition(".")[0] for name in marks)}
    requires = {name for mark in marks.values() for name in mark.requires}
    return Bundle(tuple(functions), tuple(sorted(packages)), tuple(sorted(requires)))


class RewardScorer:
    """Scores the trajectories of one run in one process. Thread-safe."""

    def __init__(self, config: RunConfig, home: Path):
        self.config, self._home = config, home
        self._lock = threading.Lock()
        self._host: LocalHost | None = None
        self._client: FunctionClient | None = None
        judge = config.judge
        self._judge = chat_client(judge) if judge is not None and judge.base_url is not None else None

    def score(
        self, domain: DomainSection, view: TrajectoryView, proxy: ProxyClient | None = None
    ) -> dict[str, float]:
        """The named parts of the reward; `proxy` leads to the policy, where that is the judge. Raises RewardFailure,
        ConfigError."""
        ask = self._ask(proxy)
        return score(domain, view, lambda name, shown, options: self._score_term(name, shown, options, ask))

    def _ask(self, proxy: ProxyClient | None) -> Ask | None:
        config = self.config
        if config.judge is None or config.judge.base_url is not None or proxy is None:
            return self._judge
        return policy_client(config.judge, proxy, config.served_as)

    def _score_term(
        self, name: str, view: TrajectoryView, options: Mapping[str, Any], ask: Ask | None = None
    ) -> dict[str, float]:
        if self.config.serverless is not None and serverless_of(reward_function(name)) is not None:
            outcome = self.score_batch(name, [view], options)[0]
            if isinstance(outcome, RewardFailure):
                raise outcome
            return outcome
        return score_here(name, view, options, ask)

    def score_batch(
        self, name: str, views: Sequence[TrajectoryView], options: Mapping[str, Any]
    ) -> list[dict[str, float] | RewardFailure]:
        """The parts for each view, or by what it failed, in one invocation. Raises RewardFailure if there is no answer
        to the invocation as a whole."""
        mark = serverless_of(reward_function(name))
        if mark is None:
            raise ConfigError(f"reward {name!r} has no @serverless mark")
        event = {"reward": name, "options": dict(options), "views": [view.as_json() for view in views]}
        try:
            answer = self._functions().invoke(mark.function, event, self.config.deadlines.score)
        except ServerlessError as error:
            raise RewardFailure(str(error)) from error
        return _outcomes(answer.value, len(views))

    def _functions(self) -> FunctionClient:
        section, seconds = self.config.serverless, self.config.deadlines.score
        assert section is not None
        with self._lock:
            if self._client is not None and (self._host is None or self._host.alive):
                return self._client
            store = ObjectStore.connect(self.config.store)
            if isinstance(section, LocalFunctions):
                s3 = clients.explicit_endpoint(self.config.store)
                self._stop()
                wanted, start_s = bundle_of(_reward_names(self.config)), self.config.deadlines.start
                self._host = LocalHost(wanted, self._home, section.concurrency, section.idle_s, start_s, s3)
                client = lambda_client("us-east-1", self._host.url, seconds, connections=64)
                self._client = FunctionClient(client, PREFIX, store)
            else:
                client = lambda_client(section.region, section.endpoint_url, seconds, connections=256)
                self._client = FunctionClient(client, section.prefix, store)
            return self._client

    def _stop(self) -> None:
        host, self._host, self._client = self._host, None, None
        if host is not None:
            host.close()

    def close(self) -> None:
        """End the local endpoint, if there is one."""
        with self._lock:
            self._stop()


def check_functions(config: RunConfig) -> None:
    """That the functions which the run will invoke on AWS are deployed. Raises FunctionMissing, InvocationFailed."""
    section = config.serverless
    if not isinstance(section, LambdaFunctions):
        return
    client = lambda_client(section.region, section.endpoint_url, config.deadlines.start, connections=1)
    functions = FunctionClient(client, section.prefix, store=None)
    for function in bundle_of(_reward_names(config)).functions:
        functions.check(function.name)


def _reward_names(config: RunConfig) -> set[str]:
    return {term.name for domain in config.domains for term in domain.terms}


def _outcomes(answer: Any, count: int) -> list[dict[str, float] | RewardFailure]:
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list) or len(results) != count:
        raise RewardFailure(f"its function answered {answer!r:.200}, not {count} results")
    return [_outcome(result) for result in results]


def _outcome(result: Any) -> dict[str, float] | RewardFailure:
    if not isinstance(result, dict) or "parts" not in result:
        return RewardFailure(str(result.get("error", result) if isinstance(result, dict) else result)[:2000])
    try:
        return checked(result["parts"])
    except RewardFailure as error:
        return error
