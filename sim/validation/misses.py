"""The rows that are off by more than `GOAL`, by name, each with the reason as far as we know it.

Invariants: a row that is off and not listed fails its test, and so does a row that is listed and not off; the table of
docs/simulator.md is this one, with what was published and what is predicted.
"""

from __future__ import annotations

_UNREAD = (
    "a mixture gains more from the split than the time of reading prompts explains; that each costs a pass over all "
    "experts was tried, and changes nothing; that engines lose a quarter of each history gives 0.79 and 0.84, but "
    "takes the undivided 32B nodes from 731 s to 1,349 s (741 s published)"
)
_LONGEST = (
    "worst model, 8B: the longest trajectory decides here, and the mix of engines counts for less than if they were "
    "overloaded; the sum of their bandwidths is 1.29 times that of 72 H800"
)
_ABSTRACT = (
    "only the abstract is public, which gives the best of each figure, over different models, tenants and baselines: "
    "5.7 times the steps would be an end-to-end time of 0.175, not 0.15, and what loses asynchrony and the shared "
    "rollout is one tenant after another, so 0.175 too"
)

MISSES: dict[str, str] = {
    "lockstep over trajectory-wise rollout": (
        "the slowest reset of a batch holds up all of it in lockstep, and hardly anything without; less spread of the "
        "responses (a third) leaves 1.36"
    ),
    "step with dedicated over serverless rewards": (
        "batch and GPUs of that run are not public; at ours the last trajectories of a batch are not bound by the "
        "engines, so twice the GPUs do not halve it"
    ),
    "exposed pull 14B": (
        "the published time is not between those of 8B and 32B on any line through them; TCP and push of 14B are also "
        "10 to 15 % slower per byte than those of the others"
    ),
    "One-off over Sync+": (
        "worst model, 32B: rollout and training take about equally long here, the best case for overlapping them; the "
        "published steps of 32B have 1.52"
    ),
    "64 H800 + 24 H20 over 72 H800": _LONGEST,
    "64 H800 + 24 H20 over 208 H20": _LONGEST,
    "30B-A3B 1P3D": _UNREAD,
    "30B-A3B 2P2D": _UNREAD,
    "tenants: utilisation over one after another": _ABSTRACT,
    "tenants: idle time": _ABSTRACT,
    "tenants: end-to-end time of 32": _ABSTRACT,
    "tenants: without asynchrony": _ABSTRACT,
    "tenants: without a shared rollout, too": _ABSTRACT,
}
