"""Finds what users add (environments, rewards) by name or by `module:attribute`, and checks its options.

A name is one of the built-in ones or an entry point, in the given group, of any installed package; built-in
names can not be taken over.

Invariant: the only exception is ConfigError, and it names the field, the value and the mend.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from rl.errors import ConfigError


def find(spec: str, group: str, built_in: Mapping[str, str], field: str) -> Any:
    """The object of that name, or at that `module:attribute`."""
    path = built_in.get(spec) or _installed(group).get(spec, spec)
    module, _, attribute = path.partition(":")
    if not attribute:
        hint = _hint(spec, {*built_in, *_installed(group)})
        raise ConfigError(f"{field}: nothing is named {spec!r}; {hint}, or give 'module:attribute'")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{field}: can not load {path!r}: {error}") from error


def known(group: str, built_in: Mapping[str, str]) -> list[str]:
    """The names that `find` knows, in order."""
    return sorted({*built_in, *_installed(group)})


@cache
def _installed(group: str) -> dict[str, str]:
    """The entry points of a group. Kept, for reading them costs tens of milliseconds."""
    return {entry.name: entry.value for entry in entry_points(group=group)}


def check_options(function: Callable[..., Any], options: Iterable[str], field: str, given: int = 0) -> None:
    """Refuse option names that `function` does not take; its first `given` parameters are not options."""
    parameters = list(inspect.signature(function).parameters.values())[given:]
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters]
    for name in options:
        if name not in known:
            raise ConfigError(f"{field}.{name}: unknown option; {_hint(name, known)}")


def _hint(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(names) or 'none'}"
