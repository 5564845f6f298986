"""How rewards are composed, where they run, and whom a judge asks. Secrets come from the environment only."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from rl.config.base import Name, Section


class RewardTerm(Section):
    """One reward in a weighted sum."""

    name: str
    """Entry point of group `rollmill.rewards`, or `module:attribute`."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of all its parts."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the reward function."""

    @property
    def label(self) -> str:
        """What its parts are called by in the sum."""
        return self.name.rpartition(":")[2]


class LocalFunctions(Section):
    """Functions in processes on this machine, behind Lambda's own interfaces."""

    type: Literal["local"] = "local"
    concurrency: Annotated[int, Field(ge=1)] = 4
    """Invocations at once; more are throttled, as by AWS, and repeated. Each takes a process."""
    idle_s: Annotated[float, Field(gt=0)] = 300
    """Seconds without an invocation after which a process ends."""


class LambdaFunctions(Section):
    """AWS Lambda; `rollmill rewards deploy` puts the functions there. Credentials come from the AWS_* variables."""

    type: Literal["lambda"] = "lambda"
    prefix: Name = "rollmill-reward"
    """The function `math` is called `<prefix>-math`."""
    region: str = "us-east-1"
    """AWS region."""
    endpoint_url: str | None = None
    """None uses AWS_ENDPOINT_URL_LAMBDA, then AWS itself."""


class JudgeSection(Section):
    """The model that a `judge` reward asks: any endpoint that speaks OpenAI's chat completions, or the run's own
    policy."""

    base_url: Annotated[str, Field(pattern=r"^https?://.+")] | None = None
    """Up to and without `/chat/completions`, such as http://127.0.0.1:8000/v1. None asks the policy itself, the
    version that is served, through the run's proxy: it learns to please itself, so give it a rubric that it can not
    bend."""
    model: str | None = None
    """Its name at `base_url`."""
    api_key_variable: str | None = None
    """The environment variable that holds the key for `base_url`; None sends none."""
    max_tokens: Annotated[int, Field(ge=1)] = 512
    """Of one verdict."""

    @model_validator(mode="after")
    def _check_endpoint(self) -> Self:
        if self.base_url is not None and self.model is None:
            raise ValueError("model is missing: the judge at base_url has a name there")
        if self.base_url is None and (self.model, self.api_key_variable) != (None, None):
            raise ValueError("base_url is missing: without it the policy itself is asked, and needs no name and no key")
        return self
