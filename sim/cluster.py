"""The cluster: one world, one trainer, any number of runs, and the agenda that moves them.

Invariants
- The clock stops at every moment of the agenda, and at least once per tick; runs are asked only where something
  happened.
- The trainer makes one step at a time; whose, `rl.fairness` says.
- With one run the engines stand still while they are updated; with several each has its own adapter, and the update
  of one stops only its own trajectories.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from rl.concurrency import Load
from rl.modes import MODES
from rl.placement import HardwareClass, Placement
from rl.trajectory import Uid
from sim.clock import Agenda
from sim.config import Scenario
from sim.engines import Engines, least_loaded
from sim.host import Flight
from sim.phases import FREE, Happened
from sim.profiles import hardware, language_model
from sim.rewards import Rewards
from sim.routing import TurnRouting
from sim.run import Run
from sim.service import Service, job_id, number_of, section
from sim.weights import weight_times
from sim.workload import Workload, shortest_turn
from sim.world import World

LOOK_S = 1.0
"""Between two looks at the engines, where the number of trajectories follows them."""


class Cluster:
    """Runs a scenario, or several that share everything but their versions."""

    def __init__(self, scenario: Scenario, steps: int | None = None, work: Workload | None = None):
        self.scenario = scenario
        tenants = scenario.tenants
        self.model = language_model(scenario.model)
        fitted = scenario.efficiency
        self._engines = Engines(scenario.pools, self.model, fitted)
        self._times = weight_times(self.model, fitted)
        work = work or Workload(scenario.domains, scenario.seed, scenario.turns_at_once)
        fastest = float(self._engines.iteration(np.ones(self._engines.count), np.zeros(self._engines.count)).min())
        lockstep = MODES[scenario.mode].lockstep
        per_turn = 4.0 if lockstep else 3.0
        tick = scenario.tick or shortest_turn(scenario.domains, fastest) * scenario.turns_at_once / per_turn
        routing = None
        if scenario.routing == "turn":
            wanted = {d.name: d.runs_on for d in scenario.domains if d.runs_on and scenario.affinity}
            there = sorted(self._engines.classes, key=lambda c: c is not HardwareClass.BANDWIDTH_GPU)
            routing = TurnRouting(self._engines, scenario.domains, Placement(wanted, there[0]))
        together = range(tenants) if lockstep else ()
        rewards = Rewards(scenario.reward)
        self.world = World(work, self._engines, rewards, tick, scenario.turns_at_once, routing, together)
        if self._engines.split:
            self.world.carry_cache(self.model.kv_bytes / fitted.kv_bandwidth)
        self.agenda = Agenda()
        self.service = Service(scenario, int(self._engines.most.sum()))
        self.trainer_busy = 0.0
        self._costs: dict[int, float] = {}
        self._training = False
        self._groups: dict[int, tuple[Run, Uid]] = {}
        self._numbers: dict[tuple[int, Uid], int] = {}
        self._left, self._tokens, self._squares = np.zeros(64), np.zeros(64), np.zeros(64)
        """By group: members that it still needs, and the tokens and squared lengths of those that it has."""
        self._finished: dict[int, list[int]] = {}
        """By group, in the order in which they finished; only where more members are started than needed."""
        self._unused = list(range(63, -1, -1))
        self._classes = [HardwareClass(c) for c in dict.fromkeys(self._engines.classes)]
        self._members_of = {c: self._engines.of_class(c, "decode") for c in self._classes}
        self._readers = np.flatnonzero(np.array(self._engines.roles)[self._engines.pool] == "prefill")
        self.runs = [Run(n, scenario, self, steps) for n in range(tenants)]
        if scenario.adaptive:
            self.agenda.at(0.0, self._look)
        for run in self.runs:
            self.agenda.at(section(scenario, run.number).submitted, partial(self._submitted, run))

    @property
    def now(self) -> float:
        return self.world.now

    def simulate(self, horizon: float) -> None:
        """Until every run has its last step, or for `horizon` seconds."""
        self.agenda.until(self.now)
        self._poll(self.runs)
        while self.now < horizon and not all(run.over for run in self.runs):
            until = min(self.now + self.world.tick, self.agenda.next, horizon)
            touched = self._collect(self.world.advance(until)) if until > self.now else set()
            if self.agenda.until(self.now):
                self._poll(self.runs)
            elif touched:
                self._poll([self.runs[n] for n in sorted(touched)])

    def _poll(self, runs: Sequence[Run]) -> None:
        for run in runs:
            if run.begun:
                run.poll()
        if self.scenario.schedule == "rounds":  # the last one to be asked may have begun a round for all
            for run in self.runs:
                if run.begun and run.changed:
                    run.poll()
        if any(run.over for run in runs):
            self._give_places()

    def _submitted(self, run: Run) -> None:
        self.service.submit(run.number, self.now)
        self.agenda.at(self.now, self._give_places)  # once all that come now are there

    def _give_places(self) -> None:
        for number in self.service.places(self.runs, self.now):
            run = self.runs[number]
            self.agenda.at(self.now + self.service.begins(number), run.begin)

    def _look(self) -> None:
        """Follow what the engines can take."""
        waiting, usage = self.world.load()
        in_flight = sum(run.scenario.members * len(run.in_flight) for run in self.runs)
        if self.service.look(Load(in_flight, waiting, 0, usage)):
            for run in self.service.waiting(self.runs):
                run.changed = True
        self.agenda.at(self.now + LOOK_S, self._look)

    # -- what runs ask for -------------------------------------------------------------------------------

    def place(self, run: Run, flights: list[Flight]) -> None:
        """Start groups now, each on a class that its domain and the room allow, on the least loaded engines there."""
        load = self.world.running()
        room = {c: float(self._engines.most[self._members_of[c]].sum()) for c in self._members_of}
        free = {c: room[c] - float(load[self._members_of[c]].sum()) for c in self._classes if room[c]}
        chosen: dict[HardwareClass, list[Flight]] = {c: [] for c in free}
        for flight in flights:
            where = self._class_of(flight, free, room)
            free[where] -= run.scenario.members
            chosen[where].append(flight)
        for where, group in chosen.items():
            if group:
                self._start(run, group, where, load)

    def _class_of(
        self, flight: Flight, free: Mapping[HardwareClass, float], room: Mapping[HardwareClass, float]
    ) -> HardwareClass:
        wanted = flight.domain.runs_on if self.scenario.affinity else None
        if wanted is None:
            return max(free, key=lambda c: free[c] / room[c])
        return Placement({}, wanted).resolve(None, free)

    def _start(self, run: Run, flights: list[Flight], where: HardwareClass, load: np.ndarray) -> None:
        size = run.scenario.members
        numbers = [self._new_group(run, flight.uid) for flight in flights]
        engines = self._members_of[where]
        engine = engines[least_loaded(load[engines], len(flights) * size)]
        load += np.bincount(engine, minlength=len(load))
        reader = engine
        if len(self._readers):
            reader = self._readers[(numbers[0] * size + np.arange(len(engine))) % len(self._readers)]
        self.world.start(
            np.repeat(numbers, size),
            np.tile(np.arange(size), len(flights)),
            run.number,
            np.repeat([self.world.work.index[f.domain.name] for f in flights], size),
            np.repeat([f.problem for f in flights], size),
            engine,
            reader,
        )

    def grant(self, run: Run, uids: list[Uid]) -> list[Uid]:
        """Which of the groups that its bound allows the run may start now."""
        return self.service.grant(run, uids, self.runs)

    def end(self, run: Run, uids: Iterable[Uid], playing: bool) -> None:
        """Forget these groups; `playing` if members of theirs are to be stopped."""
        numbers = [self._numbers.pop((run.number, uid)) for uid in uids]
        if playing:
            self.world.end(np.array(numbers))
        for number in numbers:
            del self._groups[number]
            self._finished.pop(number, None)
        self._unused += numbers

    def train(self, run: Run, tokens: float, squares: float) -> None:
        """Queue for the trainer. With inline weights it first hands the head over, and the engines wait."""
        section, fitted = self.scenario.trainer, self.scenario.efficiency
        work = self.model.token_flops * tokens + self.model.attention_flops * squares / 2
        speed = section.gpus * hardware(section.hardware).flops * fitted.train
        self._costs[run.number] = fitted.train_fixed + fitted.train_passes * work / speed
        self.service.queue.offer(job_id(run.number))
        self._next_step()

    def _next_step(self) -> None:
        if self._training or (job := self.service.queue.take()) is None:
            return
        self._training = True
        run = self.runs[number_of(job)]
        seconds = self._costs[run.number]
        mode = MODES[self.scenario.mode]
        lazy = not (mode.alternates or mode.eager)
        wait = self.exposed if self._inline and lazy and len(self.runs) == 1 else 0.0
        self.trainer_busy += seconds

        def done() -> None:
            self._training = False
            self.service.queue.served(job, seconds)
            run.trained()
            self._next_step()

        self.agenda.at(self.now + wait + seconds, done)

    @property
    def _inline(self) -> bool:
        return self.scenario.weights.mode == "inline"

    @property
    def exposed(self) -> float:
        """Seconds for which one update stops the engines. Where they share their GPUs with the trainer, the weights
        are there already."""
        if self.scenario.trainer.colocated:
            return self._times.exposed_pull
        return self._times.inline if self._inline else self._times.exposed_pull

    def push(self, run: Run) -> None:
        """Bring the new version to the store."""
        seconds = 0.0 if self._inline else self._times.push
        if len(self.runs) > 1:
            seconds = self.scenario.efficiency.adapter_push
        self.agenda.at(self.now + seconds, run.pushed)

    def swap(self, run: Run) -> None:
        """Update the engines to the run's head."""
        if len(self.runs) > 1:

            def there() -> None:
                self.world.forget(run.number)
                run.swapped()

            self.agenda.at(self.now + (self.scenario.efficiency.adapter_swap if run.log.head else 0.0), there)
            return
        self.world.stand()
        seconds = self.exposed if run.log.head else 0.0  # the first version is there already

        def done() -> None:
            self.world.forget(run.number)
            self.world.go_on(seconds)
            run.swapped()

        self.agenda.at(self.now + seconds, done)

    # -- what happened -----------------------------------------------------------------------------------

    def _collect(self, happened: Happened) -> set[int]:
        """Tell the runs; the numbers of those that something happened to."""
        touched = self._finish(happened.finished) if len(happened.finished) else set[int]()
        world = self.world
        for slot in happened.failed.tolist():
            if world.slots.phase[slot] == FREE:
                continue  # its group ended in this very tick
            run, uid = self._groups[int(world.slots.group[slot])]
            touched.add(run.number)
            problem = run.in_flight[uid].problem
            if run.failed(uid, int(world.slots.member[slot])):
                world.again(np.array([slot]), np.array([problem]))
                continue
            if world.slots.phase[slot] != FREE:
                world.free(np.array([slot]))
            self._tell(int(world.slots.group[slot]), run, uid)
        if touched:
            for run in self.service.waiting(self.runs):
                run.changed = True
                touched.add(run.number)
        return touched

    def _finish(self, slots: np.ndarray) -> set[int]:
        """Count members that have their rewards; a run hears of a group when as many as it needs have."""
        world = self.world
        group, tokens = world.slots.group[slots], world.slots.context[slots]
        size = len(self._left)
        counts = np.bincount(group, minlength=size)
        self._left -= counts
        self._tokens += np.bincount(group, tokens, size)
        self._squares += np.bincount(group, tokens**2, size)
        if self.scenario.redundancy.extra_members:
            for number, member in zip(group.tolist(), world.slots.member[slots].tolist(), strict=True):
                self._finished.setdefault(number, []).append(member)
        world.free(slots)
        touched: set[int] = set()
        for number in np.flatnonzero((counts > 0) & (self._left <= 0)).tolist():
            run, uid = self._groups[number]
            self._tell(number, run, uid)
            touched.add(run.number)
        return touched

    def _tell(self, number: int, run: Run, uid: Uid) -> None:
        """A run hears of a group of which enough members are there, as long as it cares."""
        if uid in run.in_flight and self._left[number] <= 0:
            run.finished(uid, self._finished.get(number), float(self._tokens[number]), float(self._squares[number]))

    def _new_group(self, run: Run, uid: Uid) -> int:
        if not self._unused:
            had = len(self._left)
            self._unused = list(range(2 * had - 1, had - 1, -1))
            for name in ("_left", "_tokens", "_squares"):
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros(had)]))
        number = self._unused.pop()
        self._groups[number] = run, uid
        self._numbers[run.number, uid] = number
        self._left[number], self._tokens[number], self._squares[number] = self.scenario.group_size, 0.0, 0.0
        return number
