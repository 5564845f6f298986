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


def terms(query: str) -> list[str]:
    """The words of `query` that count, the first 16, quoted for FTS5: join them by ` OR ` or ` AND `."""
    words = [word for word in re.findall(r"[^\W_]+", query.lower()) if not _STOP.fullmatch(word)]
    return [f'"{word}"' for word in dict.fromkeys(words[:WORDS])]
