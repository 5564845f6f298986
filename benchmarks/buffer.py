"""The sample buffer against raw S3: the same objects through plain boto3 calls, on a server of its own.

    python -m benchmarks.buffer [--quick] --json
    python -m benchmarks.buffer --encodings

A group is 8 trajectories of 1,024 tokens with log-probs and text, about 48 kB as a segment. Both sides use `THREADS`
threads and take turns within every round, so that what else the machine does befalls both; a ratio is the median over
the rounds, and its `spread` the distance of the quartiles. The server runs on the same cores: on a network of its own a
request takes longer, and all ratios come closer to 1. `..._cpu_ms` is this process's own processor time per group.

- `append_over_raw_put`: groups sealed per second (checking, encoding, create-if-absent) over put_object of the same
  bytes, encoded beforehand.
- `get_batch_over_raw_get`: what the trainer does for a batch of 64 groups (poll the log, list, read, summarise, select,
  decode) over get_object of the same 64 objects, before and after.
- `get_batch_100k_over_1k`: the same with 100,000 settled groups in the run's history over that with 1,000, both by a
  reader that is up to date but for the new batch. `--quick` makes the longer history 10,000 and says so in the name.
- Requests: those of a million trajectories written, trained and shown in the progress display, counted in the run,
  with 1, 4 and 8 groups in a segment; the price is AWS's (benchmarks.requests). Checkpoints are not in it.
"""

from __future__ import annotations

import argparse
import http.client
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from benchmarks import encodings
from benchmarks.groups import MEMBERS, make_group
from benchmarks.report import Figure, emit
from benchmarks.requests import PRICED_ON, counted, dollars
from infra.services import supervisor
from infra.services.endpoints import environment
from infra.store import schema
from infra.store.buffer import READERS, SampleBuffer
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from infra.training.batches import Batch, Batches, Limits
from rl.config.infrastructure import StoreSection
from rl.records import StateRef
from rl.selection import DropPolicy
from rl.staleness import StalenessPolicy
from rl.stream import ProblemStream
from rl.trajectory import Group, Uid

BATCH = 64
"""Groups per step."""
THREADS = READERS
TURNS = 4
"""Of each side among the PUTs of a round."""
POLICY = StalenessPolicy(alpha=1, groups_per_step=BATCH, examined_per_step=BATCH)
T = TypeVar("T")
STATE = StateRef(prefix="state/none/", manifest_sha256="0" * 64, full=True)


class Run:
    """One run's prefix: a log whose steps all train `BATCH` groups, a writer and the trainer's reader."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self.store, self.prefix = store, f"benchmark/{name}/"
        self.log = CommitLog(store, self.prefix, "trainer")
        self.log.fence()
        self._commit((), ())
        self.buffer = SampleBuffer(store, self.prefix)
        stream = ProblemStream(0, {"synthetic": 1.0})
        self.batches = Batches(self.log, self.buffer, POLICY, DropPolicy(), stream, Limits(60, 60, 8 * BATCH))

    @property
    def version(self) -> int:
        assert self.log.ledger.head is not None
        return self.log.ledger.head

    def groups(self) -> list[Group]:
        """Those that the next step will train."""
        return [make_group(ordinal, self.version) for ordinal in self._ordinals()]

    def seal(self, groups: Sequence[Group], pool: ThreadPoolExecutor, share: int = 1) -> list[str]:
        """Seal them, `share` to a segment; the keys of the segments."""
        parts = [groups[at : at + share] for at in range(0, len(groups), share)]
        return list(pool.map(lambda part: self.buffer.seal(part, f"g{part[0].uid.ordinal:010d}", 0).key, parts))

    def commit(self, batch: Batch) -> None:
        self._commit(batch.uids, batch.segments)

    def settle_history(self, steps: int) -> None:
        """As many steps as that on top, each of which trained `BATCH` groups. What left the window is but a key to a
        reader, so it is written empty, which a server does faster."""
        keys: list[str] = []
        for _ in range(steps):
            named = [f"groups/{self.version:010d}/g{ordinal:010d}-000000.parquet" for ordinal in self._ordinals()]
            keys += [self.prefix + key for key in named]
            self._commit([Uid(ordinal, 0) for ordinal in self._ordinals()], named)
        newest = schema.encode([make_group(0, self.version - 1, members=1, tokens=256)])
        put_many(self.store, dict.fromkeys(keys[:-BATCH], b"") | dict.fromkeys(keys[-BATCH:], newest))

    def _ordinals(self) -> range:
        return range(self.version * BATCH, (self.version + 1) * BATCH)

    def _commit(self, uids: Sequence[Uid], segments: Sequence[str]) -> None:
        self.log.append_step(state=STATE, weights_sha256="none", alpha=1, trained=uids, segments=segments)


def put_many(store: ObjectStore, bodies: Mapping[str, bytes]) -> None:
    """Many small objects, by signed URLs: a fraction of the client's work of put_object."""
    address = urlsplit(store.client.meta.endpoint_url)
    local = threading.local()

    def put(key: str, body: bytes) -> None:
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        url = urlsplit(store.client.generate_presigned_url("put_object", {"Bucket": store.bucket, "Key": key}))
        local.connection.request("PUT", f"{url.path}?{url.query}", body)
        with local.connection.getresponse() as answer:
            answer.read()
            if answer.status != 200:
                raise RuntimeError(f"PUT {key}: {answer.status} {answer.reason}")

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(put, bodies, bodies.values()))


class Side:
    """What one side of a comparison took, round by round."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    def begin(self) -> None:
        self.wall_s.append(0.0)
        self.cpu_s.append(0.0)

    def add(self, work: Callable[[], T], share: float = 1.0) -> T:
        """Do a part of this round's work, which counts for `share` of what it took."""
        wall, cpu = perf_counter(), process_time()
        done = work()
        self.wall_s[-1] += share * (perf_counter() - wall)
        self.cpu_s[-1] += share * (process_time() - cpu)
        return done


class Rounds:
    """Both sides, round by round. `raw` is a plain boto3 client."""

    def __init__(self, raw: Any, bucket: str, pool: ThreadPoolExecutor) -> None:
        self._raw, self._bucket, self._pool = raw, bucket, pool
        self.raw_put, self.append = Side(), Side()
        self.raw_get, self.get_batch, self.get_batch_long = Side(), Side(), Side()

    def play(self, number: int, short: Run, long: Run) -> None:
        for side in (self.raw_put, self.append, self.raw_get, self.get_batch, self.get_batch_long):
            side.begin()
        keys: list[str] = []
        groups = short.groups()
        for part in range(TURNS):
            some = groups[part::TURNS]
            bodies = {f"raw/{number}/{group.uid}": schema.encode([group]) for group in some}
            put = partial(self._each, self._put, bodies, bodies.values())
            append = partial(short.seal, some, self._pool)
            if (number + part) % 2:
                self.raw_put.add(put)
            keys += self.append.add(append)
            if (number + part) % 2 == 0:
                self.raw_put.add(put)
        there = [short.prefix + key for key in keys]
        long.seal(long.groups(), self._pool)
        self.raw_get.add(partial(self._each, self._get, there), 0.5)
        self._batch(short, self.get_batch)
        self.raw_get.add(partial(self._each, self._get, there), 0.5)
        self._batch(long, self.get_batch_long)

    def _batch(self, run: Run, side: Side) -> None:
        run.commit(side.add(run.batches.next))

    def _each(self, request: Callable[..., object], *arguments: Iterable[Any]) -> None:
        list(self._pool.map(request, *arguments))

    def _put(self, key: str, body: bytes) -> None:
        self._raw.put_object(Bucket=self._bucket, Key=key, Body=body)

    def _get(self, key: str) -> bytes:
        return self._raw.get_object(Bucket=self._bucket, Key=key)["Body"].read()


def compared(name: str, a: Side, b: Side, goal: float, better: Literal["lower", "higher"] = "lower") -> list[Figure]:
    """The ratio of a's times to b's."""
    ratios = [x / y for x, y in zip(a.wall_s, b.wall_s, strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return [Figure(name, median(ratios), "ratio", goal, better), Figure(f"{name}_spread", high - low, "ratio")]


def speed(store: ObjectStore, raw: Any, quick: bool) -> list[Figure]:
    rounds, history, name = (9, 10_000, "10k") if quick else (21, 100_000, "100k")
    short, long = Run(store, "short"), Run(store, "long")
    short.settle_history(-(-1000 // BATCH))
    long.settle_history(-(-history // BATCH))
    with ThreadPoolExecutor(THREADS) as pool:
        warm = Rounds(raw, store.bucket, pool)
        warm.play(-1, short, long)
        measured = Rounds(raw, store.bucket, pool)
        for number in range(rounds):
            measured.play(number, short, long)
    cpu = {name: median(getattr(measured, name).cpu_s) for name in ("raw_put", "append", "raw_get", "get_batch")}
    return [
        *compared("append_over_raw_put", measured.raw_put, measured.append, 0.8, "higher"),
        *compared("get_batch_over_raw_get", measured.get_batch, measured.raw_get, 1.5),
        *compared(f"get_batch_{name}_over_1k", measured.get_batch_long, measured.get_batch, 1.2),
        *(Figure(f"{name}_cpu_ms", spent / BATCH * 1e3, "ms per group") for name, spent in cpu.items()),
        Figure("append_groups_per_s", BATCH / median(measured.append.wall_s), "groups/s"),
        Figure("get_batch_ms", median(measured.get_batch.wall_s) * 1e3, "ms"),
    ]


def cost(store: ObjectStore, share: int) -> list[Figure]:
    """The requests of one step: written, seen by the progress display, read by the trainer, committed."""
    run = Run(store, f"share-{share}")
    shown = SampleBuffer(store, run.prefix)
    with ThreadPoolExecutor(THREADS) as pool, counted(store) as sent:
        begin = perf_counter()
        run.seal(run.groups(), pool, share)
        seal_s = (perf_counter() - begin) / BATCH
        shown.refresh(run.log.ledger, POLICY)
        run.commit(run.batches.next())
    million = Counter({operation: round(n * 1e6 / (BATCH * MEMBERS)) for operation, n in sent.items()})
    print(f"{share} in a segment, per million trajectories: {dict(million)}, prices of {PRICED_ON}")
    return [
        Figure(f"requests_per_million_{share}_in_segment", million.total(), "requests"),
        Figure(f"dollars_per_million_{share}_in_segment", dollars(million), "$"),
        Figure(f"seal_ms_per_group_{share}_in_segment", seal_s * 1e3, "ms"),
    ]


def idle(store: ObjectStore) -> Figure:
    """One look at a log and a buffer without news."""
    run = Run(store, "idle")
    with counted(store) as sent:
        run.buffer.refresh(run.log.sync(), POLICY)
    return Figure("dollars_per_idle_hour_at_2_polls_per_s", dollars(sent) * 2 * 3600, "$")


def main(quick: bool) -> list[Figure]:
    with TemporaryDirectory(prefix="rollmill-benchmark-") as home:
        try:
            services = supervisor.up(home, supervisor.AUTO, ["s3"])
            os.environ.update(environment(services))
            store = ObjectStore.connect(StoreSection())
            store.ensure_bucket()
            shared = [figure for share in (1, 4, 8) for figure in cost(store, share)]
            return [*speed(store, services.need_s3().client(), quick), *shared, idle(store)]
        finally:
            supervisor.down(home)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--encodings", action="store_true", help="sizes and times of candidate encodings instead")
    parser.add_argument("--json", action="store_true", help="accepted for symmetry: the last line always is JSON")
    arguments = parser.parse_args()
    if arguments.encodings:
        emit("encodings", encodings.main())
    else:
        emit("buffer", main(arguments.quick))
