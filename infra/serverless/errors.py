"""The named errors of the serverless plane."""

from __future__ import annotations

from rl.errors import RollmillError


class ServerlessError(RollmillError):
    """Base of everything that can go wrong with a function; the message names it and the mend."""


class BundleError(ServerlessError):
    """The functions can not be bundled: something that they need is missing, unsuitable, or too large."""


class FunctionMissing(ServerlessError):
    """The function is not deployed, or may not be invoked."""


class FunctionFailed(ServerlessError):
    """The function itself ended with an error that another try would meet again."""


class InvocationFailed(ServerlessError):
    """Throttled, timed out or crashed until the tries or the deadline were spent."""


class DeploymentFailed(ServerlessError):
    """CloudFormation did not bring a stack to its new state."""
