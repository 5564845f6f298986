"""Named errors of generation engines. Importable without torch."""

from __future__ import annotations

from infra.engines.protocol import Generation
from rl.errors import GenerationFailure, RollmillError


class EngineClosed(GenerationFailure):
    """The engine was closed, or its loop or process died; the message carries the cause.

    `partial` is what the request had so far, where the engine had reported it: another engine can go on from there.
    """

    partial: Generation | None = None


class UnknownPolicy(RollmillError):
    """A tenant that the engine does not serve (yet): never answered by the base model instead."""


class PromptTooLong(RollmillError):
    """The prompt leaves no room for a single new token."""


class BadRequest(RollmillError):
    """A request that no engine could serve; the message names the field and its value."""


class NonFiniteLogits(GenerationFailure):
    """The policy's logits are not finite for this request: its weights diverged."""


class WeightMismatch(RollmillError):
    """A version's files do not fit the model; what was served before is still served."""


class BaseFrozen(RollmillError):
    """The base can not change while adapters rest on it."""


class ModelUnusable(RollmillError):
    """The model directory is missing, broken, or of a kind that the engine can not run."""


class EngineNotInstalled(RollmillError):
    """The program of an engine is not there, or not as it should be; the message says how to get it."""


class EngineDidNotStart(GenerationFailure):
    """The process of an engine ended, or did not answer, before it was ready; the message carries its log's end."""


class NoAdapterSlot(RollmillError):
    """More adapters than the engine has room for."""
