"""The token view: every token, told apart by who made it; nothing of a run is markup."""

from __future__ import annotations

import re

from infra.tracking.tokens import token_view
from rl.trajectory import Uid
from tests.store.samples import member


def test_every_token_is_there_and_told_apart() -> None:
    one = member(Uid(3, 0), 0, 2, reward=0.5)
    one.versions[-1] += 1
    page = token_view(one, lambda ids: f"<{ids[0]}>\n")
    told = re.findall(r'title="([^"]*)"', page)
    assert [text.split(",")[0] for text in told] == [f"token {at}" for at in range(len(one.token_ids))]
    assert ["log-prob" in text for text in told] == list(map(bool, one.loss_mask))
    assert [text.endswith("prompt") for text in told[: one.prompt_length]] == [True] * one.prompt_length
    assert page.count("border-bottom") == 1, "one token is of another version"
    assert "&lt;11&gt;↵" in page and "<11>" not in page
    assert "reward <b>0.500</b> (outcome 0.5)" in page
