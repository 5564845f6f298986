"""The machine under a virtual clock: trajectories as arrays, advanced a tick at a time.

A slot holds one trajectory and goes

    RESET -> (READ -> DECODE -> STEP) x turns -> SCORE -> free
               ^ or, in lockstep, WAIT for the others of its run before DECODE's turn and STEP's

All but DECODE end at a known moment; DECODE ends when its tokens are there, at the speed that its engine has. A tick
moves every slot over at most one boundary of each kind. Moments inside a tick are kept exactly and time that a slot
could have used before its turn came is credited to it, so a tick need only be shorter than a turn; it costs the same
for one trajectory and for ten thousand.

Invariants
- Only `advance` moves the clock; between two of its calls nothing happens by itself.
- A free slot is in no group; the members of a group are those that were started for it and neither ended nor failed.
- While the engines stand still no token is made and no prompt read; environments and rewards go on.
"""

from __future__ import annotations

import numpy as np

from sim.engines import Engines
from sim.phases import (
    DECODE,
    FREE,
    HELD,
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
from sim.workload import Workload

Array = np.ndarray
NEVER = np.inf


class World:
    """Slots, engines, environments and rewards; no policy."""

    def __init__(self, work: Workload, engines: Engines, rewards: Rewards, tick: float, slots: int = 1024):
        self.work, self.engines, self.rewards, self.tick = work, engines, rewards, tick
        self._kv_seconds = 0.0
        self.now = 0.0
        self.standing = False
        self.lockstep: set[int] = set()
        """Runs whose trajectories take their turns together, and whose rewards wait for the last of them."""
        self.totals = Totals(busy=np.zeros(engines.count))
        self.phase = np.zeros(0, np.int8)
        self._columns = {
            "group": np.int64, "member": np.int64, "run": np.int64, "domain": np.int64, "engine": np.int64,
            "reader": np.int64, "turn": np.int64, "turns": np.int64, "fails_at": np.int64, "until": float,
            "moment": float, "since": float, "left": float, "length": float, "context": float, "cold": bool,
        }  # fmt: skip
        for name, kind in self._columns.items():
            setattr(self, name, np.zeros(0, kind))
        self._free: list[int] = []
        self._grow(slots)

    group: Array
    member: Array
    run: Array
    domain: Array
    engine: Array
    reader: Array
    """The engine that reads its prompts: its own, or one of a prefill pool."""
    turn: Array
    turns: Array
    fails_at: Array
    until: Array
    """When its phase ends, where that is known; else NEVER."""
    moment: Array
    """When it became ready for what it waits for."""
    since: Array
    left: Array
    """Tokens to decode in this turn."""
    length: Array
    context: Array
    cold: Array
    """Whether its engine has nothing of it in the cache."""

    # -- what policies may do ----------------------------------------------------------------------------

    def start(
        self, group: Array, member: Array, run: int, domain: Array, problem: Array, engine: Array, reader: Array
    ) -> None:
        """Begin trajectories now: arrays over them, of group, number within it, domain, problem's length factor, the
        engine that answers them and the one that reads their prompts."""
        count = len(group)
        if count > len(self._free):
            self._grow(max(count, len(self.phase)))
        slots = np.array([self._free.pop() for _ in range(count)])
        self.group[slots], self.member[slots], self.run[slots] = group, member, run
        self.domain[slots], self.engine[slots], self.reader[slots] = domain, engine, reader
        self._play(slots, domain, problem)

    def again(self, slots: Array, problem: Array) -> None:
        """Start failed members afresh."""
        self._play(slots, self.domain[slots], problem)

    def free(self, slots: Array) -> None:
        """Give up slots that finished or failed."""
        self.phase[slots] = FREE
        self.until[slots] = NEVER
        self._free.extend(slots[::-1].tolist())

    def end(self, groups: Array) -> None:
        """Stop everything that still runs for these groups."""
        slots = np.flatnonzero(np.isin(self.group, groups) & (self.phase != FREE))
        self.totals.ended += len(slots)
        self.free(slots)

    def stand(self) -> None:
        """The engines stop."""
        self.standing = True

    def go_on(self, stood: float, forget: bool) -> None:
        """The engines go on after standing still for `stood` seconds; with `forget` under new weights, so that what
        they had in their caches is read again."""
        self.standing = False
        self.totals.stalled += stood
        self.engines.free_at = np.where(self.engines.free_at > self.now - stood, self.engines.free_at + stood, 0.0)
        self.until[self.phase == READ] += stood
        decoding = np.flatnonzero(self.phase == DECODE)
        self.since[decoding] = self.now
        if forget:
            self.cold[(self.phase != READ) & (self.phase != DECODE)] = True
            if len(decoding):
                tokens = self.context[decoding]
                self._read(decoding, np.full(len(decoding), self.now), tokens, np.zeros(len(decoding)))
        held = np.flatnonzero(self.phase == HELD)
        self.moment[held] = np.maximum(self.moment[held], self.now)
        self._next_turn(held)

    def running(self) -> Array:
        """Trajectories by engine."""
        return np.bincount(self.engine[self.phase != FREE], minlength=self.engines.count)

    # -- time --------------------------------------------------------------------------------------------

    def advance(self, end: float) -> Happened:
        """Move the clock to `end`, at most one tick away."""
        begin, self.now = self.now, end
        due = np.flatnonzero(self.until <= end)
        phase = self.phase[due]
        stepped = due[phase == STEP]
        fails = self.turn[stepped] >= self.fails_at[stepped]
        failed, stepped = stepped[fails], stepped[~fails]
        finished = due[phase == SCORE]
        self.until[failed] = self.until[finished] = NEVER
        self.totals.failed += len(failed)
        self.totals.finished += len(finished)
        asking = np.concatenate([self._stepped(stepped), due[phase == RESET]])
        self._ask(asking)
        if not self.standing:
            read = np.concatenate([due[phase == READ], asking])
            read = read[self.until[read] <= end]
            self.phase[read] = DECODE
            self.since[read] = self.until[read]
            self.until[read] = NEVER
            self._decode(begin, end)
        for run in self.lockstep:
            self._release(run)
        return Happened(finished, failed)

    def _decode(self, begin: float, end: float) -> None:
        slots = np.flatnonzero(self.phase == DECODE)
        engine = self.engine[slots]
        running = np.bincount(engine, minlength=self.engines.count)
        tokens = np.bincount(engine, self.context[slots], minlength=self.engines.count)
        reading = self.engines.read(begin, end)
        self.totals.busy += np.where(running > 0, end - begin, reading)
        if not len(slots):
            return
        speed = self.engines.rates(running, tokens, reading / (end - begin))[engine]
        made = speed * (end - self.since[slots])
        left = self.left[slots] - made
        self.left[slots], self.since[slots] = left, end
        self.context[slots] += np.minimum(made, left + made)
        over = left <= 0
        done = slots[over]
        if len(done):
            self.moment[done] = end + left[over] / speed[over]
            self._answered(done)

    # -- from one phase to the next ----------------------------------------------------------------------

    def _play(self, slots: Array, domain: Array, problem: Array) -> None:
        work = self.work
        turns, length, fails_at = work.members(domain, problem)
        self.turns[slots], self.length[slots], self.fails_at[slots] = turns, length, fails_at
        self.turn[slots] = 0
        self.context[slots], self.left[slots], self.cold[slots] = 0.0, 0.0, True
        self.until[slots] = self.now + work.resets(domain)
        self.phase[slots] = RESET

    def _ask(self, slots: Array) -> None:
        """Ready for a turn: read its prompt, as soon as the run and the engines allow."""
        if not len(slots):
            return
        self.moment[slots], self.until[slots] = self.until[slots], NEVER
        together = self._together(slots)
        self.phase[slots[together]] = WAIT_READ
        self._resume_turn(slots[~together])

    def _next_turn(self, slots: Array) -> None:
        if not len(slots):
            return
        domain, had = self.domain[slots], self.context[slots]
        first = self.turn[slots] == 0
        news = np.where(first, self.work.prompt[domain], self.work.observation[domain])
        known = np.where(self.cold[slots], 0.0, had * (1.0 - self.work.missed[domain]))
        self.context[slots] = had + news
        self.left[slots] = self.work.responses(domain, self.length[slots])
        self._read(slots, self.moment[slots], had + news - known, known)

    def _read(self, slots: Array, arrival: Array, tokens: Array, known: Array) -> None:
        reader = self.reader[slots]
        seconds = self.engines.prompt_seconds(reader, tokens, known)
        self.until[slots] = self.engines.queue(reader, arrival, seconds)
        self.phase[slots], self.cold[slots] = READ, False
        if self._kv_seconds:
            self.until[slots] += tokens * self._kv_seconds

    def carry_cache(self, seconds_per_token: float) -> None:
        """Prompts are read by other engines than answer them: their cache travels at this cost."""
        self._kv_seconds = seconds_per_token

    def _answered(self, slots: Array) -> None:
        self.turn[slots] += 1
        together = self._together(slots)
        self.phase[slots[together]] = WAIT_STEP
        self._act(slots[~together])

    def _act(self, slots: Array) -> None:
        self.until[slots] = self.moment[slots] + self.work.steps(self.domain[slots])
        self.phase[slots] = STEP

    def _stepped(self, slots: Array) -> Array:
        """Score those that are through; the others."""
        last = (self.turn[slots] >= self.turns[slots]) | (
            self.context[slots] + self.work.observation[self.domain[slots]] >= self.work.longest[self.domain[slots]]
        )
        over = slots[last]
        if len(over):
            self.moment[over], self.until[over] = self.until[over], NEVER
            late = self._together(over)
            self.phase[over[late]] = WAIT_SCORE
            self._score(over[~late])
        return slots[~last]

    def _score(self, slots: Array) -> None:
        self.until[slots] = self.rewards.ends(self.moment[slots], self.work.scores(self.domain[slots]))
        self.totals.tokens += float(self.context[slots].sum())
        self.phase[slots] = SCORE

    def _release(self, run: int) -> None:
        """Let a run's trajectories go on together, once all of them wait."""
        ours = np.flatnonzero((self.run == run) & (self.phase != FREE))
        phase = self.phase[ours]
        moving = ours[phase < WAIT_READ]
        playing = moving[self.phase[moving] != SCORE]
        if len(playing):
            return
        for kind, then in (
            (WAIT_STEP, self._act), (WAIT_READ, self._resume_turn), (WAIT_SCORE, self._score),
        ):  # fmt: skip
            waiting = ours[phase == kind]
            if len(waiting):
                self.moment[waiting] = self.moment[waiting].max()
                then(waiting)
                return

    def _resume_turn(self, slots: Array) -> None:
        if self.standing:
            self.phase[slots] = HELD
        else:
            self._next_turn(slots)

    def _together(self, slots: Array) -> Array:
        return np.isin(self.run[slots], list(self.lockstep)) if self.lockstep else np.zeros(len(slots), bool)

    def _grow(self, more: int) -> None:
        had = len(self.phase)
        self.phase = np.concatenate([self.phase, np.zeros(more, np.int8)])
        for name, kind in self._columns.items():
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(more, kind)]))
        self.until[had:] = NEVER
        self._free.extend(range(had + more - 1, had - 1, -1))
