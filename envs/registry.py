"""Finds an environment by name or by `module:attribute`, and builds it from a domain's section.

A name is one of `BUILT_IN` or an entry point of the group `rollmill.environments` of any installed package.

Invariant: whatever is wrong with a domain's environment (its name, an option's name or value) is a
ConfigError that names field, value and mend, raised when the environment is built and so before any
episode.
"""

from __future__ import annotations

import inspect

from envs.protocol import Environment
from rl.config.work import DomainSection
from rl.errors import ConfigError
from rl.plugins import check_options, find

GROUP = "rollmill.environments"
BUILT_IN = {
    "agent": "envs.agents:Agent",
    "calculator": "envs.calculator:Calculator",
    "child": "envs.adapters.child:Child",
    "code_tests": "envs.code_tests:CodeTests",
    "dataset": "envs.dataset:Dataset",
    "frozen_lake": "envs.frozen_lake:FrozenLake",
    "function_calling": "envs.function_calling:FunctionCalling",
    "gymnasium": "envs.adapters.gymnasium:Gymnasium",
    "openenv": "envs.adapters.openenv:OpenEnv",
    "skyrl_gym": "envs.adapters.skyrl_gym:SkyRLGym",
    "guess_the_number": "envs.arena_games:GuessTheNumber",
    "knowledge_search": "envs.knowledge_search:KnowledgeSearch",
    "mastermind": "envs.arena_games:Mastermind",
    "reasoning": "envs.reasoning:Reasoning",
    "shop": "envs.shop:Shop",
    "sokoban": "envs.sokoban:Sokoban",
    "sql_tables": "envs.sql_tables:SqlTables",
    "verifiers": "envs.adapters.verifiers:Verifiers",
    "word_problems": "envs.word_problems:WordProblems",
}


def environment_class(spec: str, field: str = "environment") -> type[Environment]:
    """The environment of that name or at that `module:attribute`. Raises ConfigError, which names `field`."""
    found = find(spec, GROUP, BUILT_IN, field)
    if not (inspect.isclass(found) and issubclass(found, Environment)):
        raise ConfigError(f"{field}: {spec!r} is not a subclass of envs.protocol.Environment")
    return found


def make_environment(domain: DomainSection) -> Environment:
    """A fresh environment for one episode. Raises ConfigError; cheap enough to call once just to check."""
    at = f"domains.{domain.name}"
    kind = environment_class(domain.environment, f"{at}.environment")
    options = domain.environment_options
    check_options(kind, options, f"{at}.environment_options")
    try:
        return kind(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{at}.environment_options: {error} (found {options})") from error
