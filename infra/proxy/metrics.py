"""Prometheus metrics of one proxy, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

WHOSE = ["tenant", "domain"]
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """All names begin with `rollmill_proxy_`. The tenant of a policy that is the whole model is empty."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name = "rollmill_proxy_"
        r = self.registry
        self.requests = Counter(name + "requests", "Generations answered with a result", WHOSE, registry=r)
        self.tokens = Counter(name + "tokens", "Tokens generated for answered requests", WHOSE, registry=r)
        self.latency = Histogram(
            name + "latency_seconds", "Of answered generations, waiting included", WHOSE, registry=r, buckets=SECONDS
        )
        self.in_flight = Gauge(name + "in_flight", "Generations in flight", WHOSE, registry=r)
        self.refusals = Counter(
            name + "refusals", "Generations that were refused or ended", ["reason", *WHOSE], registry=r
        )
        self.drift = Counter(
            name + "drift", "Histories of agents that differ from what was recorded", ["kind", *WHOSE], registry=r
        )
        self.unreadable = Counter(
            name + "unreadable_calls", "Turns with what looks like a tool call and is none", WHOSE, registry=r
        )
        self.sessions = Gauge(name + "sessions", "Sessions of agents that are open", registry=r)
        self.suspended = Counter(name + "suspended_seconds", "Time suspended", registry=r)
        self.watchdog = Counter(name + "watchdog_resumes", "Suspensions that the proxy ended by itself", registry=r)
        self.swap = Histogram(
            name + "swap_seconds",
            "Pull and swap of one version",
            registry=r,
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
        )
        self.serving = Gauge(name + "serving_version", "Version that generates; -1 before the first", registry=r)
        self.serving.set(-1)
        self._whose: dict[tuple[str, str], tuple[Gauge, Counter, Counter, Histogram]] = {}

    @contextmanager
    def generation(self, tenant: str, domain: str) -> Iterator[Callable[[int], None]]:
        """Of one request; call what it gives with the number of tokens when there is a result."""
        start = perf_counter()
        if (found := self._whose.get((tenant, domain))) is None:  # looking labels up costs more than counting
            whose = (tenant, domain)
            found = self._whose[whose] = (
                self.in_flight.labels(*whose),
                self.requests.labels(*whose),
                self.tokens.labels(*whose),
                self.latency.labels(*whose),
            )
        in_flight, requests, sampled, latency = found

        def count(tokens: int) -> None:
            requests.inc()
            sampled.inc(tokens)
            latency.observe(perf_counter() - start)

        in_flight.inc()
        try:
            yield count
        finally:
            in_flight.dec()

    def render(self) -> bytes:
        return generate_latest(self.registry)
