"""Which generations in flight may still be trained."""

from __future__ import annotations

import pytest

from rl.ledger import Ledger
from rl.staleness import StalenessPolicy


def ledger(line: list[int]) -> Ledger:
    made = Ledger()
    made.line, made.head = line, line[-1] if line else None
    return made


@pytest.mark.parametrize(
    ("alpha", "base_ahead", "line", "oldest"),
    [
        (0, 0, [0, 1, 2], 2),
        (1, 1, [0, 1, 2], 2),
        (1, 0, [0, 1, 2], 1),
        (2, 1, [0, 1, 2], 1),
        (4, 1, [0, 1, 2], 0),
        (2, 1, [0, 1, 5, 6], 5),  # after a rollback: edges of the live line count, not numbers
        (2, 1, [], 0),
    ],
)
def test_oldest_viable(alpha: int, base_ahead: int, line: list[int], oldest: int) -> None:
    assert StalenessPolicy(alpha, 1, 1).oldest_viable(ledger(line), base_ahead) == oldest


@pytest.mark.parametrize("alpha", [0, 1, 3])
@pytest.mark.parametrize("ahead", [0, 1])
def test_it_is_the_bound_of_viable(alpha: int, ahead: int) -> None:
    """At it a group is viable for that step, one version earlier it is not."""
    if ahead > alpha:
        with pytest.raises(ValueError, match="base_ahead"):
            StalenessPolicy(alpha, 1, 1).oldest_viable(ledger([0]), ahead)
        return
    line = ledger([0, 1, 2, 7, 8, 9])
    policy = StalenessPolicy(alpha, 1, 1)
    oldest = policy.oldest_viable(line, ahead)
    assert policy.viable(line.lag(oldest) + ahead)
    before = line.line[line.line.index(oldest) - 1]
    assert not policy.viable(line.lag(before) + ahead)
