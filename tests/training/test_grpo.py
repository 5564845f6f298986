"""The trainer's gradient: what it equals, what it does not depend on, what it reports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infra.training import setup, state
from infra.training.snapshot import Snapshots
from rl.trajectory import Group
from tests.training.small import gradients, make_config, make_group, make_trainer

LOSSES = ["grpo", "dr_grpo", "dapo", "bnpo", "cispo"]


def flat(kept: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([kept[name].flatten().double() for name in sorted(kept)])


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def one_step(
    base: Path, work: Path, groups: list[Group], **training: object
) -> tuple[torch.Tensor, dict[str, float]]:
    config = make_config(training=training)
    trainer, source = make_trainer(config, base, work, [groups])
    kept = gradients(trainer)
    trainer.train()
    return flat(kept), source.figures[0]


@pytest.fixture(scope="module")
def groups(base: Path) -> list[Group]:
    """On-policy: sampled log-probs are the model's own."""
    model = setup.load_model(base, "float32")
    return [make_group(i, 4, model=model) for i in range(3)]


@pytest.fixture(scope="module")
def old_groups() -> list[Group]:
    """Far off-policy: log-probs of nobody."""
    return [make_group(i, 4) for i in range(3)]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kl_beta", [0.0, 0.1])
def test_gradient_does_not_depend_on_micro_batches(
    base: Path, tmp_path: Path, old_groups: list[Group], loss: str, kl_beta: float
) -> None:
    whole, figures = one_step(base, tmp_path, old_groups, loss=loss, kl_beta=kl_beta, micro_batch_size=32)
    assert torch.isfinite(whole).all() and whole.norm() > 0
    for size in (1, 3, 8):
        part, again = one_step(base, tmp_path, old_groups, loss=loss, kl_beta=kl_beta, micro_batch_size=size)
        assert difference(part, whole) < 1e-6
        assert again["ess"] == pytest.approx(figures["ess"]) and again["loss"] == pytest.approx(
            figures["loss"], abs=1e-5
        )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_trajectories_without_a_sampled_token_are_trained_as_any(base: Path, tmp_path: Path, size: int) -> None:
    """Their prompt left no room: alone in a micro-batch they have no completion."""
    speechless, other = make_group(0, 4), make_group(1, 4)
    for m in speechless.members:
        for name in ("token_ids", "loss_mask", "logprobs", "versions"):
            del getattr(m, name)[m.prompt_length :]
        m.check()
    part, figures = one_step(base, tmp_path, [speechless, other], loss="grpo", micro_batch_size=size)
    whole, _ = one_step(base, tmp_path, [speechless, other], loss="grpo", micro_batch_size=32)
    assert difference(part, whole) < 1e-6
    assert figures["tokens"] == sum(m.generated_tokens for m in other.members)


def test_gradient_does_not_depend_on_the_order_of_groups(
    base: Path, tmp_path: Path, old_groups: list[Group]
) -> None:
    forth, _ = one_step(base, tmp_path, old_groups)
    back, _ = one_step(base, tmp_path, old_groups[::-1])
    assert difference(back, forth) < 1e-6


@pytest.mark.parametrize("cap", [1.0, 2.0, None])
def test_gradient_is_the_truncated_policy_gradient(
    base: Path, tmp_path: Path, old_groups: list[Group], cap: float | None
) -> None:
    """Against a plain loop without TRL: sum over tokens of min(ratio, cap) * advantage * grad log p, token mean."""
    got, figures = one_step(
        base,
        tmp_path,
        old_groups,
        loss="dapo",
        advantage="dr_grpo",
        correction=None if cap is None else {"cap": cap},
    )
    model = setup.load_model(base, "float32")
    total, tokens, cut = torch.zeros(()), 0, 0
    for group in old_groups:
        mean = sum(group.rewards) / 4
        for m in group.members:
            logs = model(torch.tensor([m.token_ids])).logits[0, :-1].log_softmax(-1)
            logs = logs.gather(1, torch.tensor(m.token_ids[1:])[:, None])[:, 0]
            mask = torch.tensor(m.loss_mask[1:])
            ratio = (logs.detach() - torch.tensor(m.logprobs[1:])).exp()
            weight = ratio.clamp(max=cap) if cap is not None else torch.ones_like(ratio)
            total = total - (logs * weight * mask).sum() * (m.reward - mean)
            tokens += int(mask.sum())
            cut += int(((ratio > (cap or float("inf"))) * mask).sum())
    (total / tokens).backward()
    want = flat({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert difference(got, want) < 1e-5
    assert figures["capped_fraction"] == pytest.approx(cut / tokens)
    assert figures["ratio_max"] > 2


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ratio_is_one_under_equal_versions(base: Path, tmp_path: Path, temperature: float) -> None:
    model = setup.load_model(base, "float32")
    groups = [make_group(i, 4, model=model, temperature=temperature) for i in range(2)]
    trainer, source = make_trainer(
        make_config(rollout={"temperature": temperature}), base, tmp_path, [groups]
    )
    trainer.train()
    assert source.figures[0]["fresh_gap_max"] < 1e-5
    assert source.figures[0]["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert source.figures[0]["ess"] == pytest.approx(1, abs=1e-5)


def test_temperature_of_another_sampler_shows(base: Path, tmp_path: Path) -> None:
    model = setup.load_model(base, "float32")
    groups = [make_group(i, 4, model=model, temperature=0.7) for i in range(2)]
    trainer, source = make_trainer(make_config(), base, tmp_path, [groups])
    trainer.train()
    assert source.figures[0]["fresh_gap_max"] > 0.1


def test_environment_tokens_are_seen_but_not_trained(base: Path, tmp_path: Path, groups: list[Group]) -> None:
    """Changing an environment token changes the gradient (it is attended to); it is not counted as trained."""
    first, figures = one_step(base, tmp_path, groups)
    assert figures["tokens"] == sum(m.generated_tokens for g in groups for m in g.members)
    changed = [make_group(i, 4, model=setup.load_model(base, "float32")) for i in range(3)]
    member = changed[0].members[0]
    at = max(i for i, bit in enumerate(member.loss_mask) if bit == 0)
    member.token_ids[at] = 2 + (member.token_ids[at] - 1) % 46
    second, _ = one_step(base, tmp_path, changed)
    assert difference(second, first) > 1e-4


def test_reference_is_the_initial_policy_after_a_restore(
    base: Path, tmp_path: Path, groups: list[Group]
) -> None:
    for lora in (None, {"rank": 4, "alpha": 8}):
        config = make_config(
            training={"kl_beta": 0.1}, model={"source": {"type": "pretrained", "path": "x"}, "lora": lora}
        )
        trainer, source = make_trainer(config, base, tmp_path / "a", [groups] * 2)
        trainer.train()
        assert source.figures[0]["kl"] == pytest.approx(0, abs=1e-9) and source.figures[1]["kl"] > 1e-4
        saved = tmp_path / str(lora is None)
        snapshot = Snapshots().take(2, trainer.model, trainer.optimizer, trainer.lr_scheduler)
        state.save(snapshot, trainer.model, base, saved, 512)
        again, more = make_trainer(config, base, tmp_path / "b", [groups], version=2, saved=saved)
        again.train()
        assert more.figures[0]["kl"] > source.figures[1]["kl"] / 2


def test_cispo_clips_above_one(base: Path, tmp_path: Path, groups: list[Group]) -> None:
    """TRL reads epsilon_high as a bound on the ratio for cispo: on-policy nothing may be clipped."""
    _, figures = one_step(base, tmp_path, groups, loss="cispo")
    assert figures["clip_fraction"] == 0
