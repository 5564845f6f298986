"""Turns on their way to engines: the slots of the world as requests of the router of the running system.

Invariants: where a turn goes is `rl.routing.Router`'s choice alone; a slot has at most one request at a time, and none
once it left; a slot that is started afresh is another trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rl.config.engine import RoutingSection
from rl.placement import HardwareClass, Placement
from rl.routing import Router
from rl.waiting import Request
from sim.config import DomainWork
from sim.engines import Engines

Array = np.ndarray
ROOM = 4.0
"""Most tokens of an answer, in mean answers of its domain."""


class TurnRouting:
    """One router over all engines."""

    def __init__(self, engines: Engines, domains: Sequence[DomainWork], placement: Placement):
        self.router = Router(placement, RoutingSection().prefill_heavy)
        self._names = [d.name for d in domains]
        self._most = [int(ROOM * d.response_tokens) for d in domains]
        self._serial: dict[int, int] = {}
        self._count = engines.count
        self._asked: set[int] = set()
        """Since the router was asked last."""
        classes: Mapping[int, HardwareClass] = dict(enumerate(engines.classes))
        for at, pool in enumerate(engines.pool.tolist()):
            self.router.join(str(at), classes[pool], int(engines.most[at]), int(engines.room[at]), 0)

    def ask(self, slots: Array, moment: Array, run: Array, domain: Array, prompt: Array) -> None:
        """The next turn of each, in the order in which they became ready."""
        order = np.argsort(moment, kind="stable")
        for slot, tenant, kind, tokens in zip(
            slots[order].tolist(), run[order].tolist(), domain[order].tolist(), prompt[order].tolist(), strict=True
        ):
            self._asked.add(slot)
            self.router.submit(
                Request(str(slot), str(tenant), self._name(slot), self._names[kind], int(tokens), self._most[kind])
            )

    def assigned(self) -> tuple[Array, Array, Array, Array]:
        """Of everything that can run now: slots, engines, tokens to read, and whether they had to wait."""
        found = self.router.dispatch()
        slots = [int(a.request.id) for a in found]
        waited = [slot not in self._asked for slot in slots]
        self._asked.clear()
        return (
            np.array(slots, np.int64),
            np.array([int(a.engine) for a in found], np.int64),
            np.array([a.fresh for a in found], float),
            np.array(waited, bool),
        )

    def answered(self, slots: Array, tokens: Array) -> None:
        for slot, sampled in zip(slots.tolist(), tokens.tolist(), strict=True):
            self.router.finish(str(slot), int(sampled))

    def leave(self, slots: Array) -> None:
        """These trajectories are over."""
        for slot in slots.tolist():
            self.router.release(str(slot))
            self.router.forget(self._name(slot))
            self._serial[slot] = self._serial.get(slot, 0) + 1

    def updated(self, run: int) -> None:
        """All engines have a new version of this run's."""
        revision = self.router.revision + 1
        self.router.advance(revision)
        for engine in range(self._count):
            self.router.serves(str(engine), revision, str(run))

    def _name(self, slot: int) -> str:
        return f"{slot}.{self._serial.get(slot, 0)}"
