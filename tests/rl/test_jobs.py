"""The jobs of a service: whatever is asked in whatever order, what is written folds, and says the same to everybody."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.config.load import dumps, loads_as, validate_as
from rl.config.model import ServiceModel
from rl.config.tenants import Job, ServiceConfig
from rl.errors import ConfigError
from rl.jobs import (
    EVENT,
    LIVE,
    Ended,
    Erased,
    JobRefused,
    Jobs,
    Ordered,
    Started,
    State,
    Submitted,
    next_starts,
    shares,
)
from rl.records import StateRef, Step
from rl.tenancy import figures, with_shares

PLAIN: dict[str, Any] = {
    "name": "shop",
    "model": {"source": {"type": "tiny", "size": {"hidden_size": 64, "layers": 2}}, "warmstart": {}},
    "domains": [{"name": "lake", "environment": "frozen_lake"}],
}


def service(**changes: Any) -> ServiceConfig:
    return validate_as(ServiceConfig, PLAIN | changes, "service.yaml")


def job(name: str = "a", tenant: str = "ann", **changes: Any) -> Job:
    return validate_as(Job, {"tenant": tenant, "name": name, "domains": ["lake"]} | changes, "job.yaml")


MOVES = st.tuples(
    st.sampled_from(["submit", "start", "end", "fail", "erase", "pause", "resume", "cancel", "delete"]),
    st.sampled_from("ab"),
)


def event(kind: str, name: str, time: float) -> Any:
    match kind:
        case "submit":
            return Submitted(time=time, job=job(name))
        case "start":
            return Started(time=time, id=f"ann/{name}", trainer=0)
        case "end" | "fail":
            return Ended(time=time, id=f"ann/{name}", failure="it broke" if kind == "fail" else None)
        case "erase":
            return Erased(time=time, id=f"ann/{name}")
    return Ordered(time=time, id=f"ann/{name}", order=kind)


@settings(max_examples=100)
@given(moves=st.lists(MOVES, max_size=40))
def test_what_is_refused_changes_nothing_and_what_is_taken_folds_again(moves):
    jobs, written, over = Jobs(), [], set()
    for time, (kind, name) in enumerate(moves):
        asked = event(kind, name, float(time))
        before = {id: entry.state for id, entry in jobs.entries.items()}
        try:
            jobs.apply(asked)
        except JobRefused as error:
            assert f"ann/{name}" in str(error)
            assert before == {id: entry.state for id, entry in jobs.entries.items()}
        else:
            written.append(EVENT.dump_json(asked))
        for id, entry in jobs.entries.items():
            assert entry.state is not State.RUNNING or entry.trainer is not None
            assert (entry.failure is not None) == (entry.state is State.FAILED) or entry.state not in LIVE
            assert (entry.ended is None) == (entry.state in LIVE)
            assert id not in over or entry.state in (State.DELETING, State.DELETED, State.DONE, State.CANCELLED)
            if entry.state in (State.DONE, State.CANCELLED):
                over.add(id)
    again = Jobs()
    for raw in written:
        again.apply(EVENT.validate_json(raw))
    assert again.entries == jobs.entries


def test_a_name_is_used_once_and_a_failed_job_goes_on():
    jobs = Jobs()
    for kind in ("submit", "start", "fail", "resume", "start", "cancel", "delete", "erase"):
        jobs.apply(event(kind, "a", 1.0))
    with pytest.raises(JobRefused, match=r"job 'ann/a' exists already \(deleted\); choose another name"):
        jobs.apply(event("submit", "a", 2.0))
    with pytest.raises(JobRefused, match="job 'ann/a' is deleted: pause is for one that is running or waiting"):
        jobs.apply(event("pause", "a", 2.0))
    with pytest.raises(JobRefused, match="there is no job 'ann/b'; there are: ann/a"):
        jobs.apply(event("pause", "b", 2.0))


@given(
    trainers=st.sets(st.integers(0, 4), min_size=1),
    priorities=st.lists(st.integers(-2, 2), max_size=12),
    most=st.integers(1, 12),
)
def test_places_go_by_priority_to_the_trainers_with_the_fewest_jobs(trainers, priorities, most):
    jobs = Jobs()
    for n, priority in enumerate(priorities):
        jobs.apply(Submitted(time=0.0, job=job(f"j{n}", priority=priority)))
    found = next_starts(jobs, frozenset(trainers), most)
    assert len(found) == min(most, len(priorities)) and next_starts(jobs, frozenset(), most) == []
    began = [priorities[int(id.removeprefix("ann/j"))] for id, _ in found]
    assert began == sorted(priorities, reverse=True)[: len(found)]
    load = Counter(dict.fromkeys(trainers, 0)) + Counter(trainer for _, trainer in found)
    assert max(load[t] for t in trainers) - min(load[t] for t in trainers) <= 1
    for id, trainer in found:
        jobs.apply(Started(time=1.0, id=id, trainer=trainer))
    assert next_starts(jobs, frozenset(trainers), len(jobs.running)) == []
    moved = next_starts(jobs, frozenset({9}), most)
    assert {id for id, _ in moved} == {e.job.id for e in jobs.running} and all(t == 9 for _, t in moved)


def test_several_jobs_of_a_tenant_divide_its_weight():
    jobs = Jobs()
    for name, tenant in (("a", "ann"), ("b", "ann"), ("c", "bob")):
        jobs.apply(Submitted(time=0.0, job=job(name, tenant, weight=2)))
    weights = {id: share.weight for id, share in shares(jobs.entries.values()).items()}
    assert weights == {"ann/a": 1.0, "ann/b": 1.0, "bob/c": 2.0}


def test_a_job_is_a_run_on_the_base_of_its_service():
    run = job(lora={"rank": 4}, training={"steps": 3}).run(service(deadlines={"start": 7}))
    assert run.model.source == ServiceModel(name="shop") and run.base_prefix == "services/shop/base/"
    assert (run.prefix, run.served_as, run.staleness.alpha, run.deadlines.start) == ("ann/a/", "ann.a", 0, 7)
    assert loads_as(ServiceConfig, dumps(service())) == service()
    assert service().host.base_prefix == run.base_prefix and service().host.prefix == service().prefix


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"lora": {"rank": 0}}, "job.yaml: lora.rank: Input should be greater than or equal to 1 (found 0)"),
    ({"lora": {"rank": 65}}, "lora.rank (65) is above largest_rank of service 'shop' (64); lower it"),
    ({"domains": ["sea"]}, "domains: 'sea' is not offered by service 'shop', which has lake"),
    ({"domains": [{"name": "m", "environment": "a:B"}]}, "domains.m.environment ('a:B', with its options) is code of"),
    (
        {"domains": [{"name": "lake", "environment": "child", "environment_options": {"python": "/bin/sh"}}]},
        "domains.lake.environment ('child', with its options) is code of one's own choice",
    ),
    (
        {"domains": [{"name": "lake", "environment": "frozen_lake", "environment_options": {"size": 99}}]},
        "domains.lake.environment ('frozen_lake', with its options)",
    ),
    (
        {"domains": [{"name": "lake", "environment": "frozen_lake", "reward": "a:b"}]},
        "domains.lake.reward ('a:b') is code of one's own choice",
    ),
    ({"training": {"advantage": "a:b"}}, "training.advantage ('a:b') is code of one's own choice"),
    ({"quota": 7}, "quota (7) is below training.group_size (8): no group could run; raise it"),
    (
        {"quota": 9, "rollout": {"redundancy": {"extra_members": 2}}},
        "quota (9) is below training.group_size (8) with rollout.redundancy.extra_members (2): no group could run",
    ),
    ({"rollout": {"unit": "stage"}}, "rollout.unit ('stage'): the rollout of a service has a task run"),
    ({"training": {"processes": 2}}, "training.processes (2): a job is trained by one process"),
    ({"evaluation": {"every": 2}}, "evaluation.every (2): a service evaluates nothing on the way"),
    ({"training": {"threads": 2}}, "training.threads (2): the trainers of a service have its threads"),
    ({"training": {"checkpoint_every": 2}}, "training.checkpoint_every (2): every version of a job is a point"),
    ({"tenant": "services"}, "tenant ('services') is where services keep their own; choose another"),
    ({"engine": {}}, "job.yaml: engine: unknown field; known fields: budget"),
    ({"rollout": {"max_new_tokens": 9000}}, "rollout.max_new_tokens (9000) leaves no room"),
]


@pytest.mark.parametrize(("changes", "line"), MISTAKES)
def test_a_bad_job_is_refused_by_one_line(changes, line):
    with pytest.raises(ConfigError) as caught:
        job(**changes).run(service())
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_a_group_that_could_never_start_is_refused_and_spares_take_only_the_room_that_there_is():
    with pytest.raises(ConfigError, match=r"training.group_size \(8\) is above trajectories of service 'shop' \(6\)"):
        job().run(service(trajectories=6))
    redundancy = job(quota=8).run(service(trajectories=8)).rollout.redundancy
    assert redundancy.policy(spares=3, most=0).extra_members == 0
    assert redundancy.policy(spares=3, most=2).extra_members == 2
    assert redundancy.policy(spares=3).extra_members == 3


SERVICE_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"engine": {"type": "vllm"}}, "engine.max_adapters (4) is below running (64), but each job that runs is served"),
    ({"model": {"lora": {}, "warmstart": {}}}, "model.lora: the service trains no adapter of its own"),
    ({"model": {}}, "model.warmstart is missing"),
    ({"trainers": 2}, "pools.compute_gpu (1) is below 2, but 0 engines and 2 trainers run there; set it to 2"),
]


@pytest.mark.parametrize(("changes", "line"), SERVICE_MISTAKES)
def test_a_bad_service_is_refused_by_one_line(changes, line):
    with pytest.raises(ConfigError) as caught:
        service(**changes)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_an_offered_domain_may_get_another_installed_reward():
    wanted = [{"name": "lake", "environment": "frozen_lake", "reward": "length", "max_turns": 3}]
    assert job(domains=wanted).run(service()).domains[0].reward == "length"


def test_own_code_runs_where_the_service_lets_it():
    own = [{"name": "m", "environment": "a:B"}]
    assert job(domains=own).run(service(foreign_code=True)).domains[0].environment == "a:B"


def step(version: int, time: float, **metrics: float) -> Step:
    state = StateRef(prefix="p/", manifest_sha256="0", full=True)
    return Step(
        lsn=version + 2, nonce="n", writer="w", time=time, version=version, base=version - 1 if version else None,
        state=state, weights_sha256="0", alpha=0, trained=(), segments=(), metrics=metrics,
    )  # fmt: skip


def test_figures_say_what_a_job_got_and_what_it_cost():
    jobs = Jobs()
    for tenant in ("ann", "bob", "cyd"):
        jobs.apply(Submitted(time=100.0, job=job("a", tenant)))
    ann, bob, cyd = jobs.entries.values()
    told = {"queue_s": 1.0, "restore_s": 1.0, "train_s": 2.0, "tokens": 50.0, "reward": 0.5, "fresh_gap_max": 1e-5}
    steps = [step(0, 110.0), step(1, 120.0, **told), step(2, 134.0, **told | {"fresh_gap_max": 2e-5})]
    rows = with_shares([figures(ann, steps, 300), figures(bob, [*steps[:1], step(1, 150.0, train_s=2.0)], 100),
                        figures(cyd, [], 0)])  # fmt: skip
    first = rows[0]
    assert (first.time_to_first_step, first.step_latency, first.queue_wait) == (20.0, 12.0, 1.0)
    assert (first.trainer_s, first.tokens_trained, first.logprob_gap, first.reward) == (6.0, 100, 2e-5, 0.5)
    assert (first.trainer_share, first.engine_share, first.cost_share) == (0.75, 0.75, 0.75)
    assert sum(row.cost_share for row in rows) == pytest.approx(1)
    assert (rows[2].time_to_first_step, rows[2].reward, rows[2].cost_share) == (None, None, 0.0)
    assert with_shares([figures(cyd, [], 0)])[0].cost_share is None
    unread, read = with_shares([replace(rows[0], unread="not a record", cost_share=None), rows[1]])
    assert unread.cost_share is None and read.cost_share is not None
