"""Prometheus metrics of all tenants of a service, put together from those of each when they are asked for.

Invariant: every sample has the tenant it is of, also those whose own proxy has no need to say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from infra.proxy.metrics import Metrics


class TenantCollector(Collector):
    """`tenants` gives the metrics of each, by the name that it is served as."""

    def __init__(self, tenants: Callable[[], Mapping[str, Metrics]]):
        self._tenants = tenants

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for name, metrics in self._tenants().items():
            for family in metrics.registry.collect():
                whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                whole.samples += [sample._replace(labels={"tenant": name} | sample.labels) for sample in family.samples]
        yield from families.values()
