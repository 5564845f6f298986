"""The trainer's step against bare TRL on the same batch.

    python -m benchmarks.trainer_step [--quick] --json

Both sides are fed one fixed batch (off-policy: its log-probs are not the model's) and run TRL's `train()` with
the same model, optimizer, loss (dapo) and micro-batches; they take turns within one run. Measured is what lies
between two optimizer steps, as CPU time of the process with one torch thread (wall time on a GPU): for us the rows,
dealing, collating, correction and its statistics, for TRL the handing over of tensors made beforehand.

- `ratio_to_trl`: TRL with its own off-policy correction, which computes the same gradient (checked:
  `gradient_difference`): a pass without gradients for the proximal log-probs, the truncated ratio, then the loss.
  We take the proximal log-probs from the loss's own pass, so less than 1 is expected.
- `ratio_to_trl_uncorrected`: TRL without that pass and without correction, as on-policy. It computes less than we
  do; what is above 1 is the price of our data path and statistics.
- `ratio_to_trl_padding`: TRL with correction and its own padding, of the whole batch to one width, in arrival
  order.

Generation, rewards and the store are on neither side.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOTrainer

from benchmarks.report import Figure, emit
from infra.models.tiny import write_tiny
from infra.training import grpo, setup
from infra.training.window import Row, Window, collate, deal, rows_of
from rl.advantages.grpo import advantages
from rl.config.model import TinySection
from rl.config.run import RunConfig
from rl.trajectory import NO_VERSION, Group, Message, Problem, Status, Trajectory, Uid

SIZE = 8
CAP = 2.0


def make_groups(count: int, vocabulary: int) -> list[Group]:
    """Episodes of three turns of unequal length, of a policy that is nobody's."""
    draw = random.Random(0)
    groups = []
    for ordinal in range(count):
        problem = Problem(ordinal, "synthetic", ordinal, ordinal)
        prompt = [draw.randrange(4, vocabulary) for _ in range(draw.randint(20, 60))]
        groups.append(Group.of([_member(draw, problem, prompt, k, vocabulary) for k in range(SIZE)]))
    return groups


def _member(draw: random.Random, problem: Problem, prompt: list[int], k: int, vocabulary: int) -> Trajectory:
    mask = [0] * len(prompt)
    for turn in range(3):
        mask += [1] * draw.randint(5, 50) + [0] * (8 if turn < 2 else 0)
    ids = prompt + [draw.randrange(4, vocabulary) for _ in mask[len(prompt) :]]
    return Trajectory(
        uid=Uid(problem.ordinal, 0),
        member=k,
        problem=problem,
        start_version=0,
        prompt_length=len(prompt),
        token_ids=ids,
        loss_mask=mask,
        logprobs=[-draw.uniform(4, 6) * m for m in mask],
        versions=[0 if m else NO_VERSION for m in mask],
        messages=[Message("user", "")],
        status=Status.TERMINATED,
        turns=3,
        rewards={"outcome": float(k % 2) if k else draw.random()},
    )


class Stopwatch(TrainerCallback):
    """Seconds from the beginning of one optimizer step to the beginning of the next."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.marks.append(now())

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.marks.append(now())

    @property
    def seconds(self) -> float:
        """Of the median step, the first (which makes the optimizer's state) left out."""
        return median(b - a for a, b in zip(self.marks[1:], self.marks[2:], strict=False))


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


class Fixed:
    """The source of our side: the same groups every step."""

    def __init__(self, groups: list[Group]) -> None:
        self._groups = groups

    def next_window(self) -> Window:
        return Window(1, rows_of(self._groups, advantages, 1))

    def finish_step(self, figures: dict[str, float]) -> None:
        pass


class Bare(GRPOTrainer):
    """TRL's own compute on given micro-batches, as `_generate_and_score_completions` prepares them once it has
    rewards. `corrected` does what TRL 1.16 does when it corrects the engine's log-probs (its option
    `vllm_importance_sampling_correction`)."""

    def __init__(self, micro_batches: list[dict[str, torch.Tensor]], corrected: bool, **kwargs: Any) -> None:
        super().__init__(
            reward_funcs=_no_reward, train_dataset=Dataset.from_dict({"prompt": ["-"] * 4096}), **kwargs
        )
        self.remove_callback(PrinterCallback)
        self.use_vllm = corrected
        self._given = micro_batches

    def _send_telemetry(self) -> None:
        pass

    def _prepare_inputs(self, inputs: Any) -> dict[str, torch.Tensor]:
        micro = dict(self._given[self._step % len(self._given)])
        if self.use_vllm:
            self._proximal(micro)
        return micro

    @torch.no_grad()
    def _proximal(self, micro: dict[str, torch.Tensor]) -> None:
        ids = torch.cat([micro["prompt_ids"], micro["completion_ids"]], dim=1)
        attention = torch.cat([micro["prompt_mask"], micro["completion_mask"]], dim=1)
        keep = micro["completion_ids"].size(1)
        old, _, _ = self._get_per_token_logps_and_entropies(self.model, ids, attention, keep)
        mask = micro["completion_mask"] * micro["tool_mask"]
        micro["old_per_token_logps"] = old
        micro["importance_sampling_ratio"] = (
            ((old - micro["sampling_per_token_logps"]) * mask).exp().clamp(max=CAP)
        )


def _no_reward(**_: Any) -> list[float]:
    raise RuntimeError("rewards come with the groups")


def own_padding(
    rows: list[Row], micro_batch_size: int, pad: int, device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """As TRL pads a generation batch: prompts left, completions right, all to one width, in arrival order."""
    left, right = max(r.prompt_length for r in rows), max(len(r.token_ids) - r.prompt_length for r in rows)
    made = []
    for start in range(0, len(rows), micro_batch_size):
        some = rows[start : start + micro_batch_size]
        micro = collate([Row(r.token_ids[r.prompt_length - 1 :], r.loss_mask[r.prompt_length - 1 :],
                             r.logprobs[r.prompt_length - 1 :], r.fresh[r.prompt_length - 1 :], 1, r.advantage)
                         for r in some], pad, device)  # fmt: skip
        wider = right - micro["completion_ids"].size(1)
        for name in ("completion_ids", "completion_mask", "tool_mask", "sampling_per_token_logps"):
            micro[name] = torch.nn.functional.pad(
                micro[name], (0, wider), value=pad if name == "completion_ids" else 0
            )
        prompts = [[pad] * (left - r.prompt_length) + r.token_ids[: r.prompt_length] for r in some]
        masks = [[0] * (left - r.prompt_length) + [1] * r.prompt_length for r in some]
        micro["prompt_ids"] = torch.tensor(prompts, device=device)
        micro["prompt_mask"] = torch.tensor(masks, device=device)
        made.append(micro)
    return made


class Sides:
    """Builds each side's trainer afresh and runs it."""

    def __init__(self, work: Path, groups: int, micro_batch_size: int, steps: int) -> None:
        self._work, self._steps = work, steps
        self._base = work / "base"
        write_tiny(TinySection(), 0, self._base)
        self._tokenizer = setup.load_tokenizer(self._base)
        self._groups = make_groups(groups, len(self._tokenizer))
        self._config = RunConfig.model_validate(
            {
                "name": "bench",
                "domains": [{"name": "synthetic", "environment": "none:None"}],
                "model": {"source": {"type": "pretrained", "path": str(self._base)}},
                "training": {
                    "groups_per_step": groups,
                    "group_size": SIZE,
                    "micro_batch_size": micro_batch_size,
                    "learning_rate": 1e-5,
                    "correction": {"cap": CAP},
                },
            }
        )

    def run(self, side: str) -> tuple[float, torch.Tensor]:
        """CPU seconds per step, and the gradient of the first step."""
        model = setup.load_model(self._base, "float32")
        args = grpo.arguments(self._config, self._steps, self._work / "trl", 60)
        if side == "ours":
            trainer: GRPOTrainer = grpo.Trainer(
                self._config, model, self._tokenizer, args, Fixed(self._groups)
            )
        else:
            micro = self._micro_batches(side, args.device)
            args.gradient_accumulation_steps = args.steps_per_generation = len(micro)
            trainer = Bare(
                micro, side != "uncorrected", model=model, args=args, processing_class=self._tokenizer
            )
        watch = Stopwatch()
        gradient: list[torch.Tensor] = []
        trainer.add_callback(watch)
        clip = trainer._clip_grad_norm

        def keep(model: torch.nn.Module) -> Any:
            if not gradient:
                gradient.append(
                    torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None])
                )
            return clip(model)

        trainer._clip_grad_norm = keep
        trainer.train()
        return watch.seconds, gradient[0]

    def _micro_batches(self, side: str, device: torch.device) -> list[dict[str, torch.Tensor]]:
        rows, size = rows_of(self._groups, advantages, 1), self._config.training.micro_batch_size
        pad = self._tokenizer.pad_token_id
        if side == "padding":
            made = own_padding(rows, size, pad, device)
        else:
            made = [collate(some, pad, device) for some in deal(rows, size, 1, 0)]
        tokens = torch.tensor(float(Window(1, rows).tokens), device=device)
        return [{**micro, "num_items_in_batch": tokens} for micro in made]


def main(quick: bool) -> list[Figure]:
    groups, micro, steps, rounds = (4, 8, 4, 3) if quick else (16, 32, 6, 5)
    setup.prepare_process(1)
    with tempfile.TemporaryDirectory(prefix="rollmill-bench-") as work:
        sides = Sides(Path(work), groups, micro, steps)
        seconds: dict[str, list[float]] = {"ours": [], "corrected": [], "uncorrected": [], "padding": []}
        gradients = {}
        for _ in range(rounds):
            for side, found in seconds.items():
                spent, gradients[side] = sides.run(side)
                found.append(spent)
                print(f"{side:12s} {spent * 1e3:8.1f} ms per step", flush=True)
    ratio = {
        side: median(a / b for a, b in zip(seconds["ours"], values, strict=True))
        for side, values in seconds.items()
        if side != "ours"
    }
    difference = (gradients["ours"] - gradients["corrected"]).norm() / gradients["corrected"].norm()
    return [
        Figure("ratio_to_trl", ratio["corrected"], "ratio", goal=1.05),
        Figure("ratio_to_trl_uncorrected", ratio["uncorrected"], "ratio"),
        Figure("ratio_to_trl_padding", ratio["padding"], "ratio"),
        Figure("gradient_difference", float(difference), "relative", goal=1e-5),
        *(Figure(f"{side}_step", median(values), "s") for side, values in seconds.items()),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller batch, fewer rounds")
    parser.add_argument(
        "--json", action="store_true", help="accepted for symmetry: the last line always is JSON"
    )
    emit("trainer_step", main(parser.parse_args().quick))
