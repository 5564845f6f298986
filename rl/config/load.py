"""Reads configurations with one clear line per mistake (a RunConfig, or what `kind` names); writes and reads resolved
ones.

Invariants: the only exception is ConfigError; its message names the file, the field, the value and the mend;
one mistake makes one line. `loads(dumps(config)) == config`, also when an earlier release wrote it (`upgrades`).
"""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from rl.config.base import Section
from rl.config.run import RunConfig
from rl.config.upgrades import FIELD, marked, upgraded
from rl.errors import ConfigError, ConfigTooNew

S = TypeVar("S", bound=Section)
STORED = "stored configuration"


def parse(text: str, source: str, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """A RunConfig from YAML text. `overrides` maps dotted field paths (`training.steps`, `domains.0.weight`)
    to values and wins over the text."""
    return parse_as(RunConfig, text, source, overrides)


def parse_as(kind: type[S], text: str, source: str, overrides: Mapping[str, Any] | None = None) -> S:
    """The same for any root."""
    tree = from_yaml(text, source)
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: a configuration is a mapping of fields, found {type(tree).__name__}")
    if FIELD in tree:  # a stored one, taken as a file
        tree = upgraded(tree, source)
    for path, value in (overrides or {}).items():
        _set(tree, path, value, source)
    return validate_as(kind, tree, source)


def from_yaml(text: str, source: str) -> Any:
    """The value that a text is. Raises ConfigError."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date or a number that there is not
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}") from error


def validate(tree: Mapping[str, Any], source: str) -> RunConfig:
    """A RunConfig from a plain tree."""
    return validate_as(RunConfig, tree, source)


def validate_as(kind: type[S], tree: Mapping[str, Any], source: str) -> S:
    """The same for any root."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise _mistakes(kind, error, tree, source) from error


def plain(config: Section) -> dict[str, Any]:
    """The tree that it is when written: every field, also those left at their defaults."""
    return config.model_dump(mode="json", by_alias=True)


def dumps(config: Section) -> str:
    """The resolved configuration as JSON, with its format."""
    return json.dumps(marked(plain(config)), indent=2)


def loads(text: str, source: str = STORED) -> RunConfig:
    """What `dumps` wrote, here or in another release. Raises ConfigTooNew, ConfigError."""
    return loads_as(RunConfig, text, source)


def loads_as(kind: type[S], text: str, source: str = STORED) -> S:
    """The same for any root."""
    return restored(kind, stored_tree(text, source), source)


def stored_tree(text: str, source: str = STORED) -> dict[str, Any]:
    """The tree of what `dumps` wrote, as this release has it. Raises ConfigTooNew, ConfigError."""
    try:
        tree = json.loads(text)  # not as YAML, to which 1e-05 is a string
    except ValueError as error:
        raise ConfigError(f"{source}: not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: a configuration is a mapping of fields, found {type(tree).__name__}")
    return upgraded(tree, source)


def restored(kind: type[S], tree: Mapping[str, Any], source: str = STORED) -> S:
    """The configuration that such a tree is. Raises ConfigTooNew, ConfigError."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        unknown = [".".join(_path(e["loc"], tree)) for e in error.errors() if e["type"] == "extra_forbidden"]
        if unknown:
            raise ConfigTooNew(
                f"{source} has what this Rollmill does not know: {', '.join(unknown)}; a newer one wrote it: upgrade"
            ) from error
        raise _mistakes(kind, error, tree, source) from error


def _set(tree: Any, path: str, value: Any, source: str) -> None:
    *parents, last = path.split(".")
    node = tree
    for at, key in enumerate([*parents, last]):
        here = ".".join(parents[:at]) or "configuration"
        if isinstance(node, list):
            if not key.isdecimal() or int(key) >= len(node):
                raise ConfigError(
                    f"{source}: --set {path}: {here} has {len(node)} entries, counted from 0; not {key!r}"
                )
        elif not isinstance(node, dict):
            raise ConfigError(f"{source}: --set {path}: {here} is not a section (found {reprlib.repr(node)})")
        index: Any = int(key) if isinstance(node, list) else key
        if at == len(parents):
            node[index] = value
        else:
            node = node[index] if isinstance(node, list) else node.setdefault(index, {})


def _mistakes(kind: type[Section], error: ValidationError, tree: Any, source: str) -> ConfigError:
    return ConfigError("\n".join(f"{source}: {line}" for line in _lines(kind, error, tree)))


def _lines(kind: type[Section], error: ValidationError, tree: Any) -> list[str]:
    """One line per mistake. Alternatives of one union that all failed are one mistake; a complaint about a
    section that has a mistake inside it (it ends up too short, say) is a consequence of that one."""
    by_field: dict[tuple[str, ...], list[Any]] = {}
    for e in error.errors():
        by_field.setdefault(_path(e["loc"], tree), []).append(e)
    inner = [path for path in by_field if not any(len(p) > len(path) and p[: len(path)] == path for p in by_field)]
    return [_line(kind, path, by_field[path]) for path in inner]


def _path(location: tuple[int | str, ...], tree: Any) -> tuple[str, ...]:
    """The field as the user wrote it: without the tags that pydantic puts in where it chose among types."""
    path: list[str] = []
    node = tree
    for at, part in enumerate(location):
        if (isinstance(node, dict) and part in node) or (isinstance(node, list) and part in range(len(node))):
            node = node[part]  # type: ignore[index]
        elif not (isinstance(node, dict) and at == len(location) - 1):
            continue
        path.append(str(part))
    return tuple(path)


def _line(kind: type[Section], path: tuple[str, ...], errors: list[Any]) -> str:
    error = errors[0]
    field = ".".join(path)
    found = f"(found {reprlib.repr(error['input'])})"
    match error["type"]:
        case "extra_forbidden":
            known = _fields_at(kind, path[:-1])
            if path[-1] in known:
                section = ".".join(path[:-1])
                return f"{field}: not a field of the `type` that is chosen; set {section}.type, or leave it out {found}"
            close = difflib.get_close_matches(path[-1], known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known fields: {', '.join(sorted(known))}"
            return f"{field}: unknown field; {hint} {found}"
        case "missing":
            return f"{field}: required field is missing; add it"
        case "invalid_key":
            return f"{field or 'configuration'}: field names are strings {found}"
        case "value_error" if not path:
            return str(error["ctx"]["error"])
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{field}: a section is a mapping of fields; give it some, or remove it {found}"
        case "union_tag_not_found":
            return f"{field}: the field `type` is missing; it chooses one of {', '.join(_tags_at(kind, path))} {found}"
        case "union_tag_invalid":
            context = error["ctx"]
            return f"{field}.type: should be one of {context['expected_tags']} (found {context['tag']!r})"
    messages = dict.fromkeys(e["msg"].removeprefix("Value error, ") for e in errors)
    return f"{field}: {', or '.join(messages)} {found}"


def _fields_at(kind: type[Section], path: tuple[str, ...]) -> list[str]:
    """Names, as a user writes them, of the fields of the section there; of all its types, if several."""
    return [field.alias or name for model in _sections_at(kind, path) for name, field in model.model_fields.items()]


def _tags_at(kind: type[Section], path: tuple[str, ...]) -> list[str]:
    """The values of `type` that choose among the types of the section there."""
    return [model.model_fields["type"].default for model in _sections_at(kind, path)]


def _sections_at(kind: type[Section], path: tuple[str, ...]) -> list[type[BaseModel]]:
    models: list[type[BaseModel]] = [kind]
    for part in path:
        if not part.isdecimal():
            fields = [model.model_fields[part] for model in models if part in model.model_fields]
            models = [model for field in fields for model in _models_in(field.annotation)]
    return models


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
