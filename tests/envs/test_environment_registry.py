"""Names of environments, and mistakes in a domain's section."""

from __future__ import annotations

import pytest

from envs.calculator import Calculator
from envs.registry import environment_class, make_environment
from rl.config.work import DomainSection
from rl.errors import ConfigError


def test_by_name_and_by_path() -> None:
    assert environment_class("calculator") is environment_class("envs.calculator:Calculator") is Calculator


def test_options_reach_the_constructor() -> None:
    domain = DomainSection(name="c", environment="calculator", environment_options={"operations_min": 4})
    assert isinstance(make_environment(domain), Calculator)


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        (
            "calculater",
            {},
            "domains.d.environment: nothing is named 'calculater'; did you mean 'calculator'?",
        ),
        ("nowhere:Thing", {}, "domains.d.environment: can not load 'nowhere:Thing'"),
        ("envs.calculator:Nothing", {}, "can not load 'envs.calculator:Nothing'"),
        (":Nothing", {}, "can not load ':Nothing'"),
        ("envs.calculator:LIMIT", {}, "is not a subclass of envs.protocol.Environment"),
        (
            "frozen_lake",
            {"sise": 5},
            "domains.d.environment_options.sise: unknown option; did you mean 'size'?",
        ),
        ("frozen_lake", {"size": 1}, r"domains.d.environment_options: size \(1\) must be from 2 to 64"),
        ("calculator", {"operations_min": 5}, r"operations_min \(5\) must be from 1 to operations_max \(4\)"),
        ("calculator", {"largest": "many"}, "domains.d.environment_options: .*found {'largest': 'many'}"),
    ],
)
def test_mistakes_are_named(environment: str, options: dict[str, object], message: str) -> None:
    domain = DomainSection(name="d", environment=environment, environment_options=options)
    with pytest.raises(ConfigError, match=message):
        make_environment(domain)
