"""Where generations go: properties under every order of events, and the order of preference by example."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rl.capacity import EngineLoad
from rl.placement import HardwareClass, Placement
from rl.routing import HELD, OVERTAKES, Assignment, Router, Split
from rl.waiting import Request

GPU, BANDWIDTH = HardwareClass.COMPUTE_GPU, HardwareClass.BANDWIDTH_GPU
SPLIT = Split(GPU, BANDWIDTH, 20)
PLACEMENT = Placement({"lake": GPU}, BANDWIDTH)


def router(split: Split | None = None, **engines: tuple[HardwareClass, int, int]) -> Router:
    made = Router(PLACEMENT, prefill_heavy=4.0, split=split)
    for name, (hardware, slots, capacity) in engines.items():
        made.join(name, hardware, slots, capacity, revision=0)
    return made


def request(number: int, trajectory: str = "t", domain: str = "math", prompt: int = 10, **more) -> Request:
    return Request(f"r{number}", "tenant", trajectory, domain, prompt, **({"max_new": 10} | more))


def one(made: Router, asked: Request) -> Assignment:
    made.submit(asked)
    (found,) = made.dispatch()
    return found


class Routing(RuleBasedStateMachine):
    """Whatever joins, leaves, updates and arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(PLACEMENT, 4.0, SPLIT)
        self.engines: dict[str, tuple[HardwareClass, int, int]] = {}
        self.revisions: dict[str, int] = {}
        self.running: dict[str, Assignment] = {}
        self.prefilling: set[str] = set()
        self.waiting: list[Request] = []
        self.serial = 0

    @rule(hardware=st.sampled_from([GPU, BANDWIDTH]), slots=st.integers(1, 3), capacity=st.integers(1, 100))
    @precondition(lambda self: len(self.engines) < 4)
    def join(self, hardware: HardwareClass, slots: int, capacity: int) -> None:
        self.serial += 1
        name = f"e{self.serial}"
        self.router.join(name, hardware, slots, capacity, self.router.revision)
        self.engines[name], self.revisions[name] = (hardware, slots, capacity), self.router.revision

    @rule(data=st.data(), again=st.booleans())
    @precondition(lambda self: self.engines)
    def leave(self, data: st.DataObject, again: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.engines)))
        there = {i for i, a in self.running.items() if a.engine == name or (a.prefill == name and i in self.prefilling)}
        lost = self.router.leave(name)
        assert {r.id for r in lost} == there, "exactly what ran there is lost"
        del self.engines[name], self.revisions[name]
        for r in lost:
            del self.running[r.id]
            self.prefilling.discard(r.id)
            if again:
                self.router.submit(r)
                self.waiting.append(r)

    @rule(data=st.data(), tenant=st.sampled_from(["tenant", "other"]))
    def update(self, data: st.DataObject, tenant: str) -> None:
        """A new revision, which only some engines manage to serve."""
        served = data.draw(st.sets(st.sampled_from(sorted(self.engines)))) if self.engines else set()
        new = self.router.revision + 1
        for name in served:
            self.router.serves(name, new, tenant)
            self.revisions[name] = new
        self.router.advance(new)

    @rule(
        trajectory=st.sampled_from("abc"),
        domain=st.sampled_from(["lake", "math"]),
        prompt=st.integers(1, 60),
        new=st.integers(1, 60),
        may_split=st.booleans(),
    )
    def submit(self, trajectory: str, domain: str, prompt: int, new: int, may_split: bool) -> None:
        self.serial += 1
        asked = Request(f"r{self.serial}", "tenant", trajectory, domain, prompt, new, may_split)
        self.router.submit(asked)
        self.waiting.append(asked)

    @rule()
    def dispatch(self) -> None:
        for found in self.router.dispatch():
            names = {found.engine, found.prefill} - {None}
            assert all(self.revisions[name] == self.router.revision for name in names), "only what serves the present"
            if found.prefill is not None:
                assert found.request.may_split and found.request.prompt >= SPLIT.least
                assert (self.engines[found.prefill][0], self.engines[found.engine][0]) == (GPU, BANDWIDTH)
                self.prefilling.add(found.request.id)
            assert 0 <= found.fresh <= found.request.prompt
            self.waiting.remove(found.request)
            self.running[found.request.id] = found
        for name, (_, slots, _) in self.engines.items():
            assert self.router.running(name) <= slots, "no engine is overloaded"
        idle = [n for n, r in self.revisions.items() if r == self.router.revision and not self.router.running(n)]
        held = self.router._waiting.engines
        assert len(held) <= max(1, len(self.engines) // HELD)
        assert not self.waiting or not set(idle) - held, "nothing waits while an engine idles"

    @rule(data=st.data())
    @precondition(lambda self: self.prefilling)
    def prefilled(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.prefilling)))
        self.router.prefilled(name)
        self.prefilling.discard(name)

    @rule(data=st.data(), sampled=st.integers(0, 60))
    @precondition(lambda self: self.running)
    def finish(self, data: st.DataObject, sampled: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.router.finish(name, sampled)
        del self.running[name]
        self.prefilling.discard(name)

    @rule(data=st.data())
    @precondition(lambda self: self.running or self.waiting)
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running) + sorted(r.id for r in self.waiting)))
        self.router.release(name)
        self.running.pop(name, None)
        self.prefilling.discard(name)
        self.waiting = [r for r in self.waiting if r.id != name]

    @invariant()
    def reservations_are_what_runs(self) -> None:
        assert self.router.waiting == len(self.waiting)
        for name in self.engines:
            there = {i for i, a in self.running.items() if a.engine == name}
            there |= {i for i in self.prefilling if self.running[i].prefill == name}
            load = self.router._engines[name]
            assert set(load.running) == there and load.reserved == sum(load.running.values())

    def teardown(self) -> None:
        """With one engine that serves the present, everything that waits gets its turn."""
        if not self.engines:
            self.join(GPU, 1, 50)
        for name in self.engines:
            self.router.serves(name, self.router.revision, "tenant")
            self.revisions[name] = self.router.revision
        for _ in range(len(self.waiting) + 1):
            self.dispatch()
            for name in list(self.running):
                self.router.finish(name, 1)
                del self.running[name]
            self.prefilling.clear()
        assert not self.waiting


Routing.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestRouting = Routing.TestCase


def test_a_trajectory_stays_where_its_prefix_is_unless_that_engine_is_full() -> None:
    made = router(a=(BANDWIDTH, 2, 1000), b=(BANDWIDTH, 2, 1000), c=(GPU, 2, 1000))
    first = one(made, request(0))
    made.finish("r0", 5)
    for n in (1, 2):
        one(made, request(n, f"other{n}"))
    assert made.running("a") == made.running("b") == 1
    second = one(made, request(4, prompt=20))
    assert (second.engine, second.fresh) == (first.engine, 5)
    made.finish("r4", 5)
    assert one(made, request(5, "fills it")).engine == "a"
    elsewhere = one(made, request(6, prompt=30))
    assert (elsewhere.engine, elsewhere.fresh) == ("b", 30), "another one, computed anew"
    made.finish("r6", 5)
    assert one(made, request(7, prompt=40)).engine == "b", "where the longest prefix is now"


def test_what_an_update_made_void_attracts_nothing() -> None:
    made = router(a=(BANDWIDTH, 8, 1000), b=(BANDWIDTH, 8, 1000))
    assert one(made, request(0)).engine == "a"
    made.finish("r0", 5)
    made.serves("a", 1, "another tenant")
    made.serves("b", 1, "another tenant")
    made.advance(1)
    assert one(made, request(1, prompt=20)).fresh == 5, "another tenant's version leaves it as it is"
    made.finish("r1", 5)
    one(made, request(2, "other"))
    for name in "ab":
        made.serves(name, 2, "tenant")
    made.advance(2)
    found = one(made, request(3, prompt=30))
    assert (found.engine, found.fresh) == ("b", 30)


def test_the_declared_class_then_the_shape_then_the_default_then_a_compatible_one() -> None:
    made = router(a=(BANDWIDTH, 1, 1000), c=(GPU, 1, 1000))
    assert one(made, request(0, "x", "lake")).engine == "c"
    assert one(made, request(1, "y", "lake")).engine == "a", "full: the compatible class"
    made.finish("r0", 1)
    made.finish("r1", 1)
    assert one(made, request(2, "z", prompt=90)).engine == "a", "no shape measured yet: the default"
    made.finish("r2", 2)
    assert one(made, request(3, "w", prompt=90)).engine == "c", "90 fresh tokens for 4 or so new ones: compute"
    made.finish("r3", 2)
    assert one(made, request(4, "w", prompt=96)).engine == "c", "only 4 are fresh, but they stay with their prefix"
    made.finish("r4", 2)
    assert one(made, request(5, "v", prompt=6)).engine == "a", "few for many: bandwidth"


def test_what_the_owner_of_a_request_declares_goes_before_what_is_declared_for_the_domain() -> None:
    made = router(gpu=(GPU, 4, 1000), wide=(BANDWIDTH, 4, 1000))
    assert one(made, request(1, "a", "lake")).engine == "gpu"
    assert one(made, request(2, "b", "lake", runs_on=BANDWIDTH)).engine == "wide"
    assert one(made, request(3, "c", "math", runs_on=GPU)).engine == "gpu"
    made.leave("gpu")
    assert one(made, request(4, "d", "math", runs_on=GPU)).engine == "wide", "a compatible one, where there is no other"


def test_a_long_prompt_is_split_unless_the_request_says_no_or_its_prefix_is_there() -> None:
    made = router(SPLIT, a=(BANDWIDTH, 4, 1000), c=(GPU, 4, 1000))
    found = one(made, request(0, prompt=50))
    assert (found.engine, found.prefill) == ("a", "c") and made.running("c") == made.running("a") == 1
    made.prefilled("r0")
    assert made.running("c") == 0
    made.finish("r0", 5)
    assert one(made, request(1, prompt=60)).prefill is None, "55 of its tokens are on a"
    assert one(made, request(2, "u", prompt=60, may_split=False)).prefill is None
    assert [r.id for r in made.leave("c")] == ["r2"], "its shape had asked for compute"
    assert one(made, request(3, "v", prompt=60)).prefill is None, "no prefill engine: one does both"
    with pytest.raises(ValueError, match="no split"):
        Split(GPU, GPU, 1)


def test_a_large_request_is_overtaken_only_so_often() -> None:
    made = router(a=(BANDWIDTH, 4, 100), b=(BANDWIDTH, 4, 100))
    small, large = dict(prompt=20, max_new=20), dict(prompt=90, max_new=10)
    for n in range(4):
        one(made, request(n, f"t{n}", **small))
    made.submit(request(1000, "large", **large))
    overtaken, alive = 0, [f"r{n}" for n in range(4)]
    for n in range(4, 4 * OVERTAKES):
        made.release(alive.pop(0))
        made.submit(request(n, f"t{n}", **small))
        for found in made.dispatch():
            if found.request.id == "r1000":
                assert OVERTAKES <= overtaken <= OVERTAKES + 4, "it waits for what runs on one engine, no longer"
                return
            overtaken += 1
            alive.append(found.request.id)
    raise AssertionError("the large request starved")


def test_many_large_requests_do_not_wait_for_one_another() -> None:
    """On a fleet each gets an engine of its own, not one after the other the only one that is held."""
    made = router(**{f"e{n}": (BANDWIDTH, 4, 100) for n in range(32)})
    small, large, served = dict(prompt=20, max_new=5), dict(prompt=80, max_new=20), 0
    alive = [one(made, request(n, f"t{n}", **small)).request.id for n in range(128)]
    for n in range(8):
        made.submit(request(1000 + n, f"large{n}", **large))
    for n in range(2000, 2000 + OVERTAKES + 3 * 128):
        made.release(alive.pop(0))
        made.submit(request(n, f"t{n}", **small))
        for found in made.dispatch():
            assert len(made._waiting.engines) <= 32 // HELD
            if found.request.prompt == 80:
                served += 1
                made.finish(found.request.id, 1)
            else:
                alive.append(found.request.id)
    assert served == 8


def test_a_dispatch_does_not_ask_every_engine_for_everything_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """When all engines go on at once, as after an update, thousands wait, and every end of one asks again."""
    asked = 0
    fits = EngineLoad.fits

    def counting(self: EngineLoad, tokens: int) -> bool:
        nonlocal asked
        asked += 1
        return fits(self, tokens)

    made = router(**{f"e{n}": (BANDWIDTH, 64, 100) for n in range(32)})
    for n in range(32):
        one(made, request(n, f"t{n}", prompt=60))
    monkeypatch.setattr(EngineLoad, "fits", counting)
    for n in range(100, 1100):
        made.submit(request(n, f"t{n}", prompt=60))
    assert not made.dispatch() and len(made._waiting) == 1000
    assert asked <= 2 * 32, f"{asked} looks at 32 engines for 1000 requests of one size"
