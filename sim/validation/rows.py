"""The published numbers that the simulator is held against, and which of them it was fitted to.

Sources: RollArt (arXiv 2512.22560), MARLaaS (arXiv 2605.08527; only what its abstract says is public). A number that
is published as a range over models or settings is kept as a range; a prediction inside it has error 0, and one
outside is off by its distance to the nearer end.

Invariants: at most a third of the rows is fitted; a fitted row says what was fitted to it; every row has one name.
"""

from __future__ import annotations

from dataclasses import dataclass

GOAL = 0.10
"""Relative error up to which a prediction counts as right."""


@dataclass(frozen=True)
class Row:
    """One published number."""

    name: str
    low: float
    high: float
    unit: str
    fitted: str | None = None
    """The parameters that were chosen by it; None for a prediction."""

    def error(self, predicted: float) -> float:
        """Relative; negative when the prediction is too low, 0 inside the published range."""
        if predicted < self.low:
            return predicted / self.low - 1.0
        return predicted / self.high - 1.0 if predicted > self.high else 0.0


def _one(name: str, value: float, unit: str = "x", fitted: str | None = None) -> Row:
    return Row(name, value, value, unit, fitted)


BY_EXPERIMENT: dict[str, tuple[Row, ...]] = {
    "swe_step": (
        # One synchronous SWE step, 8B on 32 H800, 128 trajectories, environments in lockstep.
        _one("swe step", 365.7, "s", "response_tokens of swe"),
        _one("swe generation share", 0.538, "share", "response_tokens of swe"),
        _one("swe training share", 0.231, "share", "efficiency.train"),
        _one("swe reset share", 0.146, "share", "reset of swe"),
        _one("swe step with failures", 513.3, "s", "tail of the reset of swe"),
        _one("lockstep over trajectory-wise rollout", 1.213),
    ),
    "affinity": (
        # 2 H800 over 6 H20, which cost about the same: time to generate a batch.
        _one("frozen lake: H800 over H20", 0.53, fitted="prefix_hit of frozen_lake"),
        Row("math: H20 over H800", 0.49, 0.79, "x"),
    ),
    "rewards": (
        # Rewards on GPUs of their own, or as functions.
        _one("dedicated reward utilisation", 0.074, "share", "score of the judge"),
        _one("step with dedicated over serverless rewards", 158 / 77),
    ),
    "weights": (
        # Weights, by model: seconds.
        _one("tcp 8B", 6.9, "s", "tcp_bandwidth"),
        _one("tcp 14B", 14.4, "s", "tcp_bandwidth"),
        _one("tcp 32B", 29.6, "s"),
        _one("rdma 8B", 5.5, "s"),
        _one("rdma 14B", 5.8, "s", "rdma_fixed, rdma_bandwidth"),
        _one("rdma 32B", 9.4, "s", "rdma_fixed, rdma_bandwidth"),
        _one("push 8B", 32.4, "s"),
        _one("push 14B", 67.8, "s", "push_bandwidth"),
        _one("push 32B", 127.3, "s", "push_bandwidth"),
        _one("exposed pull 8B", 1.4, "s", "pull_bandwidth, pull_hidden"),
        _one("exposed pull 14B", 5.1, "s"),
        _one("exposed pull 32B", 9.6, "s", "pull_bandwidth, pull_hidden"),
        _one("inline 8B", 38.6, "s"),
        _one("inline 14B", 84.1, "s"),
        _one("inline 32B", 157.0, "s"),
    ),
    "whole_chain": (
        # 128 GPUs, 512 trajectories, 8B to 32B: tokens per second of one system over the one before.
        Row("Sync+ over Sync", 1.40, 2.40, "x"),
        Row("One-off over Sync+", 1.31, 1.47, "x"),
        Row("AReaL over One-off", 1.03, 1.06, "x", "batches of AReaL"),
        Row("RollArt over AReaL", 1.22, 1.36, "x"),
        Row("RollArt over Sync", 2.65, 4.58, "x"),
        # Step time of 32B under alpha 1.
        _one("32B: Sync+ over RollArt", 2.05),
        _one("32B: One-off over RollArt", 1.35),
        _one("32B: AReaL over RollArt", 1.31),
        _one("32B: Sync+ over One-off", 1.52, fitted="efficiency.train_fixed"),
        # RollArt with weights that stop everything, over RollArt.
        Row("step with inline over overlapped weights", 1.10, 1.16, "x"),
    ),
    "scaling": (Row("14B: 128 over 64 GPUs", 1.33, 2.08, "x"),),
    "mixes": (
        # Affinity: a mix of hardware over one kind that costs the same.
        Row("64 H800 + 24 H20 over 72 H800", 1.12, 1.37, "x"),
        Row("64 H800 + 24 H20 over 208 H20", 1.30, 1.68, "x"),
    ),
    "latency_spread": (
        # Lockstep over trajectory-wise rollout, by the spread of a turn's latency around 10 s.
        _one("sigma 1", 1.23),
        _one("sigma 3", 1.51),
        _one("sigma 5", 1.69),
        _one("sigma 7", 2.18),
        _one("sigma 10", 2.27),
    ),
    "bounds": (
        # Step time under alpha 1 over that under a larger one: at most.
        _one("alpha 2 over 1", 1.22),
        _one("alpha 4 over 1", 1.17),
        _one("alpha 6 over 1", 1.14),
    ),
    "redundancy": (
        # Redundant rollout, math 8B, 32 groups of 8 needed: members and groups that are started.
        _one("redundancy 8 x 34", 1.16, fitted="problem_spread of redundant math"),
        _one("redundancy 8 x 36", 1.30),
        _one("redundancy 10 x 32", 1.11, fitted="member_spread of redundant math"),
        _one("redundancy 10 x 34", 1.38),
        _one("redundancy 10 x 36", 1.52),
        _one("redundancy 12 x 32", 1.24),
        _one("redundancy 12 x 34", 1.51),
        _one("redundancy 12 x 36", 1.62),
    ),
    "prefill_decode": (
        # Prefill nodes and decode nodes and the same nodes undivided, SWE, 128 trajectories: step time.
        _one("32B undivided, 1 H800 + 3 H20 nodes", 741.2, "s", "efficiency.parallel"),
        _one("32B undivided, 2 H800 + 2 H20 nodes", 734.9, "s"),
        _one("32B divided, 1P3D", 722.7, "s"),
        _one("32B divided, 2P2D", 701.6, "s"),
        _one("32B 1P3D", 722.7 / 741.2),
        _one("32B 2P2D", 701.6 / 734.9),
        _one("30B-A3B 1P3D", 294.8 / 327.4),
        _one("30B-A3B 2P2D", 251.1 / 305.2),
    ),
    "production": (
        # More than 3,000 GPUs for a week, alpha 1, a sixth of them training.
        Row("production: waiting for a batch", 0.0, 0.62, "share"),
    ),
    "tenants": (
        # MARLaaS: 64 NPUs, up to 32 tenants.
        _one("tenants: steps per hour over one after another", 5.7, fitted="efficiency.train of the tenants"),
        _one("tenants: utilisation over one after another", 4.3),
        _one("tenants: idle time", 0.55, "x"),
        _one("tenants: end-to-end time of 32", 0.15, "x"),
        _one("tenants: without asynchrony", 0.34, "x"),
        # A further 13 %: of what is left, or of the whole.
        Row("tenants: without a shared rollout, too", 0.34 - 0.13, 0.34 * 0.87, "x"),
    ),
}
"""The rows that each experiment predicts, by the name of its function."""

ROWS: tuple[Row, ...] = tuple(row for rows in BY_EXPERIMENT.values() for row in rows)
