"""Texts at which an agent wants an answer to end: where it is cut, and what finding that costs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from infra.chat import ChatCodec
from infra.engines.protocol import Generation
from infra.proxy.stops import cut
from tests.proxy.agents.qwen import TEMPLATE, make_codec


def _codec_of_bytes() -> ChatCodec:
    """One whose tokens are single bytes and a few letters, as Llama and Gemma spell what they have no token for: at
    half a character its decoder gives up all bytes up to the last letter."""
    words = ["<unk>", "<|im_end|>", "<|im_start|>", *"abcdefghijklmnopqrstuvwxyz\n "]
    vocab = {word: at for at, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    return ChatCodec(tokenizer, TEMPLATE.read_text(), {"eos_token": "<|im_end|>"})


CODECS = {"pieces of bytes": make_codec(), "single bytes": _codec_of_bytes()}
STOPS = st.lists(st.text("ab é日🦊", min_size=1, max_size=3), min_size=1, max_size=3).map(tuple)


def _said(codec: ChatCodec, text: str) -> Generation:
    tokens = [*codec.text(text), codec.end]
    return Generation(tokens, [-float(at) for at in range(len(tokens))], "stop", [(0, 3), (len(tokens) // 2, 4)])


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=150, deadline=None)
@given(text=st.text("ab é日🦊", max_size=40), stops=STOPS)
def test_it_is_cut_at_the_first_token_behind_which_a_text_is_there(name: str, text: str, stops: tuple) -> None:
    codec = CODECS[name]
    said = _said(codec, text)
    kept, told = cut(codec, said, stops)
    before = (codec.decode(said.token_ids[:n]) for n in range(1, len(said.token_ids) + 1))
    n = next((n for n, known in enumerate(before, 1) if any(stop in known for stop in stops)), None)
    if n is None:
        assert (kept, told) == (said, text)
        return
    whole = codec.decode(said.token_ids[:n])
    assert kept.token_ids == said.token_ids[:n] and kept.logprobs == said.logprobs[:n]
    assert kept.finish_reason == "stop" and [start for start, _ in kept.version_spans if start >= n] == []
    assert whole.startswith(told) and any(whole.startswith(stop, len(told)) for stop in stops)
    assert not any(stop in told for stop in stops)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("text", ["ab ", "日🦊"])
def test_a_long_turn_is_decoded_a_few_dozen_times(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, decoded = CODECS[name], []
    said = _said(codec, text * 700 + "éé")
    decode = ChatCodec.decode
    monkeypatch.setattr(ChatCodec, "decode", lambda self, ids: decoded.append(len(ids)) or decode(self, ids))
    kept, told = cut(codec, said, ("éé",))
    assert told == text * 700 and len(kept.token_ids) >= 1400 and len(decoded) < 60
