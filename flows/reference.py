"""Pages that follow from the code: every field of the configuration, and every named error.

Invariants: pure functions of the types, so that a page can not say what the code does not; every field and every error
of the packages is on its page. The pages of docs/ are built with them (`docs/hooks.py`).
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rl.errors import RollmillError, StageFailure

ROOT = Path(__file__).parents[1]
PACKAGES = ("rl", "envs", "rewards", "infra", "tasks", "flows", "sim")


def configuration_page(root: type[BaseModel], title: str, opening: str) -> str:
    """Markdown: one table per section of the tree, in the order of the fields."""
    parts = [f"# {title}\n\n{opening}\n"]
    for path, model in _sections(root, "", set()):
        kind = f" (`type: {model.model_fields['type'].default}`)" if "type" in model.model_fields else ""
        head = f"## `{path}`{kind}" if path else "## The top level"
        parts.append(f"{head}\n\n{_prose(inspect.getdoc(model) or '')}\n\n{_table(model)}\n".rstrip() + "\n")
    return "\n".join(parts)


def _sections(model: type[BaseModel], path: str, seen: set[tuple[str, type]]) -> Iterator[tuple[str, type[BaseModel]]]:
    if (path, model) in seen:
        return
    seen.add((path, model))
    yield path, model
    for name, field in model.model_fields.items():
        here = f"{path}.{field.alias or name}".removeprefix(".") + ("[]" if _is_list(field.annotation) else "")
        for inner in models_in(field.annotation):
            yield from _sections(inner, here, seen)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]


def _is_list(annotation: Any) -> bool:
    arguments = [annotation, *get_args(annotation)]
    return any(get_origin(argument) in (tuple, list) and models_in(argument) for argument in arguments)


def _table(model: type[BaseModel]) -> str:
    rows = ["| field | what it takes | default | |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if name == "type":
            continue
        cells = (f"`{field.alias or name}`", _kind(field), _default(field), _words(field))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) if len(rows) > 2 else ""


def _words(field: FieldInfo) -> str:
    """What a field is, by its own docstring or its section's."""
    sections = models_in(field.annotation)
    section = inspect.getdoc(sections[0]) if len(sections) == 1 else None
    return _prose(field.description or section or "")


def _kind(field: FieldInfo) -> str:
    limits = [text for limit in field.metadata if (text := _limit(limit))]
    return ", ".join([_name(field.annotation), *limits])


def _name(annotation: Any) -> str:
    """A type in a user's words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = [text for limit in annotation.__metadata__ if (text := _limit(limit))]
        return ", ".join([_name(arguments[0]), *limits])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        names = dict.fromkeys(_name(argument) for argument in arguments if argument is not type(None))
        return " or ".join([*names, *["nothing"] * (type(None) in arguments)])
    if origin in (tuple, list):
        return f"a list of: {_name(arguments[0])}"
    if origin in (dict, Mapping):
        return "names with values"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a section"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(f"`{member.value}`" for member in annotation)
    known = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return known.get(annotation, "anything" if annotation is Any else str(getattr(annotation, "__name__", annotation)))


def _limit(limit: Any) -> str:
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "min_length": "at least this many:"}
    said = [f"{words} {getattr(limit, sign):g}" for sign, words in signs.items() if _has(limit, sign)]
    if _has(limit, "pattern"):
        said.append(f"like `{limit.pattern}`")
    inner = [_limit(one) for one in getattr(limit, "metadata", ())] if isinstance(limit, FieldInfo) else []
    return ", ".join([*said, *filter(None, inner)])


def _has(limit: Any, sign: str) -> bool:
    return not isinstance(limit, FieldInfo) and getattr(limit, sign, None) is not None


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is PydanticUndefined:
        value = field.default_factory() if field.default_factory is not None else None  # type: ignore[call-arg]
    if isinstance(value, BaseModel):
        return f"`type: {value.model_dump()['type']}`" if "type" in type(value).model_fields else "its defaults"
    if value is None:
        return "nothing"
    return f"`{json.dumps(TypeAdapter(Any).dump_python(value, mode='json'))}`"


def _prose(text: str) -> str:
    return " ".join(text.split()).replace("<", "&lt;")


def load_everything() -> None:
    """Import every module of the packages, so that all that they define is known; extras may be missing."""
    for package in PACKAGES:
        for module in pkgutil.walk_packages([str(ROOT / package)], f"{package}."):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] in PACKAGES:
                    raise


def named_errors() -> list[type[RollmillError]]:
    """Every error that a user can meet, by name."""
    load_everything()

    def below(kind: type[RollmillError]) -> Iterator[type[RollmillError]]:
        for child in kind.__subclasses__():
            yield child
            yield from below(child)

    found = {kind for kind in below(RollmillError) if kind.__module__.partition(".")[0] in PACKAGES}
    return sorted(found, key=lambda kind: (kind.__name__, kind.__module__))


def troubleshooting_page(mends: Mapping[str, str]) -> str:
    """Markdown: every named error, what it means, and what to do where its own message does not say all."""
    parts = [
        "# Troubleshooting, by the name of the error\n",
        "Every failure that a user or a log can see has a name, and a message that says which field or thing, its "
        "value and the mend. `rollmill` prints it as one line and ends with code 2. A failure that costs one "
        "trajectory and not the run is counted under its reason (`rollmill samples ls my-run.yaml --dropped`).\n",
        "Before anything else: `rollmill doctor` checks this machine and every service.\n",
    ]
    for kind in named_errors():
        parents = [base.__name__ for base in kind.__mro__[1:] if issubclass(base, RollmillError)][:-1]
        reason = f"Counted as `{kind.reason}`. " if issubclass(kind, StageFailure) else ""
        also = f"A kind of {', '.join(f'`{name}`' for name in parents)}. " if parents else ""
        lines = [f"## {kind.__name__}", _prose(inspect.getdoc(kind) or ""), f"{reason}{also}In `{kind.__module__}`."]
        if kind.__name__ in mends:
            lines.append(f"**What to do.** {mends[kind.__name__]}")
        parts.append("\n\n".join(lines) + "\n")
    return "\n".join(parts)
