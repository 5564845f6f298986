"""Configurations that an earlier release stored, as trees of the present one.

Invariants
- What is stored says its format, at its root; what says none is of format 1.
- An upgrade is a pure function from the tree of one format to that of the next, so that a chain of them reads any that
  was ever stored. Nothing is ever rewritten.
- There is one chain for runs, services and jobs, which share their sections: an upgrade leaves alone what a tree has
  not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rl.errors import ConfigTooNew

FORMAT = 1
"""Of what is stored. Raised when a field is renamed, moved, taken away or means something else. A new field needs no
upgrade: what was stored before gets its default, and an earlier release refuses it by name."""
Upgrade = Callable[[dict[str, Any]], dict[str, Any]]
UPGRADES: Mapping[int, Upgrade] = {}
"""From the tree of each older format to that of the next one."""
FIELD = "format"


def marked(tree: dict[str, Any]) -> dict[str, Any]:
    """A tree to be stored: with its format, first."""
    return {FIELD: FORMAT, **tree}


def upgraded(tree: dict[str, Any], source: str) -> dict[str, Any]:
    """What `marked` made, here or in another release, as this one has it, without the format. Raises ConfigTooNew."""
    written = tree.get(FIELD, 1)
    tree = {name: value for name, value in tree.items() if name != FIELD}
    if not isinstance(written, int) or written > FORMAT:
        raise ConfigTooNew(f"{source} is of format {written!r}, this Rollmill reads up to {FORMAT}; upgrade it")
    for older in range(written, FORMAT):
        tree = UPGRADES[older](tree)
    return tree
