"""The tenants' queue and the sharing of slots, as properties."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.fairness import Demand, PassedOver, TenantQueue, TenantShare, allot


def busy(shares: dict[str, TenantShare], cost: dict[str, float], rounds: int, slack: float = 0.0, patience: int = 64):
    """Seconds and turns by tenant when each always has a batch waiting; the order in which they were served."""
    queue = TenantQueue(shares, slack, patience)
    had, order = dict.fromkeys(shares, 0.0), []
    for tenant in shares:
        queue.offer(tenant)
    for _ in range(rounds):
        tenant = queue.take()
        assert tenant is not None
        queue.served(tenant, cost[tenant])
        had[tenant] += cost[tenant]
        order.append(tenant)
        queue.offer(tenant)
    return had, order


def test_equal_tenants_are_served_first_in_first_out():
    _, order = busy({t: TenantShare() for t in "cab"}, dict.fromkeys("abc", 1.0), 9)
    assert order == list("cabcabcab")


@settings(max_examples=25)
@given(
    weights=st.lists(st.floats(0.5, 4), min_size=2, max_size=5),
    costs=st.lists(st.floats(0.5, 10), min_size=5, max_size=5),
    slack=st.sampled_from([0.0, 5.0]),
)
def test_time_goes_by_weight_whatever_a_batch_costs(weights, costs, slack):
    shares = {str(n): TenantShare(weight=w) for n, w in enumerate(weights)}
    cost = {t: costs[n] for n, t in enumerate(shares)}
    had, _ = busy(shares, cost, 100, slack, patience=10_000)
    level = {t: had[t] / shares[t].weight for t in shares}
    one_batch = max(cost[t] / shares[t].weight for t in shares)
    assert max(level.values()) - min(level.values()) <= slack + 2 * one_batch + 1e-6


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), patience=st.integers(1, 6), tenants=st.integers(2, 6))
def test_no_batch_waits_for_ever_whatever_the_priorities(seed, patience, tenants):
    dice = random.Random(seed)
    shares = {str(n): TenantShare(priority=dice.randrange(3)) for n in range(tenants)}
    _, order = busy(shares, {t: dice.uniform(0.1, 9) for t in shares}, 80, patience=patience)
    for tenant in shares:
        turns = [-1, *(at for at, served in enumerate(order) if served == tenant)]
        assert len(turns) > 1, f"{tenant} was never served"
        assert max(b - a for a, b in pairwise(turns)) <= patience + 2 * tenants


def test_the_higher_priority_goes_first():
    queue = TenantQueue({"low": TenantShare(), "high": TenantShare(priority=1)})
    queue.offer("low")
    queue.offer("high")
    assert [queue.take(), queue.take(), queue.take()] == ["high", "low", None]


def test_being_away_gives_no_claim():
    queue = TenantQueue({})
    for _ in range(10):
        queue.offer("here")
        assert queue.take() == "here"
        queue.served("here", 5.0)
    order = []
    queue.offer("here")
    queue.offer("back")
    for _ in range(4):
        tenant = queue.take()
        order.append(tenant)
        queue.served(tenant, 5.0)
        queue.offer(tenant)
    assert order.count("here") >= 1


def test_a_tenant_has_one_batch_in_the_queue_and_may_leave():
    queue = TenantQueue({})
    queue.offer("a")
    with pytest.raises(ValueError, match="second batch"):
        queue.offer("a")
    queue.withdraw("a")
    assert len(queue) == 0 and queue.take() is None


@settings(max_examples=25)
@given(
    free=st.integers(0, 40),
    demands=st.dictionaries(
        st.sampled_from("abcde"), st.builds(Demand, st.integers(0, 20), st.integers(0, 20)), min_size=1
    ),
    quotas=st.lists(st.none() | st.integers(1, 15), min_size=5, max_size=5),
    waiting=st.integers(0, 2),
)
def test_slots_are_given_away_while_somebody_may_have_them(free, demands, quotas, waiting):
    shares = {t: TenantShare(quota=q) for t, q in zip("abcde", quotas, strict=True)}

    def room(tenant: str) -> int:
        demand, quota = demands[tenant], shares[tenant].quota
        return demand.wanted if quota is None else min(demand.wanted, max(0, quota - demand.in_flight))

    given_away = allot(free, demands, shares, waiting)
    assert all(given_away[t] <= room(t) for t in given_away)
    assert sum(given_away.values()) == min(free, sum(map(room, demands)))


def test_a_trainer_without_work_gets_a_whole_batch_soonest():
    demands = {"nearly": Demand(wanted=2, in_flight=6), "fresh": Demand(wanted=8)}
    assert allot(4, demands, {}, batches_waiting=0) == {"nearly": 2, "fresh": 2}
    assert allot(4, demands, {}, batches_waiting=1) == {"fresh": 4}


@settings(max_examples=100)
@given(
    free=st.integers(-3, 40),
    demands=st.dictionaries(
        st.sampled_from("abcde"),
        st.builds(lambda groups, flying, size: Demand(groups * size, flying * size, size), *[st.integers(0, 5)] * 2,
                  st.integers(1, 8)), min_size=1,
    ),
    quotas=st.lists(st.none() | st.integers(1, 20), min_size=5, max_size=5),
    waiting=st.integers(0, 2),
)  # fmt: skip
def test_groups_are_started_whole_and_what_is_left_is_too_little_for_whoever_comes_next(free, demands, quotas, waiting):
    shares = {t: TenantShare(quota=q) for t, q in zip("abcde", quotas, strict=True)}
    found = allot(free, demands, shares, waiting)
    assert all(count % demands[t].together == 0 for t, count in found.items())
    left = free - sum(found.values())
    assert left >= min(0, free)

    def wants(tenant: str) -> bool:
        demand, more = demands[tenant], demands[tenant].together
        quota, has = shares[tenant].quota, demands[tenant].in_flight + found.get(tenant, 0)
        return found.get(tenant, 0) + more <= demand.wanted and (quota is None or has + more <= quota)

    assert left < max((demands[t].together for t in demands if wants(t)), default=41)


def test_a_large_group_is_not_overtaken_for_ever_by_small_ones():
    demands = {"large": Demand(8, 0, together=8), "small": Demand(20, 4, together=2)}
    assert allot(4, demands, {}, batches_waiting=1) == {}, "what is free is kept for the large one"
    assert allot(9, demands, {}, batches_waiting=1) == {"large": 8}


def test_who_left_has_no_claim_and_no_batch_when_it_comes_back():
    shares = {t: TenantShare() for t in "ab"}
    queue = TenantQueue(shares)
    queue.served("a", 100.0)
    queue.offer("a")
    queue.entitle({"b": TenantShare(weight=2.0)})
    assert len(queue) == 0 and queue.share("b").weight == 2.0
    queue.entitle(shares)
    queue.offer("a")
    queue.offer("b")
    assert [queue.take(), queue.take()] == ["a", "b"]


def steady(shares: dict[str, TenantShare], slots: int, looks: int, patience: int = 64) -> dict[str, int]:
    """Groups of one that each tenant started, if all always want eight more and the oldest in flight ends at each look;
    the last tenant comes when all slots are taken."""
    passed, started, flying = PassedOver(patience), dict.fromkeys(shares, 0), list[str]()
    *first, _ = shares
    for look in range(looks):
        there = first if look < slots else list(shares)
        demands = {t: Demand(8, flying.count(t)) for t in there}
        found = allot(slots - len(flying), demands, shares, 0, passed)
        passed.note(found, demands)
        for tenant, count in found.items():
            started[tenant] += count
            flying += [tenant] * count
        flying.pop(0)
    return started


def test_who_has_begun_does_not_keep_out_who_comes():
    started = steady(dict.fromkeys("abc", TenantShare()), slots=6, looks=300)
    assert all(abs(count - 100) < 12 for count in started.values()), started


def test_no_priority_keeps_a_tenant_out_for_ever():
    shares = {"high": TenantShare(priority=2), "also": TenantShare(priority=2), "low": TenantShare()}
    started = steady(shares, slots=6, looks=650, patience=64)
    assert started["low"] == pytest.approx(650 / 65, abs=2)
    assert abs(started["high"] - started["also"]) < 12


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([None, 2, 5])), min_size=2,
             max_size=5),
    st.integers(1, 12),
)  # fmt: skip
def test_everybody_who_wants_gets_on_and_nothing_lies_idle(tenants, slots):
    shares = {str(n): TenantShare(weight, priority, quota) for n, (priority, weight, quota) in enumerate(tenants)}
    passed, flying, waited = PassedOver(8), list[str](), dict.fromkeys(shares, 0)
    for _ in range(150):
        demands = {t: Demand(8, flying.count(t)) for t in shares}
        found = allot(slots - len(flying), demands, shares, 0, passed)
        passed.note(found, demands)
        flying += [t for t, count in found.items() for _ in range(count)]
        limits = {t: share.quota or slots for t, share in shares.items()}
        assert all(flying.count(t) <= limits[t] for t in shares)
        assert len(flying) == min(slots, sum(min(limit, flying.count(t) + 8) for t, limit in limits.items()))
        waited = {
            t: 0 if found.get(t) or flying.count(t) else count + sum(found.values()) for t, count in waited.items()
        }
        assert max(waited.values()) <= 8 + slots * len(shares), waited
        flying.pop(0)
