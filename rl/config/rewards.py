"""How rewards are composed, where they run, and whom a judge asks. Secrets come from the environment only."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

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
    """The model that a `judge` reward asks: any endpoint that speaks OpenAI's chat completions."""

    base_url: Annotated[str, Field(pattern=r"^https?://.+")]
    """Up to and without `/chat/completions`, such as http://127.0.0.1:8000/v1."""
    model: str
    """Its name there."""
    api_key_variable: str | None = None
    """The environment variable that holds the key; None sends none."""
    max_tokens: Annotated[int, Field(ge=1)] = 512
    """Of one verdict."""
