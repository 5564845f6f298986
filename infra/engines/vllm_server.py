"""One `vllm serve` process: started, watched and ended.

    server = VLLMServer(model_dir, home=work_dir, port=port, key=key, max_loras=4)
    with server:                            # start(), then close()
        server.wait_ready(stop)             # minutes on a CPU
        engine = VLLMEngine(server.url, key, model_dir=model_dir, ...)

Invariants
- It listens on `host`, loopback unless told otherwise, and answers nothing but /health without the key, which is in its
  environment alone.
- It ends with `close`, and with this process, however that ends; what a killed predecessor with the same `home` left is
  ended at the start.
- CPU or GPU is a fact of the vLLM that is installed (`vllm_install.find`), not another path of this code.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

from infra.compute import lifeline
from infra.engines.errors import EngineDidNotStart
from infra.engines.vllm_install import Installation, find
from infra.services import processes
from infra.services.service import HOST, url

BACKEND = "rollmill_files"
"""The plug-in's weight-transfer back end (`plugin/rollmill_vllm`)."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM reserves memory for."""
READY_S = 900.0
STREAM_INTERVAL = 8
"""Tokens per message of a server: each message costs it as much as a token of a small model."""
NAME = "vllm"
EVERYWHERE = "0.0.0.0"
POLL_S = 0.25
STOP_S = 15.0
TAIL = 30
"""Lines of the log in an error: vLLM's last ones only point to the cause above them."""

Role = Literal["kv_producer", "kv_consumer", "kv_both"]


def spare_slots(cpu: bool) -> int:
    """Adapter slots above those of the tenants: one to change over, and on a CPU one for the base (`vllm.py`)."""
    return 2 if cpu else 1


class VLLMServer:
    """`home` is a directory of this server alone; its log is `vllm.log` there. Nothing runs before `start`.

    host: the address that it listens on; `url` is where this machine reaches it.
    max_loras: tenants with an adapter, 0 for none; `max_lora_rank` the largest rank.
    gpu_memory_utilization: share of the GPU's memory; without a GPU `cpu_cache_gib` holds the cache of keys and values.
    kv_role: with one, keys and values can come from or go to other servers (NIXL; `side_port` is its port on loopback).
    extra_args, env: more of `vllm serve`'s arguments and environment; the last of an argument given twice counts.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        home: Path,
        port: int,
        key: str,
        host: str = HOST,
        dtype: str = "float32",
        max_loras: int = 0,
        max_lora_rank: int = 16,
        max_num_seqs: int = 64,
        gpu_memory_utilization: float = 0.85,
        cpu_cache_gib: int = 1,
        max_model_len: int | None = None,
        kv_role: Role | None = None,
        side_port: int | None = None,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        ready_s: float = READY_S,
    ):
        self.url = url(port) if host in (HOST, EVERYWHERE) else f"http://{host}:{port}"
        self.key = key
        self._host = host
        self.log = home / "vllm.log"
        self._model_dir, self._home, self._port, self._ready_s = model_dir.resolve(), home, port, ready_s
        self._dtype, self._max_loras, self._rank = dtype, max_loras, max_lora_rank
        self._sequences, self._length = max_num_seqs, max_model_len
        self._gpu_share, self._cpu_gib = gpu_memory_utilization, cpu_cache_gib
        self._role, self._side_port = kv_role, side_port
        self._extra, self._env = tuple(extra_args), dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = 0.0

    # -- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process; `wait_ready` tells when it answers. Raises EngineNotInstalled, EngineDidNotStart."""
        processes.end(self._home, NAME, None, grace_s=STOP_S)
        if not processes.port_free(self._port):
            holder = processes.port_holder(self._port) or "another process"
            raise EngineDidNotStart(f"vLLM: port {self._port} is in use by {holder}; choose another")
        installation = find()
        self._process = lifeline.spawn(
            ["infra.engines.vllm_child", *self.command(installation)], self.log, self.environment(installation)
        )
        self._deadline = time.monotonic() + self._ready_s

    def wait_ready(self, stop: threading.Event | None = None) -> bool:
        """Until it answers; False if `stop` was set before. Raises EngineDidNotStart with the end of its log."""
        stop = stop or threading.Event()
        while not self._answers():
            if not self.alive:
                raise EngineDidNotStart(f"vLLM ended before it answered; the end of {self.log}:\n{self._tail()}")
            if time.monotonic() > self._deadline:
                raise EngineDidNotStart(f"vLLM does not answer {self._ready_s:.0f} s after its start:\n{self._tail()}")
            if stop.wait(POLL_S):
                return False
        return True

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Of the process that watches the server and leads its group."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End it and all that it started; idempotent."""
        if self._process is not None:
            lifeline.stop(self._process, STOP_S)
            self._process = None
        processes.end(self._home, NAME, None, grace_s=0.0)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tail(self) -> str:
        return lifeline.tail(self.log, TAIL)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    # -- what is started ---------------------------------------------------------------------------------------

    def command(self, installation: Installation) -> list[str]:
        """The whole command line."""
        options: dict[str, str | int | float | None] = {
            # another one in each life of a server, so that nobody takes a restarted one for what it was before
            "--served-model-name": f"base-{secrets.token_hex(4)}",
            "--host": self._host,
            "--port": self._port,
            "--dtype": self._dtype,
            "--max-num-seqs": self._sequences,
            "--max-model-len": self._length,
            "--logprobs-mode": "processed_logprobs",
            # the model's own defaults of top-p and top-k must not shape what is sampled
            "--generation-config": "vllm",
            "--stream-interval": STREAM_INTERVAL,
            # of what is sampled without a seed of its own: no two servers may draw the same
            "--seed": secrets.randbelow(2**31),
            "--weight-transfer-config": json.dumps({"backend": BACKEND}),
            "--middleware": "rollmill_vllm.guard.Guard",
        }
        switches = ["--skip-tokenizer-init", "--enable-scale-out", "--enable-prefix-caching"]
        switches += ["--disable-uvicorn-access-log"]
        if installation.cpu:
            switches.append("--enforce-eager")
        else:
            options["--gpu-memory-utilization"] = self._gpu_share
        if self._max_loras:
            switches.append("--enable-lora")
            slots = self._max_loras + spare_slots(installation.cpu)
            options |= {"--max-loras": slots, "--max-cpu-loras": 2 * slots}
            options["--max-lora-rank"] = next((rank for rank in RANKS if rank >= self._rank), self._rank)
        if self._role is not None:
            options["--kv-transfer-config"] = json.dumps(self._transfer(installation))
        given = [text for name, value in options.items() if value is not None for text in (name, str(value))]
        module = [str(installation.python), "-m", "vllm.entrypoints.cli.main", "serve", str(self._model_dir)]
        return [*module, *given, *switches, *self._extra]

    def environment(self, installation: Installation) -> dict[str, str]:
        """What is added to this process's environment."""
        ours = {
            processes.MARK: processes.mark(self._home, NAME),
            "VLLM_API_KEY": self.key,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(self._cpu_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
        }
        if installation.cpu:
            ours["TORCHDYNAMO_DISABLE"] = "1"  # else one small function is compiled for half a minute
        if self._side_port is not None:
            ours |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._side_port)}
        return ours | self._env

    def _transfer(self, installation: Installation) -> dict[str, str | None]:
        return {
            "kv_connector": "NixlConnector",
            "kv_role": self._role,
            "kv_buffer_device": "cpu" if installation.cpu else "cuda",
            # when the peer is gone, the prompt is computed here instead
            "kv_load_failure_policy": "recompute",
        }
