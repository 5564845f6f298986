"""Prometheus metrics of one proxy, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Metrics:
    """All names begin with `rollmill_proxy_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name = "rollmill_proxy_"
        r = self.registry
        self.requests = Counter(name + "requests", "Generations answered with a result", registry=r)
        self.tokens = Counter(name + "tokens", "Tokens generated for answered requests", registry=r)
        self.refusals = Counter(name + "refusals", "Generations that were refused or ended", ["reason"], registry=r)
        self.suspended = Counter(name + "suspended_seconds", "Time suspended", registry=r)
        self.watchdog = Counter(name + "watchdog_resumes", "Suspensions that the proxy ended by itself", registry=r)
        self.swap = Histogram(
            name + "swap_seconds",
            "Pull and swap of one version",
            registry=r,
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
        )
        self.in_flight = Gauge(name + "in_flight", "Generations in flight", registry=r)
        self.serving = Gauge(name + "serving_version", "Version that generates; -1 before the first", registry=r)
        self.serving.set(-1)

    def render(self) -> bytes:
        return generate_latest(self.registry)
