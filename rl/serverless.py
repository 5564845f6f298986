"""The mark of a reward that can run as a serverless function (RollArt, R3).

Invariants: `@serverless` is pure metadata, a marked function stays a plain function and may be called as one;
rewards that name one function share it, at the largest memory and timeout that any of them asks for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from rl.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

MEMORY_MB = range(128, 10_241)
TIMEOUT_S = range(1, 901)
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


@dataclass(frozen=True)
class Serverless:
    """What a reward asks of its function."""

    function: str
    memory_mb: int = 512
    timeout_s: int = 30
    """Of one invocation, in seconds."""
    requires: tuple[str, ...] = ()
    """Distributions that the reward imports, by name; what those need themselves comes with them."""


def serverless(
    function: str, *, memory_mb: int = 512, timeout_s: int = 30, requires: Iterable[str] = ()
) -> Callable[[F], F]:
    """Declare that a reward may run as the function of this name. Raises ConfigError for what Lambda refuses."""
    if not _NAME.fullmatch(function):
        raise ConfigError(f"@serverless: {function!r} is no name; use up to 32 of a-z, 0-9 and '-'")
    if memory_mb not in MEMORY_MB:
        raise ConfigError(f"@serverless({function!r}): memory_mb ({memory_mb}) must be from 128 to 10240")
    if timeout_s not in TIMEOUT_S:
        raise ConfigError(f"@serverless({function!r}): timeout_s ({timeout_s}) must be from 1 to 900")
    wanted = Serverless(function, memory_mb, timeout_s, tuple(requires))

    def mark(reward: F) -> F:
        reward.__rollmill_serverless__ = wanted  # type: ignore[attr-defined]
        return reward

    return mark


def serverless_of(reward: Callable[..., Any]) -> Serverless | None:
    """The declaration of a reward; None for one that runs where it is called."""
    return getattr(reward, "__rollmill_serverless__", None)


def merged(marks: Iterable[Serverless]) -> Serverless:
    """One function for several rewards that name it."""
    wanted = list(marks)
    requires = sorted({name for mark in wanted for name in mark.requires})
    return Serverless(
        wanted[0].function,
        max(mark.memory_mb for mark in wanted),
        max(mark.timeout_s for mark in wanted),
        tuple(requires),
    )
