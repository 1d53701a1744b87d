"""Suggest a first radius for worst-case sharpness: as large as geodesics reach and the loss keeps its order."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import nn

from quotient_manifolds.geometry import Geometry, KnownSymmetries
from quotient_manifolds.sharpness.ascent import AutoPGD
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.objective import autograd_available
from quotient_manifolds.sharpness.prepared_model import PreparedModel
from quotient_manifolds.sharpness.vector import norm, over_processes, scale

SPEED = 0.25  # half of what truncated geodesics reach: other batches, and longer ascents, go faster
INCREASE = 1.0  # of the loss; about a fifth of it at the next smaller radius
STEPS = 10
DIGITS = (1, 2, 5)
SMALLEST, LARGEST = 3 * -8, 3 * 6  # 1e-8 and 1e6, as indices of the grid


def suggest_radius(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    geometry: Geometry | str | float,
    known: KnownSymmetries | None = None,
) -> float:
    """Suggest a first radius for `worst_case_sharpness` in a geometry: one of 1, 2, 5 times a power of ten.

    The largest at which an ascent of 10 steps raises the loss by at most 1 on average over the batches, and sets out at
    a relative speed of at most 1/4, half of what truncated geodesics reach; geometries without a speed obey the first
    rule alone. As the next radius breaks a rule, the increase is of order 0.1 to 1 where it is not the speed that
    decides. The rule is for losses of order 1, such as cross-entropies; for others choose a radius by their own scale.

    In a quotient geometry with eps = 0 the suggestion is constant along the orbit. Compare models at one radius, the
    suggestion for one of them. A few batches do. known: what was found before of this model, as it is. Other
    arguments, checks and errors are those of `worst_case_sharpness`; ValueError where no radius from 1e-8 to 1e6 obeys
    the rules and the next one does not.
    """
    return suggested(PreparedModel.of(model, loss, batches, geometry, known=known))


def suggested(prepared: PreparedModel) -> float:
    """Suggest a radius for a prepared model, see `suggest_radius`."""
    return prepared.settled(_suggested)


def _suggested(prepared: PreparedModel) -> float:
    with autograd_available(), over_processes(prepared.processes_on):
        index = _start(prepared)
        fits = _fits(prepared, _radius(index))
        step = 1 if fits else -1
        while SMALLEST < index < LARGEST and _fits(prepared, _radius(index + step)) == fits:
            index += step
        index += 0 if fits else -1
    if not SMALLEST <= index < LARGEST:
        raise ValueError(
            f"No radius could be suggested in the geometry {prepared.geometry.name}: the loss increases by "
            f"{'more' if index < SMALLEST else 'less'} than {INCREASE:g} at every one from 1e-8 to 1e6; choose one"
        )
    return _radius(index)


def _radius(index: int) -> float:
    power, digit = divmod(index, len(DIGITS))
    return float(f"{DIGITS[digit]}e{power}")


def _start(prepared: PreparedModel) -> int:
    """Return the index of a radius to begin the search at: where the first step of ascent obeys both rules."""
    limits = []
    for batch in prepared.losses:
        objective = prepared.objective(batch)
        z = objective.value_and_gradient(objective.zero())[1]
        slope = norm(z)
        if 0 < slope < math.inf:
            scale(z, 1 / slope)
            limits += [INCREASE / slope, SPEED / max(prepared.space.reach(z) or 0.0, 1e-300)]
    index = math.floor(3 * math.log10(min(limits, default=0.1)))
    return min(max(index, SMALLEST + 1), LARGEST - 1)


def _fits(prepared: PreparedModel, radius: float) -> bool:
    """Return whether an ascent within the radius obeys the rules."""
    increases = []
    for batch in prepared.losses:
        objective = prepared.objective(batch)
        try:
            best = AutoPGD(STEPS).maximise(objective, radius, objective.generator(0), norm=prepared.space.norm)
        except ValueError:  # the loss, its gradient or a geodesic is not finite there: too far
            return False
        if (prepared.space.reach(best.z) or 0.0) > SPEED:
            return False
        increases.append(best.loss - best.base)
    return math.fsum(increases) <= INCREASE * len(increases)
