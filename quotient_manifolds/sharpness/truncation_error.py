"""Measure how far truncated geodesics lead the loss away from the exact ones, where sharpness is measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, final

from torch import nn

from quotient_manifolds.geometry import Geometry, Quotient, as_geometry
from quotient_manifolds.progress import Progress
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.measure import KnownAscents, warned
from quotient_manifolds.sharpness.objective import BatchObjective
from quotient_manifolds.sharpness.result import BatchResult, MeasureResult
from quotient_manifolds.sharpness.worst_case import WorstCase


@final
@dataclass(frozen=True)
class TruncationError(WorstCase):
    """Measure |L(truncated) - L(exact)| / (L(truncated) - L(w)) in the worst direction, see `truncation_error`.

    The settings are those of the worst case whose direction is followed.
    """

    name: ClassVar[str] = "truncation error"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.geometry, Quotient) or self.geometry.geodesic == "exact":
            raise ValueError(
                f"The truncation error is that of a Quotient(...) with geodesic 'first' or 'second'. Found "
                f"{getattr(self.geometry, 'name', self.geometry)}, which truncates none"
            )

    @property
    def worst_case(self) -> WorstCase:
        """Return the measure whose worst direction is followed."""
        return WorstCase(**{each.name: getattr(self, each.name) for each in fields(self)})

    def ticks(self, model: nn.Module) -> int:
        return super().ticks(model) + 1

    def compute(self, objective: BatchObjective, ascents: KnownAscents) -> BatchResult:
        worst_case = self.worst_case
        best = worst_case.ascend(objective, ascents)
        if not best.loss > best.base:
            raise ValueError(
                f"The loss on batch {objective.index} does not rise within radius {self.radius:g}, so an error has "
                f"nothing to be compared with; take another radius, or restarts"
            )
        space, z = objective.space.exact(best.z)
        exact = replace(objective, space=space).value(z)
        sharpness = worst_case.at(objective, best)
        error = abs(best.loss - exact) / sharpness.value
        return replace(sharpness, value=error, forward_passes=sharpness.forward_passes + 1, reach_limit=None)


def truncation_error(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    geometry: Geometry | str | float,
    radius: float,
    steps: int = 20,
    restarts: int = 0,
    tolerance: float = 0.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> MeasureResult:
    """Measure which part of worst-case sharpness is due to cutting geodesics off after the first or second order.

    |L(p) - L(gamma(1))| / (L(p) - L(w)), p the end of the worst truncated geodesic, gamma the exact one beside it.

    The geometry is a `Quotient` with geodesic "first" or "second". The climb is that of `worst_case_sharpness` with the
    same arguments, and gamma has the initial velocity of its worst direction: one more forward pass a batch. 0.1 says
    that a tenth of the sharpness found there is due to the truncation. Where an exact geodesic leaves the manifold
    before t = 1, as those of `mix` may, its last point counts, as in `Quotient(geodesic="exact")`.

    Invariant along the orbit as the sharpness is. Arguments, checks and errors as for `worst_case_sharpness`; and
    ValueError for a loss that does not rise. progress counts forward passes.
    """
    measure = TruncationError(as_geometry(geometry), radius, steps, restarts, tolerance, seed)
    return warned(measure.of(model, loss, batches, progress))
