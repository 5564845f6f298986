"""Nothing that is started in excess, and no bound on staleness, prefers short trajectories: what is trained has the
lengths of what was submitted. A mode that ends the slow ones and forgets them does not, and is told apart here.

The policies run under a clock of their own, `benchmarks.policy_clock`."""

from __future__ import annotations

import pytest

from benchmarks.policy_clock import Lengths, PolicyClock, by_chance, gap, of_the_problem
from rl.modes import ModeName
from rl.redundancy import Mode, RedundancyPolicy, spares_worth
from rl.trajectory import Uid

of_the_attempt = by_chance(1.0)
SPARE = RedundancyPolicy(extra_members=1)
FIRST = RedundancyPolicy(Mode.FIRST_FINISHED, extra_members=2, extra_groups=3)
KINDS = pytest.mark.parametrize("lengths", [of_the_problem, of_the_attempt])


@KINDS
@pytest.mark.parametrize(
    ("mode", "alpha"), [("one_off", 1), ("six_steps", 3), ("rollart", 1), ("rollart", 3), ("areal", 1)]
)
def test_what_is_trained_is_as_long_as_what_was_submitted(mode: ModeName, alpha: int, lengths: Lengths) -> None:
    clock = PolicyClock(mode, alpha, SPARE, lengths)
    trained, submitted = clock.run()
    assert len(trained) == clock.steps * clock.groups * clock.size
    assert gap(trained, submitted) < 1


def test_what_is_drawn_again_until_it_is_waited_for_starves_no_long_problem() -> None:
    waits, again = (PolicyClock("rollart", 1, SPARE, of_the_problem, late) for late in ("wait", "draw_again"))
    waits.run()
    assert gap(*again.run()) < 1
    assert again.ledger.dropped_groups["stale"] and again.now < 0.9 * waits.now


@pytest.mark.parametrize("deviation", [0.1, 1.0])
def test_the_spares_that_are_chosen_are_about_the_best_when_played(deviation: float) -> None:
    """At a short tail a second try holds up the step, at a long one it does not."""
    price, lengths = 0.5, by_chance(deviation)

    def played_with(spares: int) -> PolicyClock:
        clock = PolicyClock("rollart", 1, RedundancyPolicy(extra_members=spares), lengths)
        clock.run()
        return clock

    def worth(spares: int) -> float:
        clock = played_with(spares)
        return clock.now * (1 + spares / clock.size) ** price

    bare = played_with(0)
    seen = [lengths(Uid(at, 0), 0, 0) for at in range(64)]
    chosen = spares_worth(seen, bare.size, bare.fails, bare.groups, price)
    played = [worth(spares) for spares in range(3)]
    assert (chosen > 0) == (deviation < 1)
    assert played[chosen] < 1.1 * min(played)


@KINDS
def test_what_discards_and_forgets_is_told_apart(lengths: Lengths) -> None:
    trained, submitted = PolicyClock("rollart", 1, FIRST, lengths).run()
    assert gap(trained, submitted) > 1


@pytest.mark.parametrize("alpha", [1, 2])
def test_the_eager_order_hides_the_slowest_better_than_the_six_steps(alpha: int) -> None:
    """By about L / alpha over (L + T) / (alpha + 1), with L the slowest group and T training."""

    def time(mode: ModeName) -> float:
        cluster = PolicyClock(mode, alpha, SPARE, of_the_attempt)
        cluster.run()
        return cluster.now

    assert time("rollart") < 0.85 * time("six_steps")
