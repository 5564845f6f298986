"""Named errors of the domain.

Invariants: every failure that a user or a log can see has a class here (or in the part that owns it) and a
message that names the field or thing, its value and the mend. An infrastructure failure is an exception,
never a reward.
"""


class RollmillError(Exception):
    """Base of every error that is shown to a user as one line, without a traceback."""


class ConfigError(RollmillError):
    """A configuration that can not run. Raised before anything starts."""


class ConfigTooNew(ConfigError):
    """A stored configuration of a newer Rollmill, which this one would misread: upgrade it."""


class PlacementError(ConfigError):
    """A stage asks for a hardware class that the pools do not have."""


class LogCorrupt(RollmillError):
    """The commit log breaks one of its own rules (a gap, a repeated version, an unknown parent)."""


class LogTooNew(RollmillError):
    """The commit log has a record of a newer Rollmill, which this one would misread: upgrade it."""


class Fenced(RollmillError):
    """Another trainer took over; this one must discard what it holds."""


class StalenessViolation(RollmillError):
    """A sample older than alpha reached the optimizer: a bug, never a warning."""


class ProtocolViolation(RollmillError):
    """A phase of the training step was entered out of order."""


class DeadlineExceeded(RollmillError):
    """A wait ran past its deadline; the message names what was awaited and for how long."""


class StageFailure(RollmillError):
    """A stage of one trajectory failed for a reason that says nothing about the policy.

    `reason` is the name under which it is counted and stored.
    """

    reason = "stage_failure"


class EnvironmentFailure(StageFailure):
    """The environment raised, or could not be started."""

    reason = "environment_error"


class EnvironmentStartFailure(EnvironmentFailure):
    """The environment could not be prepared, constructed or reset, however often it was tried."""

    reason = "environment_start"


class EnvironmentProtocolError(EnvironmentFailure):
    """The environment answered with something that `envs.protocol` does not allow."""

    reason = "environment_protocol"


class InjectedFailure(EnvironmentFailure):
    """A failure that the run's configuration asked for (`domains[].injection`)."""

    reason = "injected"


class EnvironmentTimeout(StageFailure):
    """A call into the environment ran past its deadline."""

    reason = "environment_timeout"


class RewardFailure(StageFailure):
    """The reward function raised or returned something that is not a finite number."""

    reason = "reward_error"


class GenerationFailure(StageFailure):
    """The engine or the proxy did not answer within the deadline."""

    reason = "generation_error"


class StaleTrajectory(StageFailure):
    """The trajectory can no longer be trained under alpha; its problem is drawn again."""

    reason = "stale"


class TooManyFailures(RollmillError):
    """The failure budget of a run is spent: something is broken, not unlucky."""
