"""The only maker of tokens: from messages to token ids and back, exactly and safely.

A trajectory's tokens are built by appending, never by rendering a conversation again:

    open(messages)    system and user messages + the header of the model's turn     mask 0
    <sampled>         the model's tokens, closed by a stop token                     mask 1
    reply(message)    end of the turn + one tool or user message + the header        mask 0
    <sampled> ...

Invariants
- Nothing in a message's content becomes a control token: only the template's own text may hold one.
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
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from rl.errors import ConfigError
from rl.trajectory import Message

_MADE_UP_ROLE = "rollmillprobe"
_MARK = re.compile("\ue000([0-9]+)\ue001")


class ChatCodec:
    """Tokens of the conversations of one model. Thread-safe after construction."""

    def __init__(self, tokenizer: Tokenizer, template: str, special_names: dict[str, str], source: str = "model"):
        """`special_names` are the tokenizer's named tokens (eos_token, ...), which templates may print.

        Raises ConfigError, naming `source`, if the template can not be used.
        """
        self._source = source
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True
        self._template = _compile(template, source)
        self._names = special_names
        self._controls = {
            token.content: index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        longest_first = sorted(map(re.escape, self._controls), key=len, reverse=True)
        self._control = re.compile("|".join(longest_first) or r"(?!)")
        self._tool_role = "tool" if self._knows_tool_role() else "user"
        self._suffix = self._derive_suffixes()
        self._check_no_injection()

    @classmethod
    def from_directory(cls, directory: Path | str) -> ChatCodec:
        """From a Hugging Face model directory. Raises ConfigError when it has no tokenizer or no usable
        template.
        """
        path = Path(directory)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{path}: has no tokenizer.json; save it with a fast tokenizer")
        settings_file = path / "tokenizer_config.json"
        settings = json.loads(settings_file.read_text()) if settings_file.is_file() else {}
        template_file = path / "chat_template.jinja"
        template = template_file.read_text() if template_file.is_file() else settings.get("chat_template")
        if not isinstance(template, str):
            raise ConfigError(f"{path}: has no chat template; add chat_template.jinja (see docs of the tokenizer)")
        names = {
            key: value["content"] if isinstance(value, dict) else value
            for key, value in settings.items()
            if key.endswith("_token") and isinstance(value, dict | str)
        }
        return cls(Tokenizer.from_file(str(file)), template, names, str(path))

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The token that closes a model's turn, and the tokenizer's end of sequence where that is another."""
        eos = self._controls.get(self._names.get("eos_token", ""))
        return (self._end,) if eos in (None, self._end) else (self._end, eos)

    def open(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Tokens of the opening messages and the header of the model's first turn."""
        marked = [{"role": m.role, "content": _mark(at)} for at, m in enumerate(messages)]
        return self._encode(self._render(marked, True, tools), [m.content for m in messages])

    def reply(self, message: Message) -> list[int]:
        """Tokens between one model turn, whose stop token was sampled, and the next: `message` and the
        header.
        """
        role = self._tool_role if message.role == "tool" else message.role
        if role not in self._suffix:
            raise ValueError(f"a reply has role tool or user, not {message.role!r}")
        return self._encode(self._suffix[role], [message.content])

    def turn(self, text: str) -> list[int]:
        """Tokens of a model turn that says `text`, with its stop token: what a demonstration is made of."""
        return [*self._encode(_mark(0), [text]), self._end]

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

    def _render(self, messages: list[dict[str, str]], header: bool, tools: Sequence[dict[str, Any]] = ()) -> str:
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=header, tools=list(tools) or None, **self._names
            )
        except jinja2.TemplateError as error:
            raise ConfigError(f"{self._source}: the chat template refuses the messages: {error}") from error

    def _conversation(self, *roles: str, header: bool = True) -> str:
        return self._render([{"role": role, "content": _mark(at)} for at, role in enumerate(roles)], header)

    def _knows_tool_role(self) -> bool:
        def rendered(role: str) -> str | None:
            try:
                text = self._conversation("user", "assistant", role)
            except ConfigError:
                return None
            return text if text.count(_mark(2)) == 1 else None

        tool, made_up = rendered("tool"), rendered(_MADE_UP_ROLE)
        return tool is not None and (made_up is None or tool != made_up.replace(_MADE_UP_ROLE, "tool"))

    def _derive_suffixes(self) -> dict[str, str]:
        """What follows the sampled stop token, by role of the next message, with mark 0 for its content.

        Also sets the token that ends a turn. Raises ConfigError unless conversations only ever grow at
        their end.
        """
        refuse = ConfigError(
            f"{self._source}: the chat template is not prefix-stable (a longer conversation changes what "
            "came before, or a model's turn does not end with a control token); use a training variant of it"
        )
        opening, said = self._conversation("user"), _mark(1)
        closed = self._conversation("user", "assistant", header=False)
        end = self._control.match(closed, len(opening + said))
        if not closed.startswith(opening + said) or end is None:
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
                    + _mark(3) + end[0] + two.replace(_mark(0), _mark(4))
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


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` of training templates: its body, as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(template: str, source: str) -> jinja2.Template:
    """The template in the environment that transformers gives it, but without a clock."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ConfigError(f"{source}: the chat template can not be read: {error}") from error
