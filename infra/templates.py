"""Chat templates, compiled in the environment that transformers gives them, but sandboxed and without a clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rl.errors import ConfigError


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` of training templates: its body, as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(template: str, source: str) -> jinja2.Template:
    """Raises ConfigError, naming `source`, if it can not be read."""

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


def read_template(directory: Path) -> tuple[str, dict[str, str]]:
    """The chat template of a Hugging Face model directory, and the named tokens that it may print. Raises ConfigError
    when there is none."""
    settings_file = directory / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text()) if settings_file.is_file() else {}
    template_file = directory / "chat_template.jinja"
    template = template_file.read_text() if template_file.is_file() else settings.get("chat_template")
    if not isinstance(template, str):
        raise ConfigError(f"{directory}: has no chat template; add chat_template.jinja (see docs of the tokenizer)")
    names = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in settings.items()
        if key.endswith("_token") and isinstance(value, dict | str)
    }
    return template, names
