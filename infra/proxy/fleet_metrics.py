"""Prometheus metrics of a fleet, read off it when they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from infra.proxy.fleet import Fleet

NAME = "rollmill_proxy_"


class FleetCollector(Collector):
    """Register it with a registry of the fleet's event loop."""

    def __init__(self, fleet: Fleet):
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        fleet = self._fleet
        members = list(fleet.members.all.values())
        engines = GaugeMetricFamily(NAME + "engines", "Engines by class and state", labels=["hardware", "state"])
        for (hardware, state), count in Counter((m.facts.hardware.value, m.state) for m in members).items():
            engines.add_metric([hardware, state], count)
        running = GaugeMetricFamily(NAME + "engine_running", "Requests on an engine", labels=["engine"])
        load = GaugeMetricFamily(NAME + "engine_load", "Share of an engine's slots or tokens taken", labels=["engine"])
        for member in fleet.members.serving:
            running.add_metric([member.facts.name], fleet.router.running(member.facts.name))
            load.add_metric([member.facts.name], fleet.router.load(member.facts.name))
        waiting = GaugeMetricFamily(NAME + "waiting", "Requests that wait for an engine", fleet.router.waiting)
        lost = CounterMetricFamily(NAME + "engines_lost", "Engines taken out", value=fleet.members.lost)
        text = "Generations that went on after their engine was lost"
        continued = CounterMetricFamily(NAME + "continued", text, value=fleet.continued)
        yield from (engines, running, load, waiting, lost, continued)
