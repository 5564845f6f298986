"""What no engine can serve, refused alike by all of them."""

from __future__ import annotations

from collections.abc import Sequence

from infra.engines.errors import BadRequest, PromptTooLong
from infra.engines.protocol import Sampling


def check_request(token_ids: Sequence[int], sampling: Sampling, vocabulary: int, longest: int) -> None:
    """Raises BadRequest or PromptTooLong. `longest`: tokens of a whole sequence."""
    if len(token_ids) == 0:
        raise BadRequest("token_ids is empty; a prompt has one token at least")
    least, most = min(token_ids), max(token_ids)
    if least < 0 or most >= vocabulary:
        raise BadRequest(f"token_ids has {least}..{most}; the vocabulary is 0..{vocabulary - 1}")
    if sampling.max_new_tokens < 1:
        raise BadRequest(f"max_new_tokens is {sampling.max_new_tokens}; at least 1")
    if not sampling.temperature > 0:
        raise BadRequest(f"temperature is {sampling.temperature}; above 0")
    if len(token_ids) >= longest:
        raise PromptTooLong(
            f"the prompt has {len(token_ids)} tokens; a sequence has {longest} at most, answer included"
        )
