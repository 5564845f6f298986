"""The optimizer's side: algorithm, batch, correction, checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rl.config.base import Section


class CorrectionSection(Section):
    """Decoupled off-policy correction: the ratio of the proximal to the behaviour policy, truncated
    (truncated importance sampling, per token)."""

    cap: Annotated[float, Field(ge=1)] = 2.0
    """Ratios above are cut to this."""


class TrainingSection(Section):
    """One optimizer step trains `groups_per_step` groups of `group_size` trajectories."""

    steps: Annotated[int, Field(ge=1)] = 100
    """The version to stop at: optimizer steps in all, a resumed run's earlier and any rolled-back ones included."""
    groups_per_step: Annotated[int, Field(ge=1)] = 16
    """Groups in a batch."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Trajectories per group (G)."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Constant after `warmup_steps`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW."""
    adam_beta2: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """AdamW."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Clipping of the global gradient norm."""
    advantage: str = "grpo"
    """grpo, dr_grpo, rloo, or `module:attribute`."""
    loss: Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo"] = "dapo"
    """TRL's `loss_type`."""
    epsilon_low: Annotated[float, Field(gt=0)] = 0.2
    """Lower clip range."""
    epsilon_high: Annotated[float, Field(gt=0)] = 0.28
    """Upper clip range (DAPO's clip-higher)."""
    kl_beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term against the initial policy; 0 keeps no reference model."""
    dynamic_sampling: bool = True
    """Do not train groups whose rewards are all equal; they are counted by name."""
    max_flat_groups: Annotated[int, Field(ge=1)] = 2000
    """With dynamic sampling: so many groups in a row without signal end the run by name, for a policy that always
    or never succeeds learns nothing."""
    examine_factor: Annotated[float, Field(ge=1)] = 1.0
    """With dynamic sampling: up to this many times `groups_per_step` groups are looked at to fill a batch.
    1 trains whatever of one batch has signal; larger values refill it (DAPO)."""
    correction: CorrectionSection | None = CorrectionSection()
    """Off-policy correction; None trusts the behaviour policy."""
    micro_batch_size: Annotated[int, Field(ge=1)] = 32
    """Trajectories per forward and backward pass, per process."""
    processes: Annotated[int, Field(ge=1)] = 1
    """Data-parallel trainer processes (`accelerate launch`)."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 1
    """Every so many versions the optimizer state is stored too; others are replayed from the log."""
    threads: Annotated[int, Field(ge=1)] = 1
    """torch threads per trainer process."""
