"""Finds an advantage function by name or by `module:attribute`.

Invariant: an advantage function maps the rewards of one group to as many numbers and knows nothing else, so
the trainer is blind to the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from rl.errors import ConfigError

Advantages = Callable[[Sequence[float]], list[float]]

BUILT_IN = ("grpo", "dr_grpo", "rloo")


def advantage_function(name: str) -> Advantages:
    """The built-in of that name, or the user's own at `module:attribute`. Raises ConfigError."""
    if name in BUILT_IN:
        built_in: Advantages = import_module(f"rl.advantages.{name}").advantages
        return built_in
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(
            f"training.advantage: {name!r} is none of {', '.join(BUILT_IN)} and not 'module:attribute'"
        )
    try:
        own: Advantages = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"training.advantage: can not load {name!r}: {error}") from error
    return own
