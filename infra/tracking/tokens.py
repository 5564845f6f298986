"""A trajectory token by token, as HTML for a notebook or a file: who made each token, how sure the policy was, under
which version.

    colour: generated tokens by their log-prob, the surer the paler; others are grey: the loss does not see them
    a line under a token: its version is not the one that the trajectory began with
    pointing at a token tells its number, id, log-prob and version

Invariants: a pure function of the trajectory; text of a run is escaped; needs no script and no network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from rl.trajectory import Trajectory

GIVEN, MADE = "#ececec", "0, 114, 178"
UNSURE = math.log(0.01)
"""Log-prob from which on a token has the full colour."""


def token_view(one: Trajectory, decode: Callable[[list[int]], str]) -> str:
    """One `<div>`. `decode` turns token ids into text, as `AutoTokenizer.decode` does."""
    parts = ", ".join(f"{escape(name)} {value:g}" for name, value in one.rewards.items()) or "not scored"
    head = (
        f"<b>{escape(str(one.uid))}/{one.member}</b> {escape(one.problem.domain)}, {one.status.value} after "
        f"{one.turns} turns, reward <b>{one.reward:.3f}</b> ({parts}), "
        f"{one.generated_tokens} of {len(one.token_ids)} tokens "
        f"generated, started under version {one.start_version}"
    )
    body = "".join(_token(one, at, decode([token])) for at, token in enumerate(one.token_ids))
    return (
        '<div style="font-family:ui-monospace,monospace;font-size:13px;line-height:1.9;color:#262626">'
        f'<p style="font-family:system-ui,sans-serif">{head}</p><p>{body}</p></div>'
    )


def _token(one: Trajectory, at: int, text: str) -> str:
    generated, version = bool(one.loss_mask[at]), one.versions[at]
    if generated:
        share = min(1.0, one.logprobs[at] / UNSURE) if one.logprobs[at] < 0 else 0.0
        style = f"background:rgba({MADE},{0.12 + 0.68 * share:.2f})"
        told = f"token {at}, id {one.token_ids[at]}, log-prob {one.logprobs[at]:.3f}, version {version}"
        if version != one.start_version:
            style += ";border-bottom:2px solid #d55e00"
    else:
        style = f"background:{GIVEN};color:#6b6b6b"
        told = f"token {at}, id {one.token_ids[at]}, {'prompt' if at < one.prompt_length else 'environment'}"
    shown = escape(text).replace("\n", "↵") or "·"
    end = "<br>" if "\n" in text else ""
    return f'<span title="{told}" style="{style};padding:1px 1px;margin:0 1px;white-space:pre">{shown}</span>{end}'
