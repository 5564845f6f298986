"""The machine under a virtual clock: trajectories as arrays, advanced a tick at a time.

A slot (`sim.slots`) holds one trajectory and goes

    RESET -> (READ -> DECODE -> STEP) x turns -> SCORE -> free
               ^ or, in lockstep, WAIT for the others of its run before DECODE's turn and STEP's

All but DECODE end at a known moment; DECODE ends when its engine has given every sequence as much as it needs, at the
speed that the engine has. A tick moves every slot over at most one boundary of each kind. Moments inside a tick are
kept exactly and time that a slot could have used before its turn came is credited to it, so a tick need only be shorter
than a turn; it costs the same for one trajectory and for ten thousand. With `at_once` above 1 so many turns of a
trajectory are one: their prompts are read together, then all is answered, then their steps are taken.

Invariants
- Only `advance` moves the clock; between two of its calls nothing happens by itself.
- A free slot is in no group; the members of a group are those that were started for it and neither ended nor failed.
- While the engines stand still no token is made and no prompt read; environments and rewards go on.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sim.engines import Engines
from sim.lockstep import Lockstep
from sim.phases import (
    DECODE,
    FREE,
    HELD,
    QUEUED,
    READ,
    RESET,
    SCORE,
    STEP,
    WAIT_READ,
    WAIT_SCORE,
    WAIT_STEP,
    Happened,
    Totals,
)  # fmt: skip
from sim.rewards import Rewards
from sim.routing import TurnRouting
from sim.slots import NEVER, Slots
from sim.turns import next_turns, unread
from sim.workload import Workload

Array = np.ndarray


class World:
    """Slots, engines, environments and rewards; no policy but that of `routing`, if turns are routed one by one."""

    def __init__(
        self,
        work: Workload,
        engines: Engines,
        rewards: Rewards,
        tick: float,
        at_once: int = 1,
        routing: TurnRouting | None = None,
        lockstep: Iterable[int] = (),
        slots: int = 1024,
    ):
        """`lockstep`: runs whose trajectories take their turns together, and whose rewards wait for the last one."""
        self.work, self.engines, self.rewards, self.tick, self.routing = work, engines, rewards, tick, routing
        self._at_once = at_once
        self._kv_seconds = 0.0
        self.now = 0.0
        self.standing = False
        self.totals = Totals(busy=np.zeros(engines.count))
        self.slots = Slots(slots)
        self.lockstep = Lockstep(self.slots, lockstep)

    # -- what policies may do ----------------------------------------------------------------------------

    def start(
        self, group: Array, member: Array, run: int, domain: Array, problem: Array, engine: Array, reader: Array
    ) -> None:
        """Begin trajectories now: arrays over them, of group, number within it, domain, problem's length factor, the
        engine that answers them and the one that reads their prompts."""
        s = self.slots
        slots = s.take(len(group))
        s.group[slots], s.member[slots], s.run[slots] = group, member, run
        s.domain[slots], s.engine[slots], s.reader[slots] = domain, engine, reader
        self._play(slots, domain, problem)

    def again(self, slots: Array, problem: Array) -> None:
        """Start failed members afresh."""
        self._leave(slots)
        self._play(slots, self.slots.domain[slots], problem)

    def free(self, slots: Array) -> None:
        """Give up slots that finished or failed."""
        self._leave(slots)
        self.slots.give_back(slots)

    def end(self, groups: Array) -> None:
        """Stop everything that still runs for these groups."""
        slots = np.flatnonzero(np.isin(self.slots.group, groups) & (self.slots.phase != FREE))
        self.totals.ended += len(slots)
        self.free(slots)

    def _leave(self, slots: Array) -> None:
        if self.routing is not None:
            self.routing.leave(slots)

    def stand(self) -> None:
        """The engines stop."""
        self.standing = True

    def go_on(self, stood: float) -> None:
        """The engines go on after standing still for `stood` seconds, under new weights, so that what they had in
        their caches is read again."""
        s = self.slots
        self.standing = False
        self.totals.stalled += stood
        self.engines.free_at = np.where(self.engines.free_at > self.now - stood, self.engines.free_at + stood, 0.0)
        s.until[s.phase == READ] += stood
        decoding = np.flatnonzero(s.phase == DECODE)
        if len(decoding):
            behind = s.goal[decoding] - self.engines.given[s.engine[decoding]]
            s.context[decoding] += s.left[decoding] - behind
            s.left[decoding] = behind
            self._read(decoding, np.full(len(decoding), self.now), s.context[decoding], np.zeros(len(decoding)))
        held = np.flatnonzero(s.phase == HELD)
        s.moment[held] = np.maximum(s.moment[held], self.now)
        self._next_turn(held)

    def forget(self, run: int) -> None:
        """What the engines have in their caches of a run's trajectories is of no use for their next turns."""
        s = self.slots
        s.cold[(s.run == run) & (s.phase != READ) & (s.phase != DECODE)] = True
        if self.routing is not None:
            self.routing.updated(run)

    def running(self) -> Array:
        """Trajectories by engine."""
        s = self.slots
        return np.bincount(s.engine[s.phase != FREE], minlength=self.engines.count)

    def load(self) -> tuple[int, float]:
        """Turns that wait for a place in an engine, and the share of its cache that is taken, of the fullest one."""
        s, engines = self.slots, self.engines
        playing = np.flatnonzero((s.phase == READ) | (s.phase == DECODE))
        running = np.bincount(s.engine[playing], minlength=engines.count)
        held = np.bincount(s.engine[playing], self.contexts()[playing], engines.count)
        waiting = np.maximum(0, running - engines.most).sum() + (s.phase == QUEUED).sum()
        return int(waiting), float((held / engines.room).max())

    def contexts(self) -> Array:
        """Tokens that every trajectory has now."""
        s = self.slots
        made = np.where(s.phase == DECODE, s.left - (s.goal - self.engines.given[s.engine]), 0.0)
        return s.context + made

    # -- time --------------------------------------------------------------------------------------------

    def advance(self, end: float) -> Happened:
        """Move the clock to `end`, at most one tick away."""
        s = self.slots
        begin, self.now = self.now, end
        due = np.flatnonzero(s.until <= end)
        phase = s.phase[due]
        stepped = due[phase == STEP]
        fails = s.turn[stepped] >= s.fails_at[stepped]
        failed, stepped = stepped[fails], stepped[~fails]
        finished = due[phase == SCORE]
        s.until[failed] = s.until[finished] = NEVER
        self.totals.failed += len(failed)
        self.totals.finished += len(finished)
        asking = np.concatenate([self._stepped(stepped), due[phase == RESET]])
        self._ask(asking)
        if not self.standing:
            if self.routing is not None:
                asking = np.concatenate([asking, self._assign(end)])
            read = np.concatenate([due[phase == READ], asking])
            read = read[s.until[read] <= end]
            s.phase[read] = DECODE
            self._decode(begin, end, read)
        for kind, then in (
            (WAIT_STEP, self._act), (WAIT_READ, self._resume_turn), (WAIT_SCORE, self._score),
        ):  # fmt: skip
            for slots in self.lockstep.released(kind):
                then(slots)
        return Happened(finished, failed)

    def _decode(self, begin: float, end: float, fresh: Array) -> None:
        """`fresh` are those that begin within the tick."""
        s, engines = self.slots, self.engines
        where = s.engine[fresh]
        s.goal[fresh] = engines.given[where] + s.left[fresh]
        slots = np.flatnonzero(s.phase == DECODE)
        engine, goal = s.engine[slots], s.goal[slots]
        running = np.bincount(engine, minlength=engines.count)
        tokens = np.bincount(engine, s.context[slots] + s.left[slots] - goal, engines.count) + running * engines.given
        reading = engines.read(begin, end)
        self.totals.busy += np.where(running > 0, end - begin, reading)
        if not len(slots):
            return
        speed, computing = engines.rates(running, tokens, reading / (end - begin))
        self.totals.computing += float(computing.sum()) * (end - begin)
        engines.given += speed * (end - begin)
        if len(fresh):
            s.goal[fresh] += speed[where] * (s.until[fresh] - begin)
            s.until[fresh] = NEVER
            goal = s.goal[slots]
        ahead = engines.given[engine] - goal
        over = ahead >= 0
        done = slots[over]
        if len(done):
            s.moment[done] = end - ahead[over] / speed[engine[over]]
            self._answered(done)

    # -- from one phase to the next ----------------------------------------------------------------------

    def _play(self, slots: Array, domain: Array, problem: Array) -> None:
        s = self.slots
        turns, length, fails_at = self.work.members(domain, problem)
        s.turns[slots], s.length[slots], s.fails_at[slots] = turns, length, fails_at
        s.turn[slots] = 0
        s.context[slots], s.cold[slots] = 0.0, True
        s.until[slots] = self.now + self.work.resets(domain)
        s.phase[slots] = RESET

    def _ask(self, slots: Array) -> None:
        """Ready for a turn: read its prompt, as soon as the run and the engines allow."""
        if not len(slots):
            return
        s = self.slots
        s.moment[slots], s.until[slots] = s.until[slots], NEVER
        self._resume_turn(self.lockstep.hold(slots, WAIT_READ))

    def _resume_turn(self, slots: Array) -> None:
        if self.standing:
            self.slots.phase[slots] = HELD
        else:
            self._next_turn(slots)

    def _next_turn(self, slots: Array) -> None:
        """Ask for the next turn, or for as many as are taken at once."""
        if not len(slots):
            return
        s = self.slots
        read, known = next_turns(s, self.work, slots, self._at_once)
        if self.routing is not None:
            s.phase[slots] = QUEUED
            self.routing.ask(slots, s.moment[slots], s.run[slots], s.domain[slots], s.context[slots])
            return
        self._read(slots, s.moment[slots], read, known)

    def _assign(self, end: float) -> Array:
        """Read the prompts of those that the router finds an engine for; those slots."""
        assert self.routing is not None
        s = self.slots
        slots, engine, fresh, waited = self.routing.assigned()
        if len(slots):
            s.engine[slots] = s.reader[slots] = engine
            read = fresh + self.work.missed[s.domain[slots]] * (s.context[slots] - fresh)
            arrival = np.where(waited, end, s.moment[slots])
            self._read(slots, arrival, read, s.context[slots] - read)
        return slots

    def _read(self, slots: Array, arrival: Array, tokens: Array, known: Array) -> None:
        s = self.slots
        reader = s.reader[slots]
        seconds = self.engines.prompt_seconds(reader, tokens, known)
        until = self.engines.queue(reader, arrival, seconds)
        s.until[slots] = until + tokens * self._kv_seconds if self._kv_seconds else until
        s.phase[slots], s.cold[slots] = READ, False

    def carry_cache(self, seconds_per_token: float) -> None:
        """Prompts are read by other engines than answer them: their cache travels at this cost."""
        self._kv_seconds = seconds_per_token

    def _answered(self, slots: Array) -> None:
        s = self.slots
        s.turn[slots] += s.ahead[slots]
        s.context[slots] += s.left[slots] + unread(s, self.work, slots, s.ahead[slots])
        if self.routing is not None:
            self.routing.answered(slots, s.left[slots])
        self._act(self.lockstep.hold(slots, WAIT_STEP))

    def _act(self, slots: Array) -> None:
        s = self.slots
        s.until[slots] = s.moment[slots] + self.work.steps(s.domain[slots], s.ahead[slots])
        s.phase[slots] = STEP

    def _stepped(self, slots: Array) -> Array:
        """Score those that are through; the others."""
        s = self.slots
        domain = s.domain[slots]
        last = (s.turn[slots] >= s.turns[slots]) | (
            s.context[slots] + self.work.observation[domain] >= self.work.longest[domain]
        )
        over = slots[last]
        if len(over):
            s.moment[over], s.until[over] = s.until[over], NEVER
            self._score(self.lockstep.hold(over, WAIT_SCORE))
        return slots[~last]

    def _score(self, slots: Array) -> None:
        s = self.slots
        s.until[slots] = self.rewards.ends(s.moment[slots], self.work.scores(s.domain[slots]))
        self.totals.tokens += float(s.context[slots].sum())
        s.phase[slots] = SCORE
