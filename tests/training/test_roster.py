"""Many tenants on one base in memory: each as if it were alone, in every order, in and out of memory."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from infra.training import setup, state
from infra.training.adapters import Adapters, AdapterUnusable, policy_of
from infra.training.roster import Roster
from infra.training.snapshot import Snapshot
from infra.training.window import Window, rows_of
from rl.advantages.registry import advantage_function
from rl.config.run import RunConfig
from rl.errors import ConfigError, ProtocolViolation
from rl.trajectory import Group
from tests.training.small import hash_of, make_config, make_group, make_trainer

pytestmark = pytest.mark.slow


def tenant(name: str, lora: dict[str, Any], **changes: Any) -> RunConfig:
    model = {"source": {"type": "service", "name": "here"}, "lora": lora}
    return make_config(name=name, tenant=name, model=model, **changes)


ANNA = tenant("anna", {"rank": 4, "alpha": 8, "dropout": 0.1}, training={"loss": "grpo"}, seed=1)
BEN = tenant(
    "ben",
    {"rank": 2, "alpha": 2, "target_modules": ["q_proj", "down_proj"]},
    training={"loss": "cispo", "kl_beta": 0.1, "weight_decay": 0.1, "learning_rate": 3e-3},
    rollout={"temperature": 0.7},
    seed=2,
)
CLEO = tenant(
    "cleo",
    {"rank": 8, "alpha": 4, "target_modules": ["embed_tokens", "o_proj"]},
    training={"advantage": "rloo", "warmup_steps": 3},
)
ALL = (ANNA, BEN, CLEO)


def batches(config: RunConfig, steps: int = 3) -> list[list[Group]]:
    seed = config.seed
    return [[make_group(10 * step + i, 4, seed=seed, version=step) for i in range(2)] for step in range(steps)]


def window(config: RunConfig, batch: list[Group], base: int) -> Window:
    return Window(base + 1, rows_of(batch, advantage_function(config.training.advantage), base))


@pytest.fixture(scope="module")
def alone(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The hashes of each tenant's versions, from 0 on, in a run of its own."""
    found = {}
    for config in ALL:
        work = tmp_path_factory.mktemp(config.name)
        trainer, source = make_trainer(config, base, work, batches(config))
        first = hash_of(trainer.model)
        trainer.train()
        found[config.name] = [first, *source.hashes]
    return found


class Service:
    """A roster, and a directory in the place of the store."""

    def __init__(self, base: Path, work: Path, most: int = 8) -> None:
        self.base, self.work = base, work
        self.roster = Roster(base, "float32", most, work / "roster")
        self.versions: dict[str, list[str]] = {}

    def _store(self, config: RunConfig, snapshot: Snapshot) -> None:
        state.save(snapshot, torch.nn.Module(), self.base, self._place(config, snapshot.version), 512)
        self.versions.setdefault(config.name, []).append(snapshot.sha256)

    def _place(self, config: RunConfig, version: int) -> Path:
        return self.work / config.name / str(version)

    def begin(self, config: RunConfig) -> None:
        self._store(config, self.roster.begin(config))

    def step(self, config: RunConfig, batch: list[Group]) -> dict[str, float]:
        version = len(self.versions[config.name]) - 1
        member = self.roster.bring(config, version, lambda: self._place(config, version))
        figures, snapshot = self.roster.update(config, member, window(config, batch, version))
        self._store(config, snapshot)
        return figures

    def run(self, order: Sequence[RunConfig]) -> dict[str, list[str]]:
        """Steps of tenants in this order; each begins with its first."""
        left: dict[str, Iterator[list[Group]]] = {config.name: iter(batches(config)) for config in order}
        for config in order:
            if config.name not in self.versions:
                self.begin(config)
            self.step(config, next(left[config.name]))
        return self.versions


@pytest.fixture
def service(base: Path, tmp_path: Path) -> Callable[..., Service]:
    return lambda most=8, name="one": Service(base, tmp_path / name, most)


def test_two_tenants_in_every_order_are_as_if_alone(base: Path, tmp_path: Path, alone: dict[str, list[str]]) -> None:
    orders = sorted(set(permutations("aaabbb")))
    assert len(orders) == 20
    roster = Roster(base, "float32", 8, tmp_path)
    want = roster.base_sha256
    for order in orders:
        one = Service(base, tmp_path / "".join(order))
        one.roster = roster
        for config in (ANNA, BEN):
            roster.forget(config.prefix)
        got = one.run([ANNA if who == "a" else BEN for who in order])
        assert got == {name: alone[name] for name in ("anna", "ben")}, order
    assert roster.base_sha256 == want == Adapters(setup.load_model(base, "float32")).base_sha256


@pytest.mark.parametrize("most", [1, 2, 3])
def test_tenants_that_exceed_memory_come_back_bit_by_bit(
    service: Callable[..., Service], alone: dict[str, list[str]], most: int
) -> None:
    one = service(most)
    want = one.roster.base_sha256
    assert one.run([*ALL, CLEO, ANNA, BEN, *ALL]) == alone
    counts = one.roster.counts
    assert len(one.roster.resident) == most and one.roster.base_sha256 == want
    assert (counts.restores == 0) == (most == 3)
    assert counts.evictions >= counts.restores
    if most == 1:
        assert counts.restores == 5


def test_a_step_changes_its_own_adapter_alone(service: Callable[..., Service]) -> None:
    one = service()
    for config in ALL:
        one.begin(config)

    def held() -> dict[str, str]:
        return {name: member.copy().sha256 for name, member in one.roster._members.items()}

    for config, batch in [(BEN, 0), (ANNA, 0), (BEN, 1), (ANNA, 1)]:
        before, base_before = held(), one.roster.base_sha256
        one.step(config, batches(config)[batch])
        after = held()
        assert {name for name in after if after[name] != before[name]} == {config.prefix}
        assert one.roster.base_sha256 == base_before
        assert all(p.grad is None for p in one.roster._adapters._base.parameters())


def test_what_is_in_memory_is_used_only_at_the_version_that_the_step_builds_on(
    service: Callable[..., Service], alone: dict[str, list[str]]
) -> None:
    """As after a rollback, or after steps of another trainer."""
    one = service()
    one.run([ANNA] * 3)
    del one.versions["anna"][2:]
    one.step(ANNA, batches(ANNA)[1])
    assert one.versions["anna"] == alone["anna"][:3] and one.roster.counts.restores == 1


def test_a_step_that_fails_ends_its_own_tenant_alone(
    service: Callable[..., Service], alone: dict[str, list[str]]
) -> None:
    one = service()
    one.run([ANNA, BEN])
    bad = window(ANNA, batches(ANNA)[1], 1)
    unknown = replace(bad, rows=[replace(row, token_ids=[999] * len(row.token_ids)) for row in bad.rows])
    member = one.roster.bring(ANNA, 1, lambda: pytest.fail("it is here"))
    with pytest.raises(IndexError):
        one.roster.update(ANNA, member, unknown)
    assert one.roster.resident == [BEN.prefix]
    one.step(BEN, batches(BEN)[1])
    one.step(ANNA, batches(ANNA)[1])
    assert one.versions == {"anna": alone["anna"][:3], "ben": alone["ben"][:3]}


def test_an_adapter_that_does_not_fit_is_named_and_leaves_no_trace(
    service: Callable[..., Service], alone: dict[str, list[str]]
) -> None:
    one = service()
    wrong = tenant("wrong", {"rank": 2, "target_modules": ["nothing_like_it"]})
    for order in ((), (ANNA,)):
        one.run(order)
        with pytest.raises(AdapterUnusable, match=r"model.lora: the base can not carry .*nothing_like_it"):
            one.begin(wrong)
    one.step(ANNA, batches(ANNA)[1])
    assert one.versions["anna"] == alone["anna"][:3]


def test_a_checkpoint_of_another_version_is_refused(service: Callable[..., Service]) -> None:
    one = service()
    one.run([ANNA, ANNA])
    one.roster.forget(ANNA.prefix)
    member = one.roster.bring(ANNA, 2, lambda: one._place(ANNA, 1))
    with pytest.raises(state.StateMismatch, match="version 1, not of format 1 and version 2"):
        one.roster.update(ANNA, member, window(ANNA, batches(ANNA)[2], 2))


# -- what several trainers in one process share --------------------------------------------------------


def test_each_tenant_has_its_own_temperature(service: Callable[..., Service], base: Path) -> None:
    """TRL patches it into the forward of the shared model, where the last one would win."""
    one = service()
    hot, cold = (
        tenant(name, {"rank": 2}, rollout={"temperature": temperature})
        for name, temperature in (("hot", 1.3), ("cold", 0.7))
    )
    model = setup.load_model(base, "float32")
    for config in (hot, cold):
        one.begin(config)
    for config in (hot, cold, hot):
        one.roster.forget(config.prefix)
        one.versions.pop(config.name)
        one.begin(config)
        groups = [make_group(i, 4, model=model, temperature=config.rollout.temperature) for i in range(2)]
        assert one.step(config, groups)["fresh_gap_max"] < 1e-5
    assert "forward" not in vars(one.roster._adapters._base)


def test_what_else_draws_random_numbers_changes_nothing(
    service: Callable[..., Service], alone: dict[str, list[str]]
) -> None:
    """Anna's adapter has dropout."""
    one = service()
    one.begin(ANNA)
    for batch in batches(ANNA):
        torch.rand(7), np.random.rand(3), random.random()
        one.step(ANNA, batch)
    assert one.versions["anna"] == alone["anna"]


def test_another_precision_in_the_process_is_refused(
    service: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate has one for all: who makes an Accelerator last changes that of the others, which are made already."""
    one = service()
    one.run([ANNA])
    AcceleratorState._reset_state(True)
    try:
        Accelerator(mixed_precision="bf16", cpu=True)
        with pytest.raises(ConfigError, match=r"mixed precision .bf16.*unset ACCELERATE_MIXED_PRECISION"):
            one.step(ANNA, batches(ANNA)[1])
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        one.begin(BEN)
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"mixed precision .bf16"):
                one.step(BEN, batches(BEN)[0])
        assert one.roster.resident == []
    finally:
        AcceleratorState._reset_state(True)


def test_updates_are_made_on_one_thread(service: Callable[..., Service]) -> None:
    """torch's number of threads, for one, holds for the thread that set it."""
    one = service()
    one.begin(ANNA)
    raised: list[Exception] = []

    def other() -> None:
        try:
            one.step(ANNA, batches(ANNA)[0])
        except ProtocolViolation as error:
            raised.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(30)
    assert "belongs to the thread" in str(raised[0])
    one.step(ANNA, batches(ANNA)[0])


def test_two_trainers_at_one_model_at_once_are_refused(base: Path, tmp_path: Path) -> None:
    """Else one would step its optimizer on gradients of the other's adapter."""
    adapters = Adapters(setup.load_model(base, "float32"))
    first, source = make_trainer(ANNA, base, tmp_path / "a", batches(ANNA), model=adapters.add(ANNA))
    second, _ = make_trainer(BEN, base, tmp_path / "b", batches(BEN), model=adapters.add(BEN))
    finish, raised = source.finish_step, []

    def meanwhile(figures: dict[str, float]) -> None:
        with pytest.raises(ProtocolViolation, match="two trainers train adapters of one model at once") as error:
            second.train()
        raised.append(error)
        finish(figures)

    source.finish_step = meanwhile  # type: ignore[method-assign]
    first.train()
    assert len(raised) == 3


def test_one_adapter_of_a_run_of_its_own_is_on_the_same_base(base: Path) -> None:
    model = policy_of(setup.load_model(base, "float32"), ANNA)
    assert model.active_adapter == "default"
    assert policy_of(setup.load_model(base, "float32"), make_config()).__class__.__name__ == "Qwen3ForCausalLM"
