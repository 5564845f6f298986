"""TRL's GRPOTrainer, fed from outside: the losses, clipping, optimizer and data parallelism are TRL's; the data is
ours.

`train()` runs as TRL means it to, but its data loader yields only ticks. The window of a step is asked of the
`Source` in `_prepare_inputs`, at the very moment at which it is trained, so nothing can be read ahead; when the
optimizer has stepped, the source is told.

    tick -> _prepare_inputs -> source.next_window() -> micro-batches -> loss, backward ... -> optimizer
         -> log -> source.finish_step(figures)

Invariants
- A window has as many micro-batches as its rows need; the gradient does not depend on how many
  (`infra.training.window`).
- The correction is applied inside the loss's own forward pass (`infra.training.correction`): TRL 1.16 reads
  `inputs["advantages"]` after it has computed the policy's log-probs, and there they are replaced.
- The reference of the KL term is the initial policy, also after a resume: for full fine-tuning TRL loads it from
  where the model came from (the run's base), for LoRA it is the base with the adapter switched off.
- Trainers may share a model, each with its own adapter (`infra.training.adapters`): the model's forward, which TRL
  patches with the temperature, and the active adapter are a trainer's only while it trains; two at once are refused.
- Computes in the model's own precision. Accelerate has one precision per process, so another one is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from datasets import Dataset
from peft import PeftModel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import use_adapter

from infra.training import ranks, setup
from infra.training.adapters import activate, plain
from infra.training.correction import MAXIMA, SUMS, Statistics, summary, weights
from infra.training.window import Row, Window, collate, deal, loss_scale, padding
from rl.config.run import RunConfig
from rl.errors import ConfigError, ProtocolViolation


class Source(Protocol):
    """Where windows come from. Every rank calls both methods, once per step, in this order."""

    def next_window(self) -> Window:
        """The window of the next step, the same on every rank. Blocks until there is one."""

    def finish_step(self, figures: dict[str, float]) -> None:
        """The optimizer has stepped. `figures` are of the whole window, the same on every rank."""


class StateLoader(Protocol):
    """Restores optimizer and scheduler once TRL has made them."""

    def __call__(self, optimizer: Optimizer, scheduler: LRScheduler) -> None: ...


def arguments(config: RunConfig, steps: int, work_dir: Path, timeout_s: float) -> GRPOConfig:
    """TRL's arguments for `steps` more optimizer steps. What TRL 1.16 switches on by default and we do not
    want (bf16 autocast, gradient checkpointing, reports, saving) is switched off by name."""
    t = config.training
    cpu = not torch.cuda.is_available()
    return GRPOConfig(
        output_dir=str(work_dir),
        max_steps=steps,
        seed=config.seed % 2**32,
        use_cpu=cpu,
        ddp_backend="gloo" if cpu and ranks.world() > 1 else None,
        ddp_timeout=int(timeout_s),
        per_device_train_batch_size=t.group_size,
        num_generations=t.group_size,
        gradient_accumulation_steps=1,
        max_completion_length=config.rollout.max_tokens,
        temperature=config.rollout.temperature,
        loss_type=t.loss,
        epsilon=t.epsilon_low,
        # TRL 1.16 reads it as a bound on the ratio itself for cispo, as a distance from 1 for all others
        epsilon_high=1 + t.epsilon_high if t.loss == "cispo" else t.epsilon_high,
        # with an adapter the reference is the base, which is there; TRL would add a copy of the adapter
        beta=0.0 if config.model.lora is not None else t.kl_beta,
        learning_rate=t.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=t.warmup_steps,
        weight_decay=t.weight_decay,
        adam_beta2=t.adam_beta2,
        max_grad_norm=t.max_grad_norm,
        optim="adamw_torch",
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


class Trainer(GRPOTrainer):
    """See the module. `model` is a whole model, or one with adapters of which the active one is this trainer's.
    `load_state` is called once, when TRL has made optimizer and scheduler, which a further `train` goes on with."""

    def __init__(
        self,
        config: RunConfig,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        args: GRPOConfig,
        source: Source,
        load_state: StateLoader | None = None,
    ) -> None:
        self._shared, self._adapter = plain(model), model.active_adapter if isinstance(model, PeftModel) else None
        with _forward_kept(self._shared):
            super().__init__(
                model=model,
                reward_funcs=_no_reward,
                args=args,
                train_dataset=Dataset.from_dict({"prompt": ["unused"]}),
                processing_class=tokenizer,
            )
            self._forward = self._shared.forward
        self._check_precision()
        self.accelerator.free_memory = self._forget_prepared
        self.beta = config.training.kl_beta
        self.remove_callback(PrinterCallback)
        self._config, self._source, self._load_state = config, source, load_state
        correction = config.training.correction
        self._cap = correction.cap if correction is not None else None
        self._micro: dict[str, torch.Tensor] | None = None
        self._statistics = Statistics(self.accelerator.device)
        self._shape: dict[str, float] = {}

    def _send_telemetry(self) -> None:
        """Never."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL's. Raises ProtocolViolation when another trainer is at the same model."""
        with self._alone():
            return super().train(*args, **kwargs)

    def _check_precision(self) -> None:
        """Whoever made an Accelerator last in this process chose for all of them."""
        if self.accelerator.mixed_precision != "no":
            raise ConfigError(
                f"this process computes in mixed precision ({self.accelerator.mixed_precision}), but the model's dtype "
                f"decides (model.dtype); unset ACCELERATE_MIXED_PRECISION"
            )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The shared model is this trainer's: its forward, and its active adapter."""
        if getattr(self._shared, "trained_by", None) is not None:
            raise ProtocolViolation("two trainers train adapters of one model at once; their updates take turns")
        self._check_precision()
        self._shared.trained_by = self
        try:
            with _forward_kept(self._shared):
                self._shared.forward = self._forward
                if self._adapter is not None:
                    activate(self.model, self._adapter)
                # transformers says so before every micro-batch, and walks over the modules of all adapters for it
                self.model.train()
                self.model.__dict__["train"] = lambda mode=True: self.model
                yield
        finally:
            self.model.__dict__.pop("train", None)
            self._shared.trained_by = None

    def _forget_prepared(self) -> None:
        """What accelerate's own does at the start of every `train`, without collecting garbage: with many tenants in
        the process that takes longer than a step."""
        accelerator = self.accelerator
        accelerator._schedulers, accelerator._optimizers, accelerator._models = [], [], []
        accelerator._dataloaders, accelerator.step = [], 0

    def get_train_dataloader(self) -> DataLoader:
        """One tick per step, the same on every rank."""
        ticks = range(self.args.max_steps)
        return DataLoader(ticks, batch_size=1, collate_fn=lambda items: {"tick": torch.tensor(items)})

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        if self._load_state is not None:
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            self._load_state(optimizer, self.lr_scheduler)
            self._load_state = None
        self._created_lr_scheduler = False  # else the next `train` would make another one
        return prepared

    def _prepare_inputs(self, inputs: dict[str, Any]) -> Any:
        """A tick becomes the micro-batches of this rank, as (tensors, factor on the loss); what is a
        micro-batch already passes."""
        if "tick" not in inputs:
            return inputs
        window = self._source.next_window()
        world, rank = ranks.world(), ranks.rank()
        setup.seed_step(self._config.seed, window.version, rank)
        micro_batches = deal(window.rows, self._config.training.micro_batch_size, world, rank)
        self._statistics = Statistics(self.accelerator.device)
        self._shape = {"micro_batches": len(micro_batches), "padding": padding(micro_batches)}
        return [self._micro_batch(rows, window) for rows in micro_batches]

    def _micro_batch(self, rows: list[Row], window: Window) -> dict[str, torch.Tensor]:
        device, world = self.accelerator.device, ranks.world()
        micro = collate(rows, self._tokenizer.pad_token_id, device)
        micro["num_items_in_batch"] = torch.tensor(float(window.tokens), device=device)
        micro["loss_scale"] = torch.tensor(loss_scale(self.loss_type, rows, window, world), device=device)
        return micro

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Any
    ) -> torch.Tensor:
        """Forward and backward of the whole window; gradients are exchanged with the last micro-batch."""
        micro_batches = self._prepare_inputs(inputs)
        loss = torch.zeros((), device=self.accelerator.device)
        for k, micro in enumerate(micro_batches):
            last = k == len(micro_batches) - 1
            with nullcontext() if last else self.accelerator.no_sync(model):
                loss += super().training_step(model, micro, num_items_in_batch)
        return loss

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.beta != 0.0:
            inputs["ref_per_token_logps"] = self._reference(inputs)
        self._micro = inputs
        try:
            return super()._compute_loss(model, inputs) * inputs["loss_scale"]
        finally:
            self._micro = None

    @torch.no_grad()
    def _reference(self, micro: dict[str, torch.Tensor]) -> torch.Tensor:
        """Log-probs (B, T) of the initial policy."""
        ids = torch.cat([micro["prompt_ids"], micro["completion_ids"]], dim=1)
        mask = torch.cat([micro["prompt_mask"], micro["completion_mask"]], dim=1)
        keep = micro["completion_ids"].size(1)
        if self.ref_model is not None:
            return self._get_per_token_logps_and_entropies(self.ref_model, ids, mask, keep)[0]
        with use_adapter(self.accelerator.unwrap_model(self.model), adapter_name=None):
            return self._get_per_token_logps_and_entropies(self.model, ids, mask, keep)[0]

    def _get_per_token_logps_and_entropies(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if self._micro is not None:
            self._correct(self._micro, result[0].detach(), result[1].detach())
        return result

    def _correct(self, micro: dict[str, torch.Tensor], proximal: torch.Tensor, entropy: torch.Tensor) -> None:
        mask = micro["completion_mask"] * micro["tool_mask"]
        behaviour = micro["sampling_per_token_logps"]
        self._statistics.add(proximal, behaviour, mask, micro["fresh"], entropy, self._cap)
        micro["advantages"] = micro["advantages"][:, None] * weights(proximal, behaviour, mask, self._cap)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL calls this after each optimizer step with loss, gradient norm and learning rate, and once at the
        end with totals, which do not concern a step."""
        super().log(logs, start_time)
        self.state.log_history.clear()
        if "grad_norm" in logs:
            self._source.finish_step(self._figures(logs))

    def _figures(self, logs: dict[str, float]) -> dict[str, float]:
        sums = ranks.reduce_sum(self._statistics.sums).tolist()
        maxima = ranks.reduce_max(self._statistics.maxima).tolist()
        figures = summary(dict(zip(SUMS, sums, strict=True)), dict(zip(MAXIMA, maxima, strict=True)))
        clipped = (
            logs.get("cispo_clip_ratio") if self.loss_type == "cispo" else logs.get("clip_ratio/region_mean")
        )
        named = {
            name: logs[name]
            for name in ("loss", "grad_norm", "learning_rate", "kl")
            if logs.get(name) is not None
        }
        return {**figures, **named, **self._shape, "clip_fraction": clipped or 0.0}


@contextmanager
def _forward_kept(model: PreTrainedModel) -> Iterator[None]:
    """What is set as the model's forward inside is forgotten afterwards."""
    before = model.__dict__.get("forward")
    try:
        yield
    finally:
        model.__dict__.pop("forward", None)
        if before is not None:
            model.forward = before


def _no_reward(**_: Any) -> list[float]:
    raise RuntimeError("rewards come with the groups")
