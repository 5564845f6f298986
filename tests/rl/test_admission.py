"""Limits of tenants and domains, under any order of arrivals, ends and cancellations."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.admission import WAITING, Admission, TooMany

TENANTS, DOMAINS = ("a", "b"), ("x", "y")
limits = st.dictionaries(st.sampled_from(TENANTS), st.integers(1, 3), max_size=2)
places = st.dictionaries(st.tuples(st.sampled_from(TENANTS), st.sampled_from(DOMAINS)), st.integers(1, 2), max_size=4)
moves = st.lists(
    st.one_of(st.tuples(st.sampled_from(TENANTS), st.sampled_from(DOMAINS)), st.integers(0, 30)), max_size=60
)


@settings(deadline=None)
@given(limits, places, moves)
def test_limits_hold_and_who_can_run_runs(
    tenants: dict[str, int], domains: dict[tuple[str, str], int], moves: list[tuple[str, str] | int]
) -> None:
    admission = Admission(tenants, domains)
    alive: dict[int, tuple[str, str]] = {}
    running: set[int] = set()

    def fits(who: tuple[str, str]) -> bool:
        of_tenant = sum(alive[t][0] == who[0] for t in running)
        of_domain = sum(alive[t] == who for t in running)
        return of_tenant < tenants.get(who[0], 99) and of_domain < domains.get(who, 99)

    for ticket, move in enumerate(moves):
        if isinstance(move, tuple):
            could = fits(move)
            assert admission.submit(ticket, *move) is could
            alive[ticket] = move
            running |= {ticket} if could else set()
        elif alive:
            gone = sorted(alive)[move % len(alive)]
            started = admission.leave(gone, *alive[gone])
            running.discard(gone)
            del alive[gone]
            for one in started:
                waiting = [t for t in sorted(alive) if t not in running and fits(alive[t])]
                assert one == waiting[0], "first come, first served"
                running.add(one)
        assert not [t for t in alive if t not in running and fits(alive[t])], "a place is free and somebody waits"
        assert admission.waiting == len(alive) - len(running)
    counted = Counter(alive[t][0] for t in running)
    assert all(counted[tenant] <= limit for tenant, limit in tenants.items())


def test_too_many_are_sent_away_by_name() -> None:
    admission = Admission(domains={("a", "x"): 1})
    assert [admission.submit(ticket, "a", "x") for ticket in range(1 + WAITING)] == [True, *[False] * WAITING]
    with pytest.raises(TooMany, match="domain x: 1 generations run and 16 wait"):
        admission.submit(99, "a", "x")
    assert admission.submit(100, "a", "y") and admission.leave(3, "a", "x") == []
    assert not admission.submit(101, "a", "x")
    assert admission.leave(0, "a", "x") == [1]


def test_an_end_looks_at_the_first_of_each_domain_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands wait when all engines go on at once, and each that ends frees one place."""
    admission = Admission(tenants={"a": 1000})
    for ticket in range(17_000):
        admission.submit(ticket, "a", f"d{ticket % 4}")
    looks = 0
    fits = Admission._fits

    def counting(self: Admission, tenant: str, domain: str) -> bool:
        nonlocal looks
        looks += 1
        return fits(self, tenant, domain)

    monkeypatch.setattr(Admission, "_fits", counting)
    assert [admission.leave(ticket, "a", f"d{ticket % 4}") for ticket in range(100)] == [[1000 + n] for n in range(100)]
    assert looks == 100 * 8, "once for each domain to find the first, and once to find that nothing more runs"
