"""The order of a step."""

from __future__ import annotations

import copy
import random

import pytest

from rl.errors import ProtocolViolation
from rl.protocol import Phase, StepProtocol

SWAP = [Phase.SUSPEND, Phase.UPDATE, Phase.RESUME, Phase.RECOMPUTE]
GET, TRAIN, COMMIT = Phase.GET_BATCH, Phase.TRAIN, Phase.COMMIT


def legal(protocol: StepProtocol) -> set[Phase]:
    found = set()
    for phase in Phase:
        trial = copy.deepcopy(protocol)
        try:
            trial.enter(phase)
            found.add(phase)
        except ProtocolViolation:
            assert vars(trial) == vars(protocol), "a refusal changes nothing"
    return found


def test_on_policy_there_is_one_order() -> None:
    protocol = StepProtocol(0)
    for phase in [*SWAP, GET, TRAIN, COMMIT] * 3:
        assert legal(protocol) == {phase}
        protocol.enter(phase)
        assert protocol.suspended == (phase in SWAP[:2])


def test_in_line_is_legal_under_any_alpha() -> None:
    protocol = StepProtocol(4)
    for phase in [GET, *SWAP, TRAIN, COMMIT] * 3:
        protocol.enter(phase)


def test_a_version_may_be_published_while_the_next_batch_is_awaited_and_trained() -> None:
    protocol = StepProtocol(1)
    for phase in [GET, TRAIN, *SWAP, GET, TRAIN, COMMIT, *SWAP, COMMIT, GET, *SWAP, TRAIN, COMMIT]:
        protocol.enter(phase)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_interleaving(seed: int) -> None:
    """Of versions: batch n + 1 comes after training n and the engines' update for batch n; the engines get version n
    after its commit and after batch n + 1; a version is committed once, in order, after it was trained."""
    draw, protocol, past = random.Random(seed), StepProtocol(1), []
    for _ in range(200):
        choice = draw.choice(sorted(legal(protocol)))
        before = {phase: past.count(phase) for phase in Phase}
        match choice:
            case Phase.GET_BATCH:
                assert before[TRAIN] == before[GET] == before[Phase.RECOMPUTE]
                assert before[COMMIT] >= before[GET] - 1, "two versions are on their way"
            case Phase.SUSPEND:
                assert before[GET] == before[Phase.RECOMPUTE] + 1 and before[COMMIT] >= before[Phase.RECOMPUTE]
            case Phase.TRAIN:
                assert before[TRAIN] == before[GET] - 1
            case Phase.COMMIT:
                assert before[COMMIT] < before[TRAIN] and not protocol.suspended
            case swapping:
                assert past[-1:] != [] and before[SWAP[SWAP.index(swapping) - 1]] == before[swapping] + 1
        protocol.enter(choice)
        past.append(choice)
    assert past.count(COMMIT) > 10, "it never gets stuck"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_interleaving_in_the_eager_order(seed: int) -> None:
    """Of versions: the engines get each one right after its commit, and no batch waits for that."""
    draw, protocol, past = random.Random(seed), StepProtocol(1, eager=True), []
    for _ in range(200):
        choice = draw.choice(sorted(legal(protocol)))
        before = {phase: past.count(phase) for phase in Phase}
        match choice:
            case Phase.GET_BATCH:
                assert before[TRAIN] == before[GET] and before[COMMIT] >= before[GET] - 1
            case Phase.SUSPEND:
                assert before[COMMIT] == before[Phase.RECOMPUTE], "the engines get every version, once"
            case Phase.TRAIN:
                assert before[TRAIN] == before[GET] - 1
            case Phase.COMMIT:
                assert before[COMMIT] < before[TRAIN] and before[Phase.RECOMPUTE] == before[COMMIT] + 1
            case swapping:
                assert before[SWAP[SWAP.index(swapping) - 1]] == before[swapping] + 1
        protocol.enter(choice)
        past.append(choice)
    assert past.count(COMMIT) > 10, "it never gets stuck"


@pytest.mark.parametrize("alpha", [0, 1])
def test_a_failed_update_starts_the_swap_over_and_only_that(alpha: int) -> None:
    order = [*SWAP, GET, TRAIN, COMMIT] if alpha == 0 else [GET, *SWAP, TRAIN, COMMIT]
    for at, phase in enumerate(order):
        protocol = StepProtocol(alpha)
        for done in order[: at + 1]:
            protocol.enter(done)
        if phase in SWAP[:2]:
            protocol.abandon_update()
            assert not protocol.suspended
            protocol.enter(Phase.SUSPEND)
        else:
            with pytest.raises(ProtocolViolation):
                protocol.abandon_update()
