"""From what a user typed to a RunConfig: a preset's name or a file, with overrides.

Invariant: nothing is started and torch is not imported; the only error is ConfigError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from envs.registry import make_environment
from infra.models.sources import check_source, longest_sequence
from infra.proxy.secret import key_of_servers
from rewards.registry import check_rewards
from rl.advantages.registry import advantage_function
from rl.config.base import Section
from rl.config.engine import VLLMEngineSection
from rl.config.load import from_yaml, parse_as
from rl.config.run import RunConfig
from rl.errors import ConfigError

PRESETS = files("flows") / "presets"

S = TypeVar("S", bound=Section)


def preset_names(folder: str = "") -> list[str]:
    """Those of runs, or of what the `folder` holds."""
    entries = (PRESETS / folder).iterdir()
    return sorted(entry.name.removesuffix(".yaml") for entry in entries if entry.name.endswith(".yaml"))


def load_config(source: str, overrides: Iterable[str] = ()) -> RunConfig:
    """The configuration of a preset or a file; `overrides` are `dotted.field=value` with YAML values."""
    return read_config(source, dict(map(override, overrides)))


def read_config(source: str, overrides: Mapping[str, Any]) -> RunConfig:
    """The configuration of a preset or a file, with the `overrides` by dotted path."""
    return read_section(RunConfig, source, overrides, "")


def read_section(kind: type[S], source: str, overrides: Mapping[str, Any], folder: str | None) -> S:
    """The same for any root, whose presets are in `folder`; None has none."""
    path, presets = Path(source), [] if folder is None else preset_names(folder)
    if folder is not None and source in presets:
        return parse_as(kind, (PRESETS / folder / f"{source}.yaml").read_text(), f"preset {source}", overrides)
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source!r} is no text in UTF-8 ({error}); save it as such") from error
    except OSError as error:
        raise ConfigError(f"{source!r} can not be read: {error.strerror}; name a file that can") from error
    if text is None:
        known = f"neither a file nor a preset; the presets are {', '.join(presets)}" if presets else "no file"
        raise ConfigError(f"{source!r} is {known}")
    return parse_as(kind, text, str(path), overrides)


def cross_check(config: RunConfig) -> None:
    """What can only be known by loading the user's code: environments, rewards, advantage,
    and by looking for the model, and for the key of engines elsewhere. Raises ConfigError."""
    for domain in config.domains:
        make_environment(domain)
    check_rewards(config)
    check_source(config.model)
    _check_length(config)
    advantage_function(config.training.advantage)
    if isinstance(config.engine, VLLMEngineSection) and config.engine.external:
        key_of_servers()


def _check_length(config: RunConfig) -> None:
    """A trajectory that outgrows the engine before it outgrows `rollout.max_tokens` fails, where it should have been
    truncated, and so none that is long would be trained. What vLLM makes of a model's length it says at its start."""
    if isinstance(config.engine, VLLMEngineSection):
        what, most = "engine.max_length", config.engine.max_length
    else:
        what, most = "what the model takes", longest_sequence(config.model)
    if most is not None and most < (wanted := config.rollout.max_tokens):
        raise ConfigError(f"rollout.max_tokens ({wanted}) is above {what} ({most}); lower it to {most}")


def override(text: str) -> tuple[str, Any]:
    """`dotted.field=value` taken apart."""
    field, separator, value = text.partition("=")
    if not separator or not field:
        raise ConfigError(f"--set {text!r} is not of the form field.path=value")
    return field, from_yaml(value, f"--set {text!r}")
