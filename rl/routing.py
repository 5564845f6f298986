"""Which engine serves a generation: one state machine, which the running system and the simulator drive alike.

    submit -> waiting --dispatch--> running on an engine --finish | release--> gone
                 \\--cancel--> gone                  \\--its engine leaves: the caller submits what is left anew

Where a request goes, in this order, at each place only where it fits:
1. to the engine that holds the longest prefix of its trajectory;
2. to the least loaded engine of its class: the one that its owner, or else its domain declares, else the one that its
   shape asks for (many new prompt tokens for each token to be sampled want compute), else the default;
3. to the least loaded engine of a compatible class.
It fits where a slot is free and where the keys and values of prompt and expected answer have room; alone it fits
everywhere. With a `Split`, a request with a long enough new prompt is prefilled on one class and decoded on another.

Invariants
- No request goes to an engine that left or that serves another revision than the present one.
- Work conserving: after `dispatch`, a request waits only if it fits nowhere, or only on engines that are held for
  requests which were overtaken `OVERTAKES` times (`rl.waiting`), of all engines a `HELD`th at most, but one.
- No starvation: such an engine takes nothing else until the overtaken request fits.
- What is refused once is not tried again: a dispatch looks at every engine for few of those that wait.
- What is reserved on an engine is what runs there, no more and no less.
- It reads no clock and draws no chance: equal calls give equal answers.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from rl.capacity import EngineLoad
from rl.placement import COMPATIBLE, HardwareClass, Placement
from rl.waiting import Request, Waiting

OVERTAKES = 64
"""How often a waiting request may see a younger one go first."""
HELD = 8
"""One engine in so many may be held for requests that were overtaken too often."""
REMEMBERED = 100_000
"""Trajectories of which it is known where their prefix is, the most recent ones."""
SLACK = 1.5
"""Room for an answer, in mean answers of the domain."""
WEIGHT = 0.05
"""Of the newest turn in the running means of a domain's shape."""


@dataclass(frozen=True, slots=True)
class Split:
    """Prompts of at least `least` new tokens are computed on class `prefill`, their answers on class `decode`."""

    prefill: HardwareClass
    decode: HardwareClass
    least: int

    def __post_init__(self) -> None:
        if self.prefill is self.decode:
            raise ValueError(f"prefill and decode are both on {self.prefill}: that is no split")


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where a request goes; with `prefill`, its prompt is computed there first (say `prefilled` then)."""

    request: Request
    engine: str
    prefill: str | None
    fresh: int
    """Tokens of the prompt whose keys and values `engine` is not known to hold."""


@dataclass(slots=True)
class Shape:
    """Running means over a domain's turns, in tokens."""

    fresh: float
    """Prompt tokens that had to be computed."""
    sampled: float

    def take(self, fresh: int, sampled: int) -> None:
        self.fresh += WEIGHT * (fresh - self.fresh)
        self.sampled += WEIGHT * (sampled - self.sampled)


_GPUS = {HardwareClass.COMPUTE_GPU, *COMPATIBLE[HardwareClass.COMPUTE_GPU]}


class Router:
    """See the module. `placement` names the class of each domain that declares one; a request of another domain
    with more than `prefill_heavy` fresh prompt tokens for each expected new one goes to compute_gpu."""

    def __init__(self, placement: Placement, prefill_heavy: float, split: Split | None = None):
        self.revision = 0
        """What every engine has to serve; counted up by whoever publishes (`advance`)."""
        self.shapes: dict[str, Shape] = {}
        self._placement, self._prefill_heavy, self._split = placement, prefill_heavy, split
        self._engines: dict[str, EngineLoad] = {}
        self._waiting = Waiting()
        self._running: dict[str, Assignment] = {}
        self._prefixes: OrderedDict[str, dict[str, tuple[int, int]]] = OrderedDict()
        self._serial = 0

    # -- engines -----------------------------------------------------------------------------------------------

    def join(self, name: str, hardware: HardwareClass, slots: int, capacity: int, revision: int) -> None:
        """An engine that takes work while `revision` is the present one. Its name is new or left before."""
        if name in self._engines or slots < 1 or capacity < 1:
            raise ValueError(f"engine {name!r} with {slots} slots and {capacity} tokens can not join")
        self._serial += 1
        self._engines[name] = EngineLoad(name, hardware, slots, capacity, revision, {}, self._serial)

    def serves(self, name: str, revision: int, tenant: str) -> None:
        """The engine serves this revision, which brought a new version of `tenant`: what it kept of that one's
        prefixes is void."""
        if name in self._engines:
            self._serial += 1
            self._engines[name].revision = revision
            self._engines[name].life[tenant] = self._serial

    def advance(self, revision: int) -> None:
        """Engines of any other revision get nothing more."""
        self.revision = revision

    def leave(self, name: str) -> list[Request]:
        """Forget an engine; what ran there, which is no longer known here: submit again what shall go on."""
        engine = self._engines.pop(name, None)
        if engine is None:
            return []
        lost = [self._running[request].request for request in engine.running]
        for request in lost:
            self.release(request.id)
        return lost

    # -- requests ----------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def running(self, engine: str) -> int:
        """Requests on an engine, prefills for others included."""
        return len(self._engines[engine].running)

    def load(self, engine: str) -> float:
        """The share of an engine's slots or of its tokens that is taken, whichever is larger."""
        return self._engines[engine].load[0]

    def submit(self, request: Request) -> None:
        if request.id in self._waiting or request.id in self._running:
            raise ValueError(f"request {request.id!r} is here already")
        self._waiting.add(request)

    def dispatch(self) -> list[Assignment]:
        """Everything that can run now, in the order of its arrival; it counts as running from here on."""
        usable = {e.name: e for e in self._engines.values() if e.revision == self.revision}
        self._waiting.keep(usable)
        held = self._waiting.engines
        common = {name: engine for name, engine in usable.items() if name not in held}
        free = sum(not e.full for e in usable.values())
        alike = all(e.hardware in _GPUS for e in usable.values())  # what one request may use, all may
        refused = math.inf
        assigned: list[Assignment] = []
        for request, overtaken in self._waiting:
            if free == 0:
                break
            own, need = self._waiting.held(request.id), request.prompt + self._expected(request)
            found = None
            if own is not None or need < refused:
                found = self._place(request, common if own is None else common | {own: usable[own]})
            if found is None:
                if own is None and overtaken >= OVERTAKES and len(held) < max(1, len(usable) // HELD):
                    held |= self._hold(request, common)
                refused = min(refused, need) if alike else refused
                continue
            if own is not None:
                common[own], refused = usable[own], math.inf
                held.discard(own)
            self._waiting.remove(request.id)
            self._take(found)
            assigned.append(found)
            free -= sum(self._engines[name].full for name in (found.engine, found.prefill) if name is not None)
        return assigned

    def _hold(self, request: Request, common: dict[str, EngineLoad]) -> set[str]:
        """Take the least loaded engine that the request can use from the others and hold it; its name, if any."""
        classes = set(self._classes(request, request.prompt, self._expected(request)))
        fitting = [engine for engine in common.values() if engine.hardware in classes]
        if not fitting:
            return set()
        name = min(fitting, key=lambda e: e.load).name
        self._waiting.hold(request.id, name)
        del common[name]
        return {name}

    def prefilled(self, request: str) -> None:
        """The prompt of a split request is computed: the prefill engine is done with it."""
        found = self._running.get(request)
        if found is not None and found.prefill is not None and found.prefill in self._engines:
            self._engines[found.prefill].drop(request)

    def finish(self, request: str, sampled: int) -> None:
        """A running request ended with this many new tokens: its engine holds its prefix, and its domain's shape is
        the better known. One that is not known (its engine left) is ignored."""
        found = self._running.get(request)
        if found is None:
            return
        asked = found.request
        self.release(request)
        self.shapes.setdefault(asked.domain, Shape(found.fresh, sampled)).take(found.fresh, sampled)
        held = self._prefixes.setdefault(asked.trajectory, {})
        self._prefixes.move_to_end(asked.trajectory)
        held[found.engine] = (asked.prompt + sampled, self._life(found.engine, asked.tenant))
        if len(self._prefixes) > REMEMBERED:
            self._prefixes.popitem(last=False)

    def release(self, request: str) -> None:
        """A running request ended without a result, or a waiting one is no longer wanted; others are ignored."""
        if request in self._waiting:
            self._waiting.remove(request)
            return
        found = self._running.pop(request, None)
        if found is not None:
            for name in (found.engine, found.prefill):
                if name is not None and name in self._engines:
                    self._engines[name].drop(request)

    def forget(self, trajectory: str) -> None:
        """The trajectory has ended: nothing will extend its prefix."""
        self._prefixes.pop(trajectory, None)

    # -- choice ------------------------------------------------------------------------------------------------

    def _place(self, request: Request, usable: dict[str, EngineLoad]) -> Assignment | None:
        """Where among the usable engines the request can go now."""
        held = self._held_prefixes(request)
        longest = max(held.values(), default=0)
        new = self._expected(request)
        need = request.prompt + new
        split = self._split_for(request, request.prompt - longest)
        if split is not None:
            prefill = _least(usable, split.prefill, request.prompt)
            decode = _least(usable, split.decode, need)
            if prefill is not None and decode is not None:
                return Assignment(request, decode.name, prefill.name, request.prompt)
        for name in sorted(held, key=lambda n: (-held[n], n)):
            if name in usable and usable[name].fits(need):
                return Assignment(request, name, None, request.prompt - held[name])
        for hardware in self._classes(request, request.prompt - longest, new):
            if (engine := _least(usable, hardware, need)) is not None:
                return Assignment(request, engine.name, None, request.prompt - held.get(engine.name, 0))
        return None

    def _classes(self, request: Request, fresh: int, new: int) -> Iterator[HardwareClass]:
        """Classes that can run the request, the preferred one first."""
        declared = request.runs_on or self._placement.by_domain.get(request.domain)
        if declared is not None:
            preferred = declared
        elif request.domain in self.shapes and fresh > self._prefill_heavy * new:
            preferred = HardwareClass.COMPUTE_GPU
        else:
            preferred = self._placement.preferred()
        yield preferred
        yield from COMPATIBLE[preferred]

    def _split_for(self, request: Request, fresh: int) -> Split | None:
        split = self._split
        return split if split is not None and request.may_split and fresh >= split.least else None

    def _expected(self, request: Request) -> int:
        """New tokens to make room for: what the domain's answers need as a rule, all that it may have if unknown."""
        shape = self.shapes.get(request.domain)
        return request.max_new if shape is None else min(request.max_new, math.ceil(SLACK * shape.sampled) + 1)

    def _held_prefixes(self, request: Request) -> dict[str, int]:
        """Tokens of the prompt by the engine that holds them; a longer prefix is of an earlier episode."""
        return {
            name: tokens
            for name, (tokens, life) in self._prefixes.get(request.trajectory, {}).items()
            if tokens <= request.prompt and name in self._engines and self._life(name, request.tenant) == life
        }

    def _life(self, engine: str, tenant: str) -> int:
        found = self._engines[engine]
        return found.life.get(tenant, found.born)

    def _take(self, found: Assignment) -> None:
        request = found.request
        self._running[request.id] = found
        self._engines[found.engine].take(request.id, request.prompt + self._expected(request))
        if found.prefill is not None:
            self._engines[found.prefill].take(request.id, request.prompt)


def _least(engines: dict[str, EngineLoad], hardware: HardwareClass, tokens: int) -> EngineLoad | None:
    """The least loaded engine of a class where this fits."""
    fitting = [e for e in engines.values() if e.hardware is hardware and e.fits(tokens)]
    return min(fitting, key=lambda e: e.load) if fitting else None
