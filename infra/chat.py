"""The only maker of tokens: from messages to token ids and back, exactly and safely.

A trajectory's tokens are built by appending, never by rendering a conversation again:

    open(messages)    system and user messages + the header of the model's turn     mask 0
    <sampled>         the model's tokens, closed by a stop token                     mask 1
    reply(message)    end of the turn + one tool or user message + the header        mask 0
    <sampled> ...

`conversation` is the general form of both: any messages, tool calls and tools, behind any number of recorded ones.

Invariants
- Nothing in a message, a tool call or the description of a tool becomes a control token: only the template's own text
  may hold one. (Control are the tokens that the tokenizer calls special; `<think>`, say, is not.)
- Where contents hold no control token and the template does not alter them (by trimming, say), the pieces
  joined are the tokens of the whole conversation rendered at once and tokenised. A template that rewrites
  what came before (one that drops earlier thinking, for example) is refused when loaded.
- Needs `tokenizers` and `jinja2` only; imports neither torch nor transformers.

How: the template is rendered with a mark in the place of every content. The control tokens found in the text
between the marks are the turn structure; the contents are put back in, and each run between two control
tokens is tokenised as one text with the recognition of control tokens switched off.

The tool role: many templates just print whatever role they are given, and a model was never trained on such a
header. If the template treats "tool" like any made-up role (or refuses it, or leaves its content out), a
tool's answer is sent as a user message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

from infra.templates import compile_template, read_template
from rl.errors import ConfigError
from rl.sessions import Said, SaidCall
from rl.trajectory import Message

_PROBE = "rollmillprobe"
_MARK = re.compile("\ue000([0-9]+)\ue001")


class UnfitConversation(ConfigError):
    """The chat template can not render these messages as they are."""


class ChatCodec:
    """Tokens of the conversations of one model. Thread-safe after construction."""

    def __init__(self, tokenizer: Tokenizer, template: str, special_names: dict[str, str], source: str = "model"):
        """`special_names` are the tokenizer's named tokens (eos_token, ...), which templates may print.

        Raises ConfigError, naming `source`, if the template can not be used.
        """
        self._source = source
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True
        self._template = compile_template(template, source)
        self._names = special_names
        self._controls = {
            token.content: index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        longest_first = sorted(map(re.escape, self._controls), key=len, reverse=True)
        self._control = re.compile("|".join(longest_first) or r"(?!)")
        self._masked = re.compile("|".join([*longest_first, "[\ue000\ue001]"]))
        self._tool_role = "tool" if self._knows_tool_role() else "user"
        self._suffix = self._derive_suffixes()
        self._check_no_injection()

    @classmethod
    def from_directory(cls, directory: Path | str) -> ChatCodec:
        """From a Hugging Face model directory. Raises ConfigError when it has no tokenizer or no usable template."""
        path = Path(directory)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{path}: has no tokenizer.json; save it with a fast tokenizer")
        template, names = read_template(path)
        return cls(Tokenizer.from_file(str(file)), template, names, str(path))

    @property
    def end(self) -> int:
        """The token that closes a model's turn."""
        return self._end

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The token that closes a model's turn, and the tokenizer's end of sequence where that is another."""
        eos = self._controls.get(self._names.get("eos_token", ""))
        return (self._end,) if eos in (None, self._end) else (self._end, eos)

    def open(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Tokens of the opening messages and the header of the model's first turn."""
        return self.conversation([Said(m.role, m.content) for m in messages], tools)

    def conversation(
        self, messages: Sequence[Said], tools: Sequence[dict[str, Any]] = (), after: int = 0
    ) -> list[int]:
        """Tokens of the messages behind the first `after`, and the header of the model's next turn. The last one of
        those is a turn of the model, closed by `end`. Raises UnfitConversation."""
        contents: list[str] = []
        given = [self._marked(said, at < after, contents) for at, said in enumerate(messages)]
        shown = [self._mask(tool, contents) for tool in tools]
        text, start = self._render(given, True, shown), 0
        if after:
            said = given[after - 1]["content"]
            close = self._control.match(text, text.find(said) + len(said))
            if close is None or not self._render(given[:after], False, shown).startswith(text[: close.end()]):
                raise UnfitConversation(f"{self._source}: the chat template alters what came before these messages")
            start = close.end()
        for message in given[after:]:
            if message["content"] and text.count(message["content"], start) != 1:
                raise UnfitConversation(f"{self._source}: the chat template leaves out a message of {message['role']}")
        return self._encode(text[start:], contents)

    def _marked(self, said: Said, sampled: bool, contents: list[str]) -> dict[str, Any]:
        """A message for the template. Calls that the model sampled are part of its text already."""
        role = self._tool_role if said.role == "tool" else said.role
        calls = () if sampled else said.calls
        if calls and not said.content:
            return {"role": role, "content": "", "tool_calls": [self._call(call, contents) for call in calls]}
        contents.append(said.content)
        message: dict[str, Any] = {"role": role, "content": _mark(len(contents) - 1)}
        if calls:
            message["tool_calls"] = [self._call(call, contents) for call in calls]
        return message

    def _call(self, call: SaidCall, contents: list[str]) -> dict[str, Any]:
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError):
            arguments = call.arguments
        function = {"name": call.name, "arguments": arguments}
        return {"type": "function", "function": self._mask(function, contents)}

    def _mask(self, value: Any, contents: list[str]) -> Any:
        """The same JSON value with marks in the place of all that would become a control token or is a mark."""

        def mark(match: re.Match[str]) -> str:
            contents.append(match[0])
            return _mark(len(contents) - 1)

        if isinstance(value, str):
            return self._masked.sub(mark, value)
        if isinstance(value, dict):
            return {self._mask(key, contents): self._mask(entry, contents) for key, entry in value.items()}
        return [self._mask(entry, contents) for entry in value] if isinstance(value, list) else value

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template tells the model which tools there are."""
        probe = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {}}}
        return _PROBE in self._render([{"role": "user", "content": "x"}], True, [probe])

    @cached_property
    def shows_calls(self) -> bool:
        """Whether the template writes the calls of a message that the model did not sample."""
        said = [Said("user", "x"), Said("assistant", "", (SaidCall(_PROBE, "{}"),)), Said("tool", "x")]
        return _PROBE in self._render([self._marked(one, False, []) for one in said], True)

    def reply(self, message: Message) -> list[int]:
        """Tokens between one model turn, whose stop token was sampled, and the next: `message` and the header."""
        role = self._tool_role if message.role == "tool" else message.role
        if role not in self._suffix:
            raise ValueError(f"a reply has role tool or user, not {message.role!r}")
        return self._encode(self._suffix[role], [message.content])

    def turn(self, text: str) -> list[int]:
        """Tokens of a model turn that says `text`, with its stop token: what a demonstration is made of."""
        return [*self._encode(self._lead + _mark(0), [text]), self._end]

    def text(self, text: str) -> list[int]:
        """Tokens of plain text; control tokens are not recognised in it."""
        return self._plain(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a model turn without its stop token. Other control tokens stay visible."""
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _encode(self, marked: str, contents: Sequence[str]) -> list[int]:
        """Tokens of a rendering with marks, with the contents in their places."""
        ids: list[int] = []
        run = ""
        for piece in self._pieces(marked):
            if isinstance(piece, int):
                ids += self._plain(run)
                ids.append(piece)
                run = ""
            else:
                run += _MARK.sub(lambda match: contents[int(match[1])], piece)
        return ids + self._plain(run)

    def _pieces(self, marked: str) -> list[str | int]:
        """The text split at control tokens, these as ids."""
        pieces: list[str | int] = []
        at = 0
        for match in self._control.finditer(marked):
            pieces += [marked[at : match.start()], self._controls[match[0]]]
            at = match.end()
        return [*pieces, marked[at:]]

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids if text else []

    def _render(self, messages: list[dict[str, Any]], header: bool, tools: Sequence[dict[str, Any]] = ()) -> str:
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=header, tools=list(tools) or None, **self._names
            )
        except jinja2.TemplateError as error:
            raise UnfitConversation(f"{self._source}: the chat template refuses the messages: {error}") from error

    def _conversation(self, *roles: str, header: bool = True) -> str:
        return self._render([{"role": role, "content": _mark(at)} for at, role in enumerate(roles)], header)

    def _knows_tool_role(self) -> bool:
        def rendered(role: str) -> str | None:
            try:
                text = self._conversation("user", "assistant", role)
            except ConfigError:
                return None
            return text if text.count(_mark(2)) == 1 else None

        tool, made_up = rendered("tool"), rendered(_PROBE)
        return tool is not None and (made_up is None or tool != made_up.replace(_PROBE, "tool"))

    def _derive_suffixes(self) -> dict[str, str]:
        """What follows the sampled stop token, by role of the next message, with mark 0 for its content.

        Also sets the token that ends a turn, and what the template puts before what the model says (an empty
        thinking, say). Raises ConfigError unless conversations only ever grow at their end.
        """
        refuse = ConfigError(
            f"{self._source}: the chat template is not prefix-stable (a longer conversation changes what "
            "came before, or a model's turn does not end with a control token); use a training variant of it"
        )
        opening, said = self._conversation("user"), _mark(1)
        closed = self._conversation("user", "assistant", header=False)
        self._lead = closed[len(opening) :].partition(said)[0]
        opening += self._lead
        end = self._control.match(closed, len(opening + said))
        if not closed.startswith(opening + said) or end is None or self._control.search(self._lead):
            raise refuse
        self._end = self._controls[end[0]]
        suffixes = {}
        for role in dict.fromkeys(("user", self._tool_role)):
            text = self._conversation("user", "assistant", role)
            before = opening + said + end[0]
            if not text.startswith(before) or text.count(_mark(2)) != 1:
                raise refuse
            suffixes[role] = text[len(before) :].replace(_mark(2), _mark(0))
        for first, one in suffixes.items():
            for second, two in suffixes.items():
                grown = (
                    opening + said + end[0] + one.replace(_mark(0), _mark(2))
                    + self._lead + _mark(3) + end[0] + two.replace(_mark(0), _mark(4))
                )  # fmt: skip
                if self._conversation("user", "assistant", first, "assistant", second) != grown:
                    raise refuse
        return suffixes

    def _check_no_injection(self) -> None:
        """Every control token as content must come out as text; pieces tokenised apart must equal the
        whole.
        """
        unknown = self._controls.get(self._names.get("unk_token", ""))
        forbidden = set(self._controls.values()) - {unknown}
        for text in self._controls:
            if forbidden & set(self._plain(f"a{text}b")):
                raise ConfigError(f"{self._source}: the tokenizer makes a control token of the plain text {text!r}")
        text = self._conversation("user", "assistant", "user")
        contents = ["alpha", "beta", "gamma"]
        apart = (
            self.open([Message("user", contents[0])])
            + self.turn(contents[1])
            + self.reply(Message("user", contents[2]))
        )
        self._tokenizer.encode_special_tokens = False
        whole = self._plain(_MARK.sub(lambda match: contents[int(match[1])], text))
        self._tokenizer.encode_special_tokens = True
        if apart != whole:
            raise ConfigError(
                f"{self._source}: the tokenizer splits a conversation differently turn by turn and at once"
            )


def _mark(at: int) -> str:
    return f"\ue000{at}\ue001"
