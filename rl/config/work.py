"""What is trained on: domains, rollout, staleness, evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from rl.config.base import Name, Seconds, Section
from rl.config.injection import InjectionSection
from rl.config.rewards import RewardTerm
from rl.modes import MODES, ModeName, default_mode
from rl.redundancy import Mode as Redundancy
from rl.redundancy import RedundancyPolicy


class DomainSection(Section):
    """One environment family with its reward."""

    name: Name
    """Name in metrics, placement and the problem stream."""
    environment: str
    """Entry point of group `rollmill.environments`, or `module:attribute`."""
    environment_options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    reward: str | Annotated[tuple[RewardTerm, ...], Field(min_length=1)] = "outcome"
    """Entry point of group `rollmill.rewards`, or `module:attribute`; or a list of rewards to be added up."""
    reward_options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the reward function, if it is one."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Share of the problem stream, relative to the other domains."""
    max_turns: Annotated[int, Field(ge=1)] = 10
    """Turns after which an episode is truncated."""
    warm: Annotated[int, Field(ge=0)] = 0
    """Environments constructed ahead of need, in each worker process."""
    concurrency: Annotated[int, Field(ge=1)] | None = None
    """Environments alive at once in each worker process; None is as many as there are slots and memory for."""
    runs_on: Literal["compute_gpu", "bandwidth_gpu"] | None = None
    """Class of the engines that generate its turns, while they have room; None decides by the measured shape of each
    turn. `rollmill profile` measures a run and suggests it."""
    generations: Annotated[int, Field(ge=1)] | None = None
    """Generations in flight at once, of all workers together; more wait, and past sixteen times as many are sent
    away to try again. None is as many as come."""
    injection: InjectionSection | None = None
    """Latency and failures added on purpose."""

    @model_validator(mode="after")
    def _check_terms(self) -> Self:
        if isinstance(self.reward, str):
            return self
        if self.reward_options:
            raise ValueError("reward_options belong to a single reward; in a list each has its own `options`")
        labels = [term.label for term in self.reward]
        if len(set(labels)) != len(labels):
            raise ValueError(f"reward: two rewards of the list are called the same in {labels}")
        return self

    @property
    def terms(self) -> tuple[RewardTerm, ...]:
        """The rewards that are added up."""
        if isinstance(self.reward, str):
            return (RewardTerm(name=self.reward, options=self.reward_options),)
        return self.reward


class DeadlineSection(Section):
    """How long anything may take, in seconds. Past it there is a named error, never a silent wait."""

    reset: Seconds = 60
    """Starting an environment, one try."""
    environment_step: Seconds = 30
    """One call of `step`."""
    prepare: Seconds = 600
    """Making what a domain's environments share in a worker process, such as an index."""
    generate: Seconds = 300
    """One turn's generation, waiting for a suspended engine included."""
    score: Seconds = 60
    """The reward of one trajectory."""
    trajectory: Seconds = 1800
    """One member from start to score, retries included."""
    batch: Seconds = 1800
    """Trainer: waiting for a batch without a single new group arriving."""
    publish: Seconds = 1800
    """Trainer: one version from the optimizer step to the engines, while the next one is made."""
    control: Seconds = 120
    """One suspend, update or resume of the engines."""
    load: Seconds = 600
    """Reading one version of a policy on its way to the engines and in each of them, while generation goes on."""
    warmstart: Seconds = 3600
    """The supervised warm start as a whole."""
    start: Seconds = 120
    """Starting a service, a worker or an engine."""


class RedundancySection(Section):
    """More than is needed, so that a step does not wait for what failed or is slow."""

    mode: Literal["replace_failures", "first_finished"] = "replace_failures"
    """`replace_failures`: a spare counts only in the place of a member that failed. `first_finished`: whatever ends
    first counts, and the rest is ended and forgotten; quicker, and it prefers short trajectories."""
    extra_members: Annotated[int, Field(ge=0)] | None = None
    """Members started beyond the group's size. None chooses it from the failures and the
    durations that were seen; `first_finished` wants a number."""
    extra_groups: Annotated[int, Field(ge=0)] = 0
    """Groups looked at beyond `training.groups_per_step`; for `first_finished` only."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.mode == "first_finished" and self.extra_members is None:
            raise ValueError("extra_members is missing: first_finished prefers the short, so say by how much; set it")
        if self.mode == "replace_failures" and self.extra_groups:
            raise ValueError(
                f"extra_groups ({self.extra_groups}) prefer the groups that end early; set it to 0, or mode to "
                f"first_finished"
            )
        return self

    def policy(self, spares: int = 0, most: int | None = None) -> RedundancyPolicy:
        """`spares`: how many the failures that were seen ask for; `most`: how many there is room for."""
        extra = self.extra_members
        if extra is None:
            extra = spares if most is None else max(0, min(spares, most))
        return RedundancyPolicy(Redundancy(self.mode), extra, self.extra_groups)

    @property
    def forgets(self) -> bool:
        """Whether what was started and not needed is given up for good."""
        return self.mode == "first_finished"


class RolloutSection(Section):
    """Generation and environments."""

    unit: Literal["group", "trajectory", "stage"] = "group"
    """What one Prefect task run is. `trajectory` shows more and costs more; `stage` shows reset, interact, score and
    admit as tasks of their own, for runs so small that one wants to watch them (preset `stages`)."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    """Per turn."""
    max_tokens: Annotated[int, Field(ge=2)] = 4096
    """Per trajectory, prompt included; longer ones are truncated."""
    generations: Annotated[int, Field(ge=1)] | None = None
    """As `domains[].generations`, of all domains of this tenant together."""
    temperature: Annotated[float, Field(gt=0, le=5)] = 1.0
    """Of the sampler and, necessarily the same, of the trainer."""
    member_retries: Annotated[int, Field(ge=0)] = 2
    """Fresh tries of a member whose environment, reward or engine failed, before its group is given up."""
    failed_attempts: Annotated[int, Field(ge=1)] = 3
    """Given-up attempts of a problem before it is abandoned."""
    stale_attempts: Annotated[int, Field(ge=1)] = 3
    """Attempts of a problem that grew too old before the trainer waits for the next one (at most
    `deadlines.trajectory`; if that is of no use, the problem is abandoned as `too_long`)."""
    redundancy: RedundancySection = RedundancySection()
    """What is started beyond what is needed."""
    max_pending_mb: Annotated[float, Field(gt=0)] = 1024
    """Megabytes of sealed and expected groups that nobody has trained yet, beyond which no more are started. One
    step's groups are always allowed: less would stop the run."""
    max_consecutive_failures: Annotated[int, Field(ge=1)] = 50
    """Groups given up in a row after which the run ends by name: something is broken."""


class StalenessSection(Section):
    """The bound between the version that started a trajectory and the step that trains it."""

    alpha: Annotated[int, Field(ge=0, le=16)] = 1
    """Largest lag in versions. 0 is on-policy: rollout and training alternate."""
    mode: ModeName = "rollart"
    """How rollout and training relate in time (`rl.modes`). Left away it follows from alpha: `rollart`, or `sync_plus`
    where alpha is 0. The others are baselines."""
    late: Literal["wait", "draw_again"] = "wait"
    """What a step does about a group in flight that it would make too old. `wait` for it: no trajectory is preferred
    for being short, and none is played in vain. `draw_again`, as RollArt: the group is ended and its problem drawn
    again (and waited for after `rollout.stale_attempts`); steps are quicker where engines have room, and where the
    length of an attempt is chance, short ones are slightly preferred."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Either of the two says what the other one is."""
        if not isinstance(given, dict):
            return given
        mode, alpha = given.get("mode"), given.get("alpha")
        if mode is None and isinstance(alpha, int):
            return given | {"mode": default_mode(alpha)}
        if alpha is None and isinstance(mode, str) and mode in MODES:
            return given | {"alpha": MODES[mode].alphas[0]}
        return given

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        if why := MODES[self.mode].refuse(self.alpha):
            raise ValueError(why)
        if self.late == "draw_again" and not MODES[self.mode].waits:
            raise ValueError(f"late is draw_again, but in staleness.mode {self.mode} no step is late; leave it away")
        return self


class EvaluationSection(Section):
    """Held-out evaluation."""

    problems: Annotated[int, Field(ge=0)] = 128
    """Held-out problems per domain, before and after; 0 switches evaluation off."""
    every: Annotated[int, Field(ge=1)] | None = None
    """Every so many versions one is evaluated while training goes on, by an engine of its own (one more slot of its
    class); None evaluates before and after only."""
    temperature: Annotated[float, Field(gt=0, le=5)] = 1.0
    """Sampler temperature in evaluation."""
    samples: Annotated[int, Field(ge=1)] = 1
    """Episodes per problem."""
    pass_at: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """The k of pass@k: the chance that one of k episodes solves a problem, estimated from `samples` of them."""
    solved_at: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Reward from which on an episode solves its problem."""

    @model_validator(mode="after")
    def _check_samples(self) -> Self:
        if self.pass_at and max(self.pass_at) > self.samples:
            raise ValueError(
                f"pass_at ({max(self.pass_at)}) wants as many samples of a problem, but samples is {self.samples}; set "
                f"samples to {max(self.pass_at)}"
            )
        return self

    def due(self, head: int | None, steps: int) -> range:
        """The versions up to `head` that are evaluated while training goes on: not the first and not the last one,
        which are evaluated before and after."""
        if self.every is None or self.problems == 0 or head is None:
            return range(0)
        return range(self.every, min(head + 1, steps), self.every)
