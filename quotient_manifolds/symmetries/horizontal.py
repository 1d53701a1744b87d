"""Check that gradients are horizontal: an invariant loss has no slope along its orbits.

If L(g w) = L(w) for every g of a group, then the charges of the gradient, <grad L(w), xi(w)> for all generators xi of
the action, vanish (Noether). Each charge is compared with the sum of its absolute summands. One gradient, which a
measure computes anyway, tests all symmetries: the charge of a false one is 0 only by chance. `Geometry.failing` decides
doubtful cases in float64, and `Geometry.without` removes symmetries that fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from quotient_manifolds.symmetries import groups
from quotient_manifolds.symmetries.symmetries import Symmetries

LIMIT = {torch.float64: 1e-9, torch.float32: 1e-5}
"""The largest slope of a symmetry that holds, relative to its summands.

Measured on small transformers: symmetries that hold have at most 2e-7 in float32 and 4e-16 in float64; the largest
slopes of false ones are 1e-2 to 0.4 in both.
"""


@final
@dataclass(frozen=True, eq=False)
class Horizontal:
    """Store the symmetries of a loss, and the point at which its gradients are taken."""

    symmetries: Symmetries
    point: Mapping[str, Tensor]

    def slopes(self, grads: Mapping[str, Tensor | None]) -> dict[str, float]:
        """Return the norm of each symmetry's charges relative to their summands, by name; NaN for NaN gradients."""
        given = {name: g for name, g in grads.items() if g is not None}
        cotangent = {name: given.get(name, w.new_zeros(()).expand(w.shape)) for name, w in self.point.items()}
        limit = _limit(grads)
        return {each.name: _slope(each.symmetry, self.point, cotangent, limit) for each in self.symmetries.every}

    def doubtful(self, grads: Mapping[str, Tensor | None]) -> list[str]:
        """Return the names of symmetries along which a gradient has a slope above the limit, real or by rounding."""
        limit = _limit(grads)
        return [name for name, slope in self.slopes(grads).items() if not slope <= limit]


def _limit(grads: Mapping[str, Tensor | None]) -> float:
    kinds = {g.dtype for g in grads.values() if g is not None}
    return max((LIMIT.get(kind, LIMIT[torch.float32]) for kind in kinds), default=0.0)


def _slope(symmetry: groups.Symmetry, point: Mapping[str, Tensor], grads: Mapping[str, Tensor], limit: float) -> float:
    charge = symmetry.charge(point, grads)
    value, size = float(charge.value.norm()), float(charge.size.norm())
    if not value <= limit * size:
        # If a softmax ignores a bias, its gradient is rounding, which gives no scale. So compare with the largest
        # gradient in the same module, such as the weight's.
        largest = {name: torch.full_like(grads[name], _largest(name, grads)) for name in symmetry.names}
        size = max(size, float(symmetry.charge(point, largest).size.norm()))
    return value / size if value else 0.0


def _largest(name: str, grads: Mapping[str, Tensor]) -> float:
    """Return the largest absolute entry of the gradients of all parameters in the module of this parameter."""
    module = name.rpartition(".")[0]
    beside = (g for other, g in grads.items() if other.rpartition(".")[0] == module)
    return max((float(torch.linalg.vector_norm(g, torch.inf)) for g in beside if g.numel()), default=0.0)
