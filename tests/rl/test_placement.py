"""Where a stage runs."""

from __future__ import annotations

import pytest

from rl.errors import PlacementError
from rl.placement import HardwareClass, Placement, placement_of, preflight, runs_on

GPU, BANDWIDTH, CPU, SERVERLESS = (
    HardwareClass.COMPUTE_GPU, HardwareClass.BANDWIDTH_GPU, HardwareClass.CPU, HardwareClass.LAMBDA,
)  # fmt: skip


@runs_on({"lake": "compute_gpu", "default": "bandwidth_gpu"})
def generate() -> None: ...


@runs_on({"lake": "cpu"})
def only_lake() -> None: ...


@runs_on("lambda")
def score() -> None: ...


def test_a_stage_is_resolved_by_domain_and_falls_back_to_a_compatible_class_when_full() -> None:
    placement = placement_of(generate)
    assert placement.preferred("lake") is GPU and placement.preferred("math") is placement.preferred() is BANDWIDTH
    assert placement.resolve("lake", {GPU: 1, BANDWIDTH: 5}) is GPU
    assert placement.resolve("lake", {GPU: 0, BANDWIDTH: 5}) is BANDWIDTH
    assert placement.resolve("lake", {GPU: 0, BANDWIDTH: 0}) is GPU, "wait for the preferred one"
    assert placement.resolve("lake", {BANDWIDTH: 0}) is BANDWIDTH
    assert placement_of(score).resolve(None, {CPU: 1}) is CPU
    with pytest.raises(PlacementError, match="no pool has compute_gpu or bandwidth_gpu; the pools have cpu"):
        placement.resolve("lake", {CPU: 9})


def test_preflight_names_every_impossible_stage_and_counts_an_empty_pool_as_none() -> None:
    preflight([generate, score], ["lake", "math"], {GPU: 1, CPU: 1})
    with pytest.raises(PlacementError) as caught:
        preflight([generate, score, only_lake], ["lake", "math"], {GPU: 0, CPU: 2})
    message = str(caught.value)
    assert all(part in message for part in ("generate of lake", "generate of math", "only_lake of math"))
    assert "score" not in message and "only_lake of lake" not in message


def test_wrong_declarations_are_named() -> None:
    for where in ("gpu", {"lake": "gpu"}):
        with pytest.raises(PlacementError, match="'gpu' is none of compute_gpu"):
            runs_on(where)
    with pytest.raises(PlacementError, match="no @runs_on"):
        placement_of(test_wrong_declarations_are_named)
    with pytest.raises(PlacementError, match="no default"):
        Placement({}, None).preferred("lake")
