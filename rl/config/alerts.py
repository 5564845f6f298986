"""When a run's figures call for a look (`rl.alerts`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rl.alerts import Rules
from rl.config.base import Section

Share = Annotated[float, Field(gt=0, le=1)]


class AlertSection(Section):
    """Alerts are shown in the progress, in MLflow as tags and in Prefect as an artifact. They end nothing."""

    window: Annotated[int, Field(ge=2)] = 5
    """Steps that a mean is taken over. An alert needs twice as many."""
    reward_drop: Share = 0.5
    """Reward collapse: the reward fell by this share of all that it had gained."""
    entropy_share: Share = 0.1
    """Entropy collapse: the entropy fell to this share of what it began with, while the reward is past its best."""
    opposed_drop: Share = 0.3
    """Suspected reward hacking: the held-out reward, or one part of the reward, fell by this share of the range in
    which the training reward, or the part, ever moved, while the training reward rose."""
    mismatch_kl: Annotated[float, Field(gt=0)] = 0.05
    """Log-prob mismatch: nats per token between engine and trainer, and twice what the run began with."""

    @property
    def rules(self) -> Rules:
        return Rules(**self.model_dump())
