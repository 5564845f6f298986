"""Named errors of the sandbox. Neither says anything about the program that was to run."""

from rl.errors import ConfigError, RollmillError


class SandboxUnavailable(ConfigError):
    """This machine can not give the isolation that was asked for; the message says why and the mend."""


class SandboxFailure(RollmillError):
    """One run could not be started, or could not be ended: an infrastructure failure, never a verdict."""
