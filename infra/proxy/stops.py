"""Where a generation ends that an agent wants to end at a text of its own.

Invariant: it ends with the first token behind which what was said holds one of those texts. A turn is decoded a few
dozen times for that, however long it is: this runs on the proxy's event loop, where everybody waits for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from infra.chat import ChatCodec
from infra.engines.protocol import Generation

HALF = "\N{REPLACEMENT CHARACTER}"
"""What the bytes of a character that is not complete are decoded to."""
CHARACTER = 4
"""Tokens that a character has at most: the bytes of UTF-8."""


def cut(codec: ChatCodec, generation: Generation, stops: tuple[str, ...]) -> tuple[Generation, str]:
    """The generation up to the token that completes the first of these texts, and what comes before that text."""
    text = codec.decode(generation.token_ids)
    if not any(stop in text for stop in stops):
        return generation, text
    n = _completing(codec, generation.token_ids, stops)
    text = codec.decode(generation.token_ids[:n])
    told = text[: min(at for stop in stops if (at := text.find(stop)) >= 0)]
    kept = replace(
        generation,
        token_ids=generation.token_ids[:n],
        logprobs=generation.logprobs[:n],
        finish_reason="stop",
        version_spans=[(start, version) for start, version in generation.version_spans if start < n],
    )
    return kept, told


def _completing(codec: ChatCodec, token_ids: Sequence[int], stops: tuple[str, ...]) -> int:
    """How many of these tokens complete the first of these texts; all together they hold one.

    Found by bisection, for what was complete once stays so when tokens are added. With one exception: at half a
    character some decoders turn the whole run of bytes before it into `HALF`, so there it is asked what was complete
    before that character.
    """

    def complete(n: int) -> bool:
        for known in range(n, max(n - CHARACTER, 0), -1):
            text = codec.decode(token_ids[:known])
            if any(stop in text for stop in stops):
                return True
            if not text.endswith(HALF):
                break
        return False

    return 1 + bisect_left(range(1, len(token_ids)), True, key=complete)
