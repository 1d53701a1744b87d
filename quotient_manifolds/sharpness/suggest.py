"""Suggest a first radius for worst-case sharpness, limited by the reach of geodesics and the increase in loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, final

import torch
from torch import nn

from quotient_manifolds.geometry import Geometry, KnownSymmetries
from quotient_manifolds.sharpness.ascent import AutoPGD
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.objective import BatchObjective, autograd_available
from quotient_manifolds.sharpness.prepared_model import PreparedModel, listed
from quotient_manifolds.sharpness.vector import absolute_sum, largest, norm, over_processes
from quotient_manifolds.symmetries import Params

SPEED = 0.25  # half the reach of truncated geodesics, because other batches and longer ascents are faster
INCREASE, ENOUGH = 1.0, 0.1  # of the loss; the next smaller radius gives about a fifth of an increase
STEPS = 2
DIGITS = (1, 2, 5)
SMALLEST, LARGEST = 3 * -8, 3 * 6  # 1e-8 and 1e6, as indices of the grid


def suggest_radius(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    geometry: Geometry | str | float | Sequence[Geometry | str | float],
    known: KnownSymmetries | None = None,
) -> float:
    """Suggest a first radius for `worst_case_sharpness`: one of 1, 2, 5 times a power of ten.

    This is the largest radius at which an ascent of two steps obeys two rules. It increases the loss by at most 1 on
    average over the batches, and its geodesics start at a relative speed of at most 1/4, half the reach of truncated
    geodesics. Geometries without a speed obey the first rule alone. Three radii are tried: the largest at which a
    linear loss with the same gradient would obey the rules, and the next ones below and above it. Others are tried only
    if all three break a rule, or all increases are below 0.1. So the increase is of order 0.1 to 1 unless the speed
    limit is active. The cost is about 5 forward and backward passes per batch. The rules are for losses of order 1,
    such as cross-entropies; for other losses choose a radius by their own scale.

    geometry: one, or several that are compared at one radius; the suggestion is then the smallest of theirs. known:
    earlier results for this model, with the same weights.

    In a quotient geometry with eps = 0 the suggestion is constant along the orbit. Compare models at one radius, the
    suggestion for one of them. A few batches suffice. Other arguments, checks and errors are as for
    `worst_case_sharpness`. Raises ValueError unless some radius from 1e-8 to 1e6 obeys the rules and the next larger
    one breaks them.
    """
    several = [geometry] if isinstance(geometry, (Geometry, str)) or not isinstance(geometry, Sequence) else geometry
    if not several:
        raise ValueError("geometry must be one, or a list with at least one. Found an empty list")
    batches, known = listed(batches), known or KnownSymmetries()
    return min(suggested(PreparedModel.of(model, loss, batches, each, known=known)) for each in several)


def suggested(prepared: PreparedModel) -> float:
    """Suggest a radius for a prepared model, see `suggest_radius`."""
    return prepared.settled(_suggested)


def _suggested(prepared: PreparedModel) -> float:
    with autograd_available(), over_processes(prepared.processes_on):
        index = _largest_fitting(list(prepared.losses), lru_cache(maxsize=1)(lambda i: _Ascents(prepared, i)))
    if not SMALLEST <= index < LARGEST:
        raise ValueError(
            f"No radius could be suggested in the geometry {prepared.geometry.name}: the loss increases by "
            f"{'more' if index < SMALLEST else 'less'} than {INCREASE:g} at every one from 1e-8 to 1e6; choose one"
        )
    return _radius(index)


def _largest_fitting(batches: Sequence[int], ascents: Callable[[int], _Ascents]) -> int:
    """Return the index of the largest radius that obeys the rules, just below or above the grid if there is none.

    ascents: returns the ascents on a batch. They keep a gradient, so all radii are tried on one batch first.
    """
    middle = min(max(ascents(batches[0]).linear_limit, SMALLEST + 1), LARGEST - 1)
    trying = range(middle + 1, middle - 2, -1)
    best, most = SMALLEST - 1, 0.0  # balls are nested: the increase grows with the radius, whatever ascents find
    while True:
        increases = [[ascents(batch).increase(_radius(index)) for index in trying] for batch in batches]
        for index, each in zip(trying, zip(*increases, strict=True), strict=True):
            if (mean := math.fsum(each) / len(batches)) <= INCREASE:
                best, most = max(best, index), max(most, mean)
        if best == trying[0] < LARGEST and most < ENOUGH:
            trying = range(best + 1, best, -1)
        elif best < SMALLEST < trying[-1]:
            trying = range(trying[-1] - 1, trying[-1] - 2, -1)
        else:
            return best


def _radius(index: int) -> float:
    power, digit = divmod(index, len(DIGITS))
    return float(f"{DIGITS[digit]}e{power}")


@final
class _Ascents:
    """Ascend on one batch within several radii; all ascents share their first gradient, at the model itself."""

    def __init__(self, prepared: PreparedModel, batch: int) -> None:
        self._space = prepared.space
        objective = prepared.objective(batch)
        self._objective = _KnownStart(objective, *objective.value_and_gradient(objective.zero()))

    @cached_property
    def linear_limit(self) -> int:
        """Return the index of the largest radius at which a linear loss of this gradient would obey both rules."""
        gradient, linf = self._objective.gradient, self._space.norm == "linf"
        slope, length = absolute_sum(gradient) if linf else norm(gradient), norm(gradient)
        limits = []
        if 0 < slope < math.inf:
            speed = (self._space.reach(gradient) or 0.0) / length
            limits = [INCREASE / slope, SPEED / max(speed, 1e-300)]
        return math.floor(3 * math.log10(min(limits, default=0.1)))

    def increase(self, radius: float) -> float:
        """Return the increase of the loss by an ascent within the radius; infinite if the radius is too large."""
        generator = self._objective.objective.generator(0)
        try:
            best = AutoPGD(STEPS).maximise(self._objective, radius, generator, norm=self._space.norm)
        except ValueError:  # the loss, its gradient or a geodesic is not finite there
            return math.inf
        return math.inf if (self._space.reach(best.z) or 0.0) > SPEED else best.loss - best.base


@final
@dataclass(frozen=True)
class _KnownStart:
    """Represent an objective whose loss and gradient at z = 0 are known."""

    objective: BatchObjective
    loss: float
    gradient: Params

    def zero(self) -> Params:
        return self.objective.zero()

    def sample(self, generator: torch.Generator) -> Params:
        return self.objective.sample(generator)

    def value(self, z: Params) -> float:
        return self.objective.value(z) if largest(z) else self.loss

    def value_and_gradient(self, z: Params) -> tuple[float, Params]:
        if largest(z):
            return self.objective.value_and_gradient(z)
        return self.loss, {key: block.clone() for key, block in self.gradient.items()}
