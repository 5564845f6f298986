"""Reads a configuration file into a RunConfig, with one clear line per mistake.

Invariant: the only exception is ConfigError; its message names the file, the field, the value and the mend.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from rl.config.run import RunConfig
from rl.errors import ConfigError


def parse(text: str, source: str, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """A RunConfig from YAML text. `overrides` maps dotted field paths to values and wins over the text."""
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: a configuration is a mapping of fields, found {type(tree).__name__}")
    for path, value in (overrides or {}).items():
        _set(tree, path.split("."), value, source)
    return validate(tree, source)


def validate(tree: Mapping[str, Any], source: str) -> RunConfig:
    """A RunConfig from a plain tree."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {_line(e)}" for e in error.errors())) from error


def _set(tree: dict[str, Any], path: list[str], value: Any, source: str) -> None:
    for at, key in enumerate(path[:-1]):
        node: Any = tree[int(key)] if isinstance(tree, list) else tree.setdefault(key, {})
        if not isinstance(node, dict | list):
            raise ConfigError(f"{source}: --set {'.'.join(path)}: {'.'.join(path[: at + 1])} is not a section")
        tree = node  # type: ignore[assignment]
    tree[path[-1]] = value


def _line(error: Any) -> str:
    location = [str(part) for part in error["loc"]]
    field = ".".join(location) or "configuration"
    if error["type"] == "extra_forbidden":
        known = _fields_at(location[:-1])
        close = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known fields: {', '.join(sorted(known))}"
        return f"{field}: unknown field; {hint}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing":
        return f"{field}: required field is missing"
    return message if not location else f"{field}: {message} (found {error['input']!r})"


def _fields_at(location: list[str]) -> list[str]:
    """Field names of the section at a location, following unions by any of their members."""
    models: list[type[BaseModel]] = [RunConfig]
    for part in location:
        found: list[type[BaseModel]] = []
        for model in models:
            if part in model.model_fields:
                found += _models_in(model.model_fields[part].annotation)
        models = found or models
    return [name for model in models for name in model.model_fields]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
