"""Groups for tests: fixed ones, and hypothesis strategies of all that the format can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from infra.store.log import CommitLog
from rl.ledger import Ledger
from rl.records import StateRef, Step
from rl.trajectory import NO_VERSION, Group, Message, Problem, Span, Status, Trajectory, Uid

PROMPT = [11, 12, 13]


def member(uid: Uid, at: int, version: int, reward: float, tokens: int = 4) -> Trajectory:
    return Trajectory(
        uid=uid,
        member=at,
        problem=Problem(uid.ordinal, "maze", uid.ordinal, 7 * uid.ordinal),
        start_version=version,
        prompt_length=len(PROMPT),
        token_ids=[*PROMPT, *range(100, 100 + tokens)],
        loss_mask=[0] * len(PROMPT) + [1] * tokens,
        logprobs=[0.0] * len(PROMPT) + [-0.5] * tokens,
        versions=[NO_VERSION] * len(PROMPT) + [version] * tokens,
        messages=[Message("user", "go"), Message("assistant", "north ↑")],
        status=Status.TERMINATED,
        turns=1,
        rewards={"outcome": reward},
        spans=[Span("reset", 1.25, 1.5)],
    )


def group(ordinal: int, attempt: int = 0, version: int = 0, rewards: tuple[float, ...] = (0.0, 1.0)) -> Group:
    uid = Uid(ordinal, attempt)
    return Group.of([member(uid, at, version, reward) for at, reward in enumerate(rewards)])


def tombstone(ordinal: int, attempt: int = 0, version: int = 0, reason: str = "reward_error") -> Group:
    return Group.give_up(Uid(ordinal, attempt), Problem(ordinal, "maze", ordinal, 1), version, reason)


def untold(sealed: Group) -> Group:
    """The group as the trainer gets it."""
    return replace(sealed, members=[replace(member, messages=[], spans=[], info={}) for member in sealed.members])


def step_fields(state_prefix: str = "state/x/", full: bool = True) -> dict:
    ref = StateRef(prefix=state_prefix, manifest_sha256="0" * 64, full=full)
    return {"state": ref, "weights_sha256": "w", "alpha": 1}


def commit(log: CommitLog, uids: Sequence[Uid] = (), segments: Sequence[str] | None = None, **more: Any) -> Step:
    """A step over these uids, with made-up places where none are given."""
    places = segments if segments is not None else ["groups/0000000000/w-000000.parquet"] * len(uids)
    return log.append_step(trained=uids, segments=places, **(step_fields() | more))


def same(a: Ledger, b: Ledger) -> bool:
    return a.lsn == b.lsn and a.snapshot() == b.snapshot()


_reals = st.floats(allow_nan=False, allow_infinity=False)
_text = st.text(max_size=12)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | _reals | _text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_text, inner, max_size=2),
    max_leaves=4,
)
_int63 = st.integers(0, 2**63 - 1)
_problems = st.builds(Problem, st.integers(0, 2**40), _text, _int63, _int63, st.sampled_from(["train", "heldout"]))


@st.composite
def _trajectories(draw, uid: Uid, problem: Problem, at: int) -> Trajectory:
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 2**31 - 1),
                st.integers(0, 1),
                st.floats(-100, 0, width=32),
                st.integers(-1, 2**40),
            ),
            max_size=6,
        )
    )
    tokens, mask, logprobs, versions = (list(column) for column in zip(*rows, strict=True)) if rows else ([],) * 4
    return Trajectory(
        uid=uid,
        member=at,
        problem=problem,
        start_version=draw(st.integers(0, 2**40)),
        prompt_length=draw(st.integers(0, 99)),
        token_ids=list(tokens),
        loss_mask=list(mask),
        logprobs=list(logprobs),
        versions=list(versions),
        messages=draw(st.lists(st.builds(Message, _text, _text), max_size=3)),
        status=draw(st.sampled_from(Status)),
        turns=draw(st.integers(0, 99)),
        retry=draw(st.integers(0, 9)),
        environment_reward=draw(_reals),
        info=draw(st.dictionaries(_text, _json, max_size=3)),
        rewards=draw(st.dictionaries(_text, _reals, max_size=3)),
        spans=draw(st.lists(st.builds(Span, _text, _reals, _reals), max_size=2)),
    )


@st.composite
def groups(draw) -> Group:
    """Any group that the format must carry: the domain's own checks are not its business."""
    problem = draw(_problems)
    uid = Uid(problem.ordinal, draw(st.integers(0, 1000)))
    version = draw(st.integers(0, 2**40))
    if draw(st.booleans()):
        return Group.give_up(uid, problem, version, draw(_text))
    size = draw(st.integers(1, 3))
    return Group(uid, problem, version, [draw(_trajectories(uid, problem, at)) for at in range(size)])
