"""Check by its first loss and gradient that a measure begins at the model it was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import nn

from quotient_manifolds.geometry import Euclidean, Geometry, KnownSymmetries, ShardedSpace, TangentSpace
from quotient_manifolds.geometry.pair_block import Gradients
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.objective import objective_of
from quotient_manifolds.sharpness.own_loss import check_repeated, is_one, repeated_loss
from quotient_manifolds.symmetries.horizontal import Horizontal

SINGLE = torch.finfo(torch.float32).eps
ELSEWHERE = 0.01  # allowed change of the loss: beyond it the measured function is another one, half precision or not


class Refuted(Exception):
    """Report that symmetries which were quotiented out fail, so that all results so far are invalid.

    failed: the reasons, by name of the symmetry.
    """

    def __init__(self, failed: Mapping[str, str]) -> None:
        super().__init__(", ".join(failed))
        self.failed = failed


@final
@dataclass(frozen=True)
class Start:
    """Check the loss where measures of a model begin, and the gradient there, batch by batch.

    The loss must be the loss of the model, `losses`. The gradient must be orthogonal to the orbits of the symmetries
    that are quotiented out; `horizontal` checks this, or is None if no gradient is checked. Rounding may blur both, so
    float64 decides in case of doubt. In half precision gradients show nothing, and float64 decides on the first batch.
    """

    model: nn.Module
    loss: Loss
    geometry: Geometry
    space: TangentSpace
    horizontal: Horizontal | None
    batches: Sequence[Any]
    losses: Mapping[int, float]
    precision: float
    known: KnownSymmetries

    @property
    def by_gradients(self) -> bool:
        """Return whether gradients verify symmetries."""
        return self.horizontal is not None

    def check_loss(self, index: int, base: float) -> None:
        """Raise ValueError unless the loss where a measure of batch `index` begins equals the loss of the model.

        Raises Refuted if a symmetry is to blame.
        """
        own = self.losses[index]
        if is_one(base, own, self.precision) or (isinstance(self.space, ShardedSpace) and self._is_near(base, own)):
            return
        if not isinstance(self.space, ShardedSpace):
            plain = objective_of(
                self.model, self.loss, Euclidean().tangent_space(self.model), self.batches[index], index
            )
            check_repeated(own, repeated_loss(plain), self.precision, index)
            if self.by_gradients and not self._is_hidden(index):
                self._decide(index)
        if not self._is_near(base, own):
            raise ValueError(
                f"A measure must begin at the loss of the model. Found {base!r} for {own!r} on batch {index}; the "
                f"model or the loss is random, or a symmetry of the geometry is none: use Adaptive(), or verify='full'"
            )

    def check_gradient(self, index: int, grads: Gradients) -> None:
        """Raise Refuted unless the gradient of the loss on batch `index`, where measures begin, is horizontal."""
        if self.horizontal is None or self._is_hidden(index):
            return
        if self.precision > SINGLE or self.horizontal.doubtful(grads):
            self._decide(index)

    def _is_hidden(self, index: int) -> bool:
        """Return whether the loss is in half precision, and the batch not the first, on which float64 decides."""
        return self.precision > SINGLE and index != min(self.losses)

    @staticmethod
    def _is_near(base: float, own: float) -> bool:
        return abs(base - own) <= ELSEWHERE * max(1.0, abs(own))

    def _decide(self, index: int) -> None:
        decide = partial(self.geometry.failing, self.model, self.loss, self.batches[index], index, self.known)
        if failed := decide():
            raise Refuted(failed)
