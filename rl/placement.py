"""Hardware classes and the declaration of what runs where (RollArt, R1).

Invariants: `@runs_on` is pure metadata; resolving is a pure function of the declaration, the domain and the
free slots; an impossible placement is an error before the run starts, never a silent wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from rl.errors import PlacementError

Stage = Callable[..., Any]
F = TypeVar("F", bound=Stage)


class HardwareClass(StrEnum):
    """A Dask worker resource."""

    COMPUTE_GPU = "compute_gpu"
    BANDWIDTH_GPU = "bandwidth_gpu"
    CPU = "cpu"
    LAMBDA = "lambda"


COMPATIBLE: Mapping[HardwareClass, tuple[HardwareClass, ...]] = {
    HardwareClass.COMPUTE_GPU: (HardwareClass.BANDWIDTH_GPU,),
    HardwareClass.BANDWIDTH_GPU: (HardwareClass.COMPUTE_GPU,),
    HardwareClass.CPU: (),
    HardwareClass.LAMBDA: (HardwareClass.CPU,),
}
"""Where work goes when its preferred class is full: the classes that can run it too, best first."""


@dataclass(frozen=True)
class Placement:
    """Preferred class by domain, with a default for the others."""

    by_domain: Mapping[str, HardwareClass]
    default: HardwareClass | None

    def preferred(self, domain: str | None = None) -> HardwareClass:
        """The declared class. Raises PlacementError for a domain that neither has one nor a default."""
        chosen = self.by_domain.get(domain, self.default) if domain is not None else self.default
        if chosen is None:
            raise PlacementError(f"no hardware class declared for domain {domain!r} and no default")
        return chosen

    def candidates(self, domain: str | None = None) -> tuple[HardwareClass, ...]:
        """The preferred class, then the compatible ones."""
        first = self.preferred(domain)
        return (first, *COMPATIBLE[first])

    def resolve(self, domain: str | None, free: Mapping[HardwareClass, float]) -> HardwareClass:
        """The first candidate with a free slot; the first that exists at all when every one is full."""
        existing = [c for c in self.candidates(domain) if c in free]
        if not existing:
            wanted = " or ".join(self.candidates(domain))
            raise PlacementError(
                f"no pool has {wanted}; the pools have {', '.join(sorted(free)) or 'nothing'}"
            )
        return next((c for c in existing if free[c] >= 1), existing[0])


def runs_on(where: str | Mapping[str, str]) -> Callable[[F], F]:
    """Declare the hardware class of a stage: one class, or a mapping domain -> class with a key `default`."""
    if isinstance(where, str):
        placement = Placement({}, _hardware_class(where))
    else:
        classes = {domain: _hardware_class(name) for domain, name in where.items()}
        default = classes.pop("default", None)
        placement = Placement(classes, default)

    def mark(function: F) -> F:
        function.__rollmill_placement__ = placement  # type: ignore[attr-defined]
        return function

    return mark


def _hardware_class(name: str) -> HardwareClass:
    try:
        return HardwareClass(name)
    except ValueError:
        raise PlacementError(f"@runs_on: {name!r} is none of {', '.join(HardwareClass)}") from None


def placement_of(function: Stage) -> Placement:
    """The declaration of a stage. Raises PlacementError when it has none."""
    placement: Placement | None = getattr(function, "__rollmill_placement__", None)
    if placement is None:
        raise PlacementError(f"stage {getattr(function, '__name__', function)!r} has no @runs_on")
    return placement


def preflight(stages: Iterable[Stage], domains: Iterable[str], pools: Mapping[HardwareClass, float]) -> None:
    """Raise PlacementError naming every stage and domain that no pool can run."""
    problems = []
    pools = {name: slots for name, slots in pools.items() if slots >= 1}
    for stage in stages:
        for domain in domains:
            try:
                placement_of(stage).resolve(domain, pools)
            except PlacementError as error:
                problems.append(f"{stage.__name__} of {domain}: {error}")
    if problems:
        raise PlacementError(
            "pools: " + "; ".join(problems) + ". Add workers with the class, or change @runs_on."
        )
