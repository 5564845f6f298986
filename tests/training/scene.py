"""A run in a real store, a proxy that only takes notes, and a rollout that seals made-up groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from infra.services.endpoints import S3Endpoint
from infra.store.buffer import SampleBuffer
from infra.store.directories import push_directory
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from infra.training.batches import Batch, Batches, Limits
from infra.training.main import main
from rl.config.load import dumps
from rl.config.run import RunConfig
from rl.records import StateRef, Step
from rl.trajectory import Group
from tests.training.small import make_config, make_group

ROOT = Path(__file__).parents[2]


class NoteTaker:
    """Answers every control call with 200 and notes it; or with what `answers` holds for its path, once each."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, list[int]] = {}
        self.react: Callable[[str, dict[str, Any]], object] = lambda name, body: None
        taker = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                name = self.path.rpartition("/")[2]
                taker.calls.append((name, body))
                code = taker.answer(self.headers.get("Authorization"), name, body)
                error = {"error": "fenced" if code == 403 else "told to", "detail": "told to"}
                answer = json.dumps({} if code == 200 else error).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, key: str | None, name: str, body: dict[str, Any]) -> int:
        """The status of the answer to a call with this key."""
        self.react(name, body)
        waiting = self.answers.get(name, [])
        return waiting.pop(0) if waiting else 200

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Scene:
    """One run; every one has a prefix of its own in the session's bucket."""

    def __init__(self, s3: S3Endpoint, base: Path, work: Path, **changes: Any) -> None:
        store = {"bucket": s3.bucket, "endpoint_url": s3.endpoint_url, "region": s3.region}
        self.config = make_config(name=f"t{uuid.uuid4().hex[:8]}", store=store, **changes)
        self.work, self.base = work, base
        self.environment = {"AWS_ACCESS_KEY_ID": s3.access_key, "AWS_SECRET_ACCESS_KEY": s3.secret_key}
        os.environ.update(self.environment)
        self.store = ObjectStore.connect(self.config.store)
        self.proxy = NoteTaker()
        self.config_file = work / "config.json"
        self.config_file.write_text(dumps(self.config))
        push_directory(self.store, self.config.prefix + "base/", base)
        self._sealed = 0

    def log(self, writer: str = "test") -> CommitLog:
        log = CommitLog(self.store, self.config.prefix, f"{writer}-{uuid.uuid4().hex[:6]}")
        log.sync()
        return log

    def seal(self, groups: Sequence[Group]) -> None:
        SampleBuffer(self.store, self.config.prefix).seal(groups, "rollout", self._sealed)
        self._sealed += 1

    def seal_many(self, count: int, version: int = 0, **options: Any) -> None:
        """Ordinals 0 .. count - 1, one segment for every three."""
        size = self.config.training.group_size
        groups = [make_group(i, size, version=version, **options) for i in range(count)]
        for at in range(0, count, 3):
            self.seal(groups[at : at + 3])

    def commit(self, log: CommitLog, batch: Batch | None = None, weights: str = "0" * 64) -> Step:
        """A step record without training, on a state that is one small file."""
        directory = self.work / uuid.uuid4().hex
        (directory / "model").mkdir(parents=True)
        (directory / "model" / "x").write_text("x")
        prefix = log.state_prefix()
        manifest = push_directory(self.store, self.config.prefix + prefix, directory)
        trained: dict[str, Any] = {} if batch is None else {
            "trained": batch.uids, "segments": batch.segments, "dropped": batch.dropped
        }  # fmt: skip
        ref = state_ref(prefix, manifest)
        return log.append_step(
            state=ref, weights_sha256=weights, alpha=self.config.staleness.alpha, **trained
        )

    def batches(self, log: CommitLog, **options: Any) -> Batches:
        config = self.config
        buffer = SampleBuffer(self.store, config.prefix)
        return Batches(log, buffer, config.policy, config.drops, config.stream, Limits.of(config), **options)

    def train_here(self) -> int:
        """The trainer's main in this process; its exit code."""
        return main([str(self.config_file), "--proxy-url", self.proxy.url])

    def change(self, **changes: Any) -> None:
        """Another configuration for the same run."""
        tree = self.config.model_dump(by_alias=True)
        for key, value in changes.items():
            tree[key] |= value
        self.config = RunConfig.model_validate(tree)
        self.config_file.write_text(dumps(self.config))

    def trainer(self, prelude: str = "") -> subprocess.Popen[str]:
        """The trainer's process; `prelude` is Python run before its main, for failures at a chosen moment."""
        script = f"import sys\n{prelude}\nfrom infra.training.main import main\nsys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", script, str(self.config_file), "--proxy-url", self.proxy.url]
        environment = os.environ | self.environment | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def train(self, prelude: str = "", timeout: float = 120) -> tuple[int, str]:
        """Exit code and stderr of a trainer that ends by itself."""
        process = self.trainer(prelude)
        try:
            _, errors = process.communicate(timeout=timeout)
        finally:
            process.kill()
        return process.returncode, errors

    def steps(self) -> list[Step]:
        return [record for record in self.log().records() if isinstance(record, Step)]

    def close(self) -> None:
        self.proxy.close()


def state_ref(prefix: str, manifest: str) -> StateRef:
    return StateRef(prefix=prefix, manifest_sha256=manifest, full=False)
