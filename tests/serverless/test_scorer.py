"""Where rewards are scored: here or by functions, with one result, and every way to fail is a RewardFailure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.serverless.bundle import Bundle
from infra.serverless.errors import FunctionMissing, InvocationFailed
from rewards.registry import check_reward
from rl.config.load import validate
from rl.config.work import DeadlineSection
from rl.errors import ConfigError, RewardFailure
from tasks.functions import RewardScorer, bundle_of, check_functions
from tests.serverless.conftest import Serve, eventually, view

pytestmark = pytest.mark.slow

TREE: dict[str, Any] = {"name": "t", "model": {"source": {"type": "pretrained", "path": "unused"}}}
TERMS = [
    {"name": "toy_rewards:good", "weight": 2.0, "options": {"factor": 3.0}},
    {"name": "toy_rewards:process"},
    {"name": "toy_rewards:plain", "weight": 0.5},
    {"name": "outcome"},
]


def scorer(tmp_path: Path, reward: Any, serverless: dict[str, Any] | None, **options: Any) -> RewardScorer:
    domain = {"name": "d", "environment": "calculator", "reward": reward, "reward_options": options}
    config = validate(TREE | {"domains": [domain], "serverless": serverless, "deadlines": {"score": 120}}, "test")
    check_reward(config.domain("d"))
    made = RewardScorer(config, tmp_path)
    return made


def score(made: RewardScorer, **info: Any) -> dict[str, float]:
    return made.score(made.config.domain("d"), view(**info))


@pytest.fixture
def local(toy_bundle: Bundle, tmp_path: Path) -> Iterator[Any]:
    made: list[RewardScorer] = []

    def make(reward: Any, **options: Any) -> RewardScorer:
        made.append(scorer(tmp_path, reward, {"type": "local", "concurrency": 2}, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_marked_rewards_run_elsewhere_and_others_here(local: Any) -> None:
    made = local(TERMS)
    parts = score(made)
    assert parts.pop("process.pid") != os.getpid()
    assert parts == {"good": 3.0, "plain.pid": 0.5 * os.getpid(), "outcome": 0.5}
    assert made._host is not None and made._host.alive


def test_the_result_is_that_of_the_plain_function(local: Any, tmp_path: Path) -> None:
    here = scorer(tmp_path, "toy_rewards:good", None, factor=1 / 3)
    assert score(here) == score(local("toy_rewards:good", factor=1 / 3)) == {"good": 0.5 / 3}
    assert here._host is None


def test_mathematics_runs_as_a_function(local: Any) -> None:
    """math-verify, sympy and what they need come from the bundle alone, and so does the process that compares."""
    made = local("math")
    views = [view(r"so \boxed{\frac{2}{4}}", answer="1/2"), view("0.7", answer="1/2"), view("0.5")]
    right, wrong, unknown = made.score_batch("math", views, {})
    assert (right, wrong) == ({"math": 1.0}, {"math": 0.0})
    assert isinstance(unknown, RewardFailure) and "set answer_key" in str(unknown)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raise", "ZeroDivisionError: no answer"),
        ("nan", "part 'p' is nan"),
        ("number", "it gave 5, not a dict"),
        ("empty", "it gave {}"),
        ("text", "part 'p' is '1'"),
        ("none", "it gave None"),
    ],
)
@pytest.mark.parametrize("where", ["here", "function"])
def test_poison_is_a_failure_that_names_reward_and_domain(
    serve: Serve, toy_bundle: Bundle, tmp_path: Path, what: str, message: str, where: str
) -> None:
    section = None if where == "here" else {"type": "lambda", "prefix": "t", "endpoint_url": serve().url}
    made = scorer(tmp_path, "toy_rewards:poison", section, what=what)
    with pytest.raises(RewardFailure, match="reward 'toy_rewards:poison' of domain 'd': ") as caught:
        score(made)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [(0, "answered None"), (1, "not 1 results"), (2, "part 'p' is None"), (3, "'toy_rewards:good' of domain 'd': 7")],
)
def test_a_function_that_answers_nonsense_is_a_failure(serve: Serve, tmp_path: Path, what: int, message: str) -> None:
    served = serve(handler="toy_rewards.garbage")
    made = scorer(tmp_path, "toy_rewards:good", {"type": "lambda", "prefix": "t", "endpoint_url": served.url})
    with pytest.raises(RewardFailure) as caught:
        made._score_term("toy_rewards:good", view(), {"what": what})
    assert message in f"'toy_rewards:good' of domain 'd': {caught.value}"


def test_a_crash_is_a_failure_of_the_infrastructure(local: Any) -> None:
    made = local("toy_rewards:crash")
    with pytest.raises(RewardFailure, match=r"Runtime\.ExitError"):
        score(made)


def test_an_endpoint_that_died_is_started_again(local: Any) -> None:
    made = local("toy_rewards:good")
    score(made)
    first = made._host
    first._child.kill()
    first._child.wait()
    assert score(made) == {"good": 0.5} and made._host is not first


def test_an_idle_function_ends_with_an_endpoint_that_is_killed(local: Any) -> None:
    made = local("toy_rewards:process")
    pid = int(score(made)["pid"])
    made._host._child.kill()
    eventually(lambda: not psutil.pid_exists(pid))


def test_a_busy_function_ends_with_an_endpoint_that_is_killed(local: Any, tmp_path: Path) -> None:
    made = local("toy_rewards:waiting", gate=str(tmp_path / "gate"))  # which nobody opens
    made.config = made.config.model_copy(update={"deadlines": DeadlineSection(score=20)})
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(score, made)
        eventually(lambda: any(tmp_path.glob("gate-*")))
        pid = int(next(tmp_path.glob("gate-*")).name.removeprefix("gate-"))
        made._host._child.kill()
        eventually(lambda: not psutil.pid_exists(pid))
        assert isinstance(asked.exception(120), RewardFailure)


def test_a_run_on_aws_needs_its_functions_there(serve: Serve, tmp_path: Path) -> None:
    section = {"type": "lambda", "prefix": "t", "endpoint_url": serve().url}
    check_functions(scorer(tmp_path, TERMS, section).config)
    check_functions(scorer(tmp_path, TERMS, None).config)
    with pytest.raises(FunctionMissing, match=r"t-math: ResourceNotFoundException; deploy it"):
        check_functions(scorer(tmp_path, "math", section).config)
    with pytest.raises(InvocationFailed, match="t-toys"):
        check_functions(scorer(tmp_path, TERMS, section | {"endpoint_url": "http://127.0.0.1:9"}).config)


def test_nothing_is_left_after_close(local: Any, tmp_path: Path) -> None:
    made = local("toy_rewards:process")
    pid = int(score(made)["pid"])
    made.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_functions_share_what_their_rewards_ask(toy_bundle: Bundle) -> None:
    toys, hasty = sorted(toy_bundle.functions, key=lambda f: f.name, reverse=True)
    assert (toys.name, toys.timeout_s, hasty.name, hasty.timeout_s) == ("toys", 120, "hasty", 1)
    assert set(hasty.rewards) == {"toy_rewards:endless"} and "toy_rewards:good" in toys.rewards
    assert bundle_of(["outcome"]).functions == ()


def test_a_batch_of_an_unmarked_reward_is_refused(local: Any) -> None:
    with pytest.raises(ConfigError, match="'outcome' has no @serverless mark"):
        local("outcome").score_batch("outcome", [view()], {})
