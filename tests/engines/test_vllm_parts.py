"""The parts of the vLLM engine that need no server."""

from __future__ import annotations

import dataclasses
import json
import random
import socket
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from infra.engines import vllm_install
from infra.engines.errors import (
    BadRequest,
    EngineDidNotStart,
    EngineNotInstalled,
    NoAdapterSlot,
    NonFiniteLogits,
    UnknownPolicy,
    WeightMismatch,
)
from infra.engines.protocol import Prefilled, Sampling
from infra.engines.vllm_adapters import BURIED, AdapterTable
from infra.engines.vllm_config import vllm_server
from infra.engines.vllm_facts import Facts
from infra.engines.vllm_files import BaseModel
from infra.engines.vllm_flight import Flight
from infra.engines.vllm_install import Installation
from infra.engines.vllm_server import BACKEND, VLLMServer
from infra.engines.vllm_wire import Segment, read_event
from rl.config.engine import VLLMEngineSection
from rl.errors import GenerationFailure
from tests.engines.tiny_models import save_adapter
from tests.proxy.conftest import make_config

ENGINE = {"type": "vllm", "max_batch": 16, "max_adapters": 3, "threads": 2}
GOOD = Facts("base-1", False, 640, "processed_logprobs", "vllm", BACKEND, slots=4, max_rank=16)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"logprobs_mode": "raw_logprobs"}, BadRequest, "--logprobs-mode raw_logprobs"),
        ({"generation_config": "auto"}, BadRequest, "--generation-config auto"),
        ({"backend": "nccl"}, BadRequest, "--weight-transfer-config nccl"),
        ({"slots": 3}, NoAdapterSlot, "--max-loras 3; 3 adapters need 4"),
        ({"cpu": True}, NoAdapterSlot, "--max-loras 4; 3 adapters need 5"),
        ({"max_rank": 8}, BadRequest, "--max-lora-rank 8; 16 is needed"),
    ],
)
def test_a_server_that_was_started_otherwise_is_refused(change, error, text):
    GOOD.check(3, 16)
    with pytest.raises(error, match=text):
        dataclasses.replace(GOOD, **change).check(3, 16)


def test_names_and_paths_of_adapters_never_come_again_and_go_when_nothing_holds_them(tmp_path):
    source = tmp_path / "files"
    source.mkdir()
    (source / "adapter_config.json").write_text("{}")
    table, seen = AdapterTable(1, tmp_path / "staging"), []
    for version in [*range(BURIED + 3), 2]:
        adapter = table.stage("ada", version, source)
        assert table.stage("ada", version, source) is adapter
        before = table.switch(adapter)
        seen.append(adapter)
        held = table.hold("ada")
        assert held is adapter
        if before is not None:
            assert not table.idle(before) and table.release(before)
            table.bury(before)
    assert len({a.name for a in seen}) == len({a.directory for a in seen}) == len(seen)
    assert [a.directory.exists() for a in seen] == [False] * (len(seen) - BURIED - 1) + [True] * (BURIED + 1)
    ready = [table.stage("ada", version, source) for version in range(100, 105)]  # prefetched, and never served
    assert [a.directory.exists() for a in ready] == [False, False, False, True, True]
    with pytest.raises(WeightMismatch, match="can not be copied"):
        table.stage("ada", 105, tmp_path / "nothing")
    with pytest.raises(NoAdapterSlot, match="tenant 'bob' needs a slot"):
        table.stage("bob", 0, source)
    with pytest.raises(UnknownPolicy, match="'bob' has no version"):
        table.hold("bob")


segments = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=4), st.integers(0, 3), st.booleans()), min_size=1, max_size=12
)


@given(segments, st.integers(1, 20), st.integers(0, 9), st.integers(0, 2**63 - 1))
def test_a_flight_grows_by_whole_segments_and_ends_once(parts, room, stop, seed):
    """Each part: tokens that a server sends under a version, and whether the caller aborts then."""
    kv = Prefilled(parts[0][1], {"from": "there"})
    flight = Flight("r", "t", [1, 2, 3], Sampling(0.7, room, (stop,), seed), 20, kv)
    made: list[tuple[int, int]] = []
    seeds, lengths = [], []
    for tokens, version, aborted in parts:
        rest = flight.rest(random.Random(0))
        assert rest.max_new_tokens == min(room, 17) - len(made) > 0
        seeds.append(rest.seed)
        lengths.append(len(made))
        assert flight.fetchable(version) == (kv.params if len(seeds) == 1 else None)
        sent = tokens[: rest.max_new_tokens]
        sent = sent[: sent.index(stop) + 1] if stop in sent else sent
        flight.add(Segment(sent, [-1.0] * len(sent)), version)
        made += [(token, version) for token in sent]
        flight.aborted = aborted
        flight.settle("abort")
        if flight.finish is not None:
            break
    result = flight.result(flight.finish or "abort")
    assert result.token_ids == [token for token, _ in made] and len(result.logprobs) == len(made)
    assert spread(result.version_spans, len(made)) == [version for _, version in made]
    assert seeds[0] == seed and len(set(seeds)) == len(set(lengths)), "what was drawn once is not drawn again"
    assert (flight.finish == "stop") == (bool(made) and made[-1][0] == stop)
    if flight.finish == "length":
        assert len(made) == min(room, 17)


def spread(spans: list[tuple[int, int]], count: int) -> list[int]:
    """The version of each token."""
    ends = [start for start, _ in [*spans, (count, 0)][1:]]
    return [version for (start, version), end in zip(spans, ends, strict=True) for _ in range(start, end)]


def event(**choice: object) -> bytes:
    defaults = {"index": 0, "logprobs": None, "finish_reason": None, "token_ids": None, "weight_versions": None}
    return b"data: " + orjson.dumps({"choices": [defaults | choice]}) + b"\n"


def test_a_stream_is_read_token_by_token():
    segment = Segment()
    for line in [
        b"\n",
        event(token_ids=[4, 5], logprobs={"content": [{"logprob": -1.5}, {"logprob": 1e-7}]}),
        event(finish_reason="abort", token_ids=[], weight_versions=[{"version": "n:3", "start": 0, "end": 2}]),
        b"data: [DONE]\n",
    ]:
        read_event(line, segment)
    assert segment == Segment([4, 5], [-1.5, 0.0], "abort", {"n:3"})
    with pytest.raises(GenerationFailure, match="EngineCore"):
        read_event(b'data: {"error": {"message": "EngineCore is gone"}}', segment)
    with pytest.raises(NonFiniteLogits):
        read_event(event(token_ids=[4], logprobs={"content": [{"logprob": -9999.0}]}), segment)


@pytest.mark.parametrize("option", ["alpha_pattern", "use_dora", "modules_to_save", "bias", "rank"])
def test_adapters_that_vllm_would_serve_otherwise_than_peft_are_refused(base, tmp_path, option):
    directory = save_adapter(tmp_path / "a", base, seed=0)
    BaseModel(base).check_adapter(directory, 8)
    file = directory / "adapter_config.json"
    changes = {"alpha_pattern": {"q_proj": 3}, "use_dora": True, "modules_to_save": ["lm_head"], "bias": "all"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {option: changes.get(option)}))
    with pytest.raises(WeightMismatch, match=option):
        BaseModel(base).check_adapter(directory, 2 if option == "rank" else 8)


def test_the_adapter_that_stands_for_the_base_changes_nothing(base, tmp_path):
    table = AdapterTable(1, tmp_path / "staging")
    zero = table.stage_zero(table.stage("ada", 0, save_adapter(tmp_path / "a", base, seed=0)))
    tensors = load_file(zero.directory / "adapter_model.safetensors")
    assert len(tensors) == 2 and not any(tensor.any() for tensor in tensors.values())
    config = json.loads((zero.directory / "adapter_config.json").read_text())
    assert {name.split(".")[-3] for name in tensors} == set(config["target_modules"])


@pytest.mark.slow  # it needs `make vllm`
def test_an_environment_of_another_lock_is_not_used(monkeypatch):
    found = vllm_install.find()
    assert found.fault() is None
    monkeypatch.setattr(vllm_install, "fingerprint", lambda: "another")
    with pytest.raises(EngineNotInstalled, match="rollmill engine install --cpu"):
        vllm_install.find()


@pytest.mark.parametrize(("lora", "slots"), [(None, 0), ({"rank": 12}, 3 + 2)])
def test_server_and_engine_of_one_configuration_fit_each_other(base, tmp_path, lora, slots):
    config = make_config(model={"source": {"type": "pretrained", "path": "unused"}, "lora": lora}, engine=ENGINE)
    assert isinstance(config.engine, VLLMEngineSection)
    server = vllm_server(config, config.engine, base, tmp_path, 8765, "k", host="10.0.0.7")
    command = server.command(Installation(Path("python"), "0.32.0+cpu", "PATH", "1"))
    given = {name: command[at + 1] for at, name in enumerate(command[:-1]) if name.startswith("--")}
    assert (given["--host"], server.url) == ("10.0.0.7", "http://10.0.0.7:8765")
    assert (given["--max-model-len"], given["--max-num-seqs"]) == (str(config.rollout.max_tokens), "16")
    assert server.environment(Installation(Path("python"), "0.32.0", "PATH", "1"))["OMP_NUM_THREADS"] == "2"
    rank = int(given.get("--max-lora-rank", 0))
    facts = dataclasses.replace(GOOD, cpu=True, slots=int(given.get("--max-loras", 0)), max_rank=rank)
    assert facts.slots == slots
    facts.check(0 if lora is None else config.engine.max_adapters, 16 if lora is None else lora["rank"])


def test_a_port_in_use_is_named_before_anything_starts(base, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = VLLMServer(base, home=tmp_path, port=taken.getsockname()[1], key="k")
        with pytest.raises(EngineDidNotStart, match=f"port {taken.getsockname()[1]} is in use"):
            server.start()
    assert not server.alive and not Path(server.log).exists()
