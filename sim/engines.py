"""Engines as a roofline: prompts cost FLOPs, decoding reads weights and cache, a full cache makes sequences wait.

An iteration of continuous batching gives every running sequence one token. It takes the longer of reading
(weights once, the cache of every sequence) and computing, plus a fixed cost. Prompts are read in order of arrival
and go before decoding, which keeps at least a tenth of the time.

Invariants: all methods work on arrays over engines, or over sequences with their engine; an engine never has more
tokens in its cache than fit: what is above waits its turn, in fluid shares.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl.placement import HardwareClass
from sim.config import Efficiency, PoolSection
from sim.profiles import LanguageModel, hardware

PROMPT_SHARE = 0.9
"""Of an engine's time, at most, for reading prompts."""
FAR = 1e9
"""Beyond any moment: keeps the queues of different engines apart."""

Array = np.ndarray


class Engines:
    """All engines of a cluster, pool after pool."""

    def __init__(self, pools: Sequence[PoolSection], model: LanguageModel, efficiency: Efficiency):
        self.pool = np.repeat(np.arange(len(pools)), [p.gpus // p.tensor_parallel for p in pools])
        self.count = len(self.pool)
        self.classes = [p.hardware_class for p in pools]
        self.roles = [p.role for p in pools]
        self._model, self._mixing = model, efficiency.mixing
        self.split = any(role != "both" for role in self.roles)
        """Whether prompts are read by other engines than answer them."""
        self.most = np.array([p.max_sequences for p in pools])[self.pool]
        """Sequences with which each counts as full."""
        wide = np.array([p.tensor_parallel for p in pools], float)[self.pool]
        chips = [hardware(p.hardware) for p in pools]
        flops = np.array([c.flops for c in chips])[self.pool] * wide
        bandwidth = np.array([c.bandwidth for c in chips])[self.pool] * wide * efficiency.decode_bandwidth
        memory = np.array([c.memory for c in chips])[self.pool] * wide
        self.room = (memory * efficiency.memory - model.weight_bytes) / model.kv_bytes
        """Tokens that fit into the cache."""
        self._fixed = efficiency.iteration + efficiency.parallel * np.log2(wide)
        self._dense = (model.touched if model.experts == 1 else _shared(model)) * 2 / bandwidth
        self._experts = (0.0 if model.experts == 1 else model.weight_bytes - 2 * _shared(model)) / bandwidth
        self._cache = model.kv_bytes / bandwidth
        self._compute = model.token_flops / (flops * efficiency.decode_compute)
        self._read = model.token_flops / (flops * efficiency.prefill)
        self._attend = model.attention_flops / (flops * efficiency.prefill)
        self.given = np.zeros(self.count)
        """Tokens that each has given to every sequence that it decoded all along."""
        self.free_at = np.zeros(self.count)
        """When each has read all prompts that wait."""
        self._owed = np.zeros(self.count)
        """Seconds of reading that were asked for and not accounted for yet."""

    def prompt_seconds(self, engine: Array, tokens: Array, history: Array) -> Array:
        """Time of an engine to read `tokens` that follow `history` tokens it has."""
        return tokens * (self._read[engine] + self._attend[engine] * (history + tokens / 2)) / PROMPT_SHARE

    def queue(self, engine: Array, arrival: Array, seconds: Array) -> Array:
        """When each prompt has been read, if they join the queues of their engines as they arrive."""
        if not len(engine):
            return np.zeros(0)
        order = np.argsort(engine * FAR + arrival)
        e, a, s = engine[order], arrival[order], seconds[order]
        total = np.cumsum(s)
        first = np.concatenate(([True], e[1:] != e[:-1]))
        starts = np.flatnonzero(first)
        before = np.repeat((total - s)[starts], np.diff(np.append(starts, len(e))))
        done = total - before  # of this engine's own prompts, up to each
        slack = np.where(first, np.maximum(a, self.free_at[e]), a) - (done - s)
        ends = np.maximum.accumulate(slack + e * FAR) - e * FAR + done
        last = np.append(starts[1:], len(e)) - 1
        self.free_at[e[last]] = ends[last]
        self._owed += np.bincount(engine, seconds, self.count)
        result = np.empty(len(e))
        result[order] = ends
        return result

    def read(self, begin: float, end: float) -> Array:
        """Seconds that each spent on prompts between `begin` and `end`, asked once for every interval."""
        behind = np.maximum(0.0, self.free_at - end)
        done = np.maximum(0.0, self._owed - behind)
        self._owed -= done
        return np.minimum(done, end - begin)

    def rates(self, running: Array, tokens: Array, reading: Array) -> tuple[Array, Array]:
        """Tokens per second that each of the `running` sequences of every engine gets while it spends the share
        `reading` of its time on prompts; `tokens` is what they hold together. And the share of an engine's time in
        which its device computes or reads, and does not wait for the host."""
        over = np.maximum(1.0, tokens / self.room)
        at_once = running / over
        decoding = (1.0 - PROMPT_SHARE * reading) / (1.0 + self._mixing * reading)
        iteration = self.iteration(at_once, tokens / over)
        waits = decoding * self._fixed / iteration
        return decoding / (over * iteration), np.where(running > 0, 1.0 - waits, reading)

    def iteration(self, running: Array, tokens: Array) -> Array:
        """Seconds of one decoding iteration."""
        weights = self._dense
        if self._model.experts > 1:
            missed = (1 - self._model.experts_per_token / self._model.experts) ** running
            weights = weights + self._experts * (1 - missed)
        return self._fixed + np.maximum(weights + self._cache * tokens, self._compute * running)

    def of_class(self, hardware_class: HardwareClass, role: str = "both") -> Array:
        """Indices of the engines of a class that decode (or, by `role`, read prompts)."""
        fits = [
            c is hardware_class and (r == role or r == "both") for c, r in zip(self.classes, self.roles, strict=True)
        ]
        return np.flatnonzero(np.array(fits)[self.pool])


def _shared(model: LanguageModel) -> float:
    """Parameters of a mixture that every token passes: solved from the total and the active ones."""
    share = model.experts_per_token / model.experts
    return max(0.0, (model.touched - share * model.parameters) / (1 - share))


def least_loaded(load: Array, count: int) -> Array:
    """For `count` newcomers, one after another, whichever of the engines has the least; ties to the first.

    `load` is what each has now; the result are positions in it."""
    if count == 0 or not len(load):
        return np.zeros(0, int)
    level = np.sort(load)
    filled = np.cumsum(level) + count
    depth = int(np.ceil((filled / np.arange(1, len(level) + 1)).min())) + 1
    steps = np.arange(depth + 1)[:, None] + np.zeros(len(load), int)
    gaps = np.where(steps >= load, steps, np.iinfo(np.int64).max).ravel()
    chosen = np.argsort(gaps, kind="stable")[:count]
    return chosen % len(load)
