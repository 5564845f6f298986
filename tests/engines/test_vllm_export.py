"""What `rollmill export` writes is served by vLLM, by the command that its last line tells."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from infra.compute import lifeline
from infra.engines.vllm_install import find
from infra.models.tiny import write_tiny
from infra.services.processes import free_port
from infra.store.directories import push_directory
from rl.config.model import TinySection
from tests.engines.tiny_models import load, save_adapter, teacher_forced
from tests.flows.conftest import Desk, desk  # noqa: F401  the fixture

START_S = 600.0
SAID = [{"role": "user", "content": "start 10 add 3"}]
TOKENS = 6


@contextmanager
def serving(told: str, home: Path, **where: Path) -> Iterator[httpx.Client]:
    """A server by a told command line, with `where` in place of its words in capitals."""
    words = [str(where.get(word, word)) for word in shlex.split(told)]
    assert words[:2] == ["vllm", "serve"], told
    port = free_port(set())
    command = [str(find().python), "-m", "vllm.entrypoints.cli.main", *words[1:], "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "4"]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    log = home / "vllm.log"
    process = lifeline.spawn(["infra.engines.vllm_child", *command], log, env)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=120) as client:
            end = time.monotonic() + START_S
            while not _healthy(client):
                assert process.poll() is None and time.monotonic() < end, lifeline.tail(log, 30)
                time.sleep(0.5)
            yield client
    finally:
        lifeline.stop(process)


def _healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def answer(client: httpx.Client, model: str) -> tuple[list[int], list[float], list[int]]:
    """The likeliest answer to `SAID`, by the model's own chat template: prompt, log-probs, answer."""
    body: dict[str, Any] = {
        "model": model,
        "messages": SAID,
        "max_tokens": TOKENS,
        "temperature": 0,
        "logprobs": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answered = client.post("/v1/chat/completions", json=body)
    assert answered.status_code == 200, answered.text
    tree = answered.json()
    choice = tree["choices"][0]
    return tree["prompt_token_ids"], [t["logprob"] for t in choice["logprobs"]["content"]], choice["token_ids"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_an_export_is_served_by_vllm(desk: Desk, tmp_path: Path) -> None:  # noqa: F811
    write_tiny(TinySection(hidden_size=64, layers=2), 0, made := tmp_path / "made")
    adapter = save_adapter(tmp_path / "adapter", made, seed=1)
    push_directory(desk.run.store, f"{desk.run.prefix}base/", made)
    desk.run.model = adapter
    desk.run.steps(1)
    base, ours, whole = (tmp_path / name for name in ("base", "ours", "whole"))
    desk.good("export", "frozen_lake", "base", "--to", str(base))
    told = desk.good("export", "frozen_lake", "--to", str(ours))
    said = desk.good("export", "frozen_lake", "--merged", "--to", str(whole))

    tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    prompt = tokenizer.apply_chat_template(SAID, add_generation_prompt=True, return_dict=False)
    adapter_line = re.search(r"vllm serve .*?(?=;)", told)
    assert adapter_line is not None, told
    with serving(adapter_line[0], tmp_path / "one", BASE=base) as client:
        given, found, tokens = answer(client, "mine")
    assert given == prompt
    assert found == pytest.approx(teacher_forced(load(base, ours), prompt, tokens, 1.0), abs=1e-4)
    assert found != pytest.approx(teacher_forced(load(base), prompt, tokens, 1.0), abs=1e-2), "it is the adapter's"

    whole_line = re.search(r"vllm serve .*", said)
    assert whole_line is not None, said
    with serving(whole_line[0], tmp_path / "two") as client:
        _, merged, same = answer(client, str(whole))
    assert same == tokens and merged == pytest.approx(found, abs=1e-3)
