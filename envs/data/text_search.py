"""From what a policy types to a full-text query of SQLite that always parses and stays cheap."""

from __future__ import annotations

import re

WORDS = 16
_STOP = re.compile(
    "a|about|all|an|and|any|are|as|at|be|been|but|by|can|did|do|does|for|from|had|has|have|how|i|if|in|into|is|it|its|"
    "many|me|most|much|no|not|of|on|or|so|than|that|the|their|then|there|they|this|to|was|we|were|what|when|where|"
    "which|who|whose|why|will|with|would|you"
)
"""Words that nearly every document has: they rank nothing, and a query with them takes twenty times as long."""


def match(query: str) -> str:
    """The FTS5 expression for any of the words of `query`, the first 16 that count. Empty if there are none."""
    words = [word for word in re.findall(r"[^\W_]+", query.lower()) if not _STOP.fullmatch(word)]
    return " OR ".join(f'"{word}"' for word in dict.fromkeys(words[:WORDS]))
