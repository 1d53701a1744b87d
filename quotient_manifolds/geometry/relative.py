"""Use relative coordinates z = xi / x, entry by entry, on a manifold that moves by its own geodesics."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from quotient_manifolds.manifolds.arguments import require_vector
from quotient_manifolds.manifolds.horizontal import HorizontalSpace, Linearised, PullBack, Rows


@final
class RelativeSpace(HorizontalSpace):
    """Represent another space in the coordinates of adaptive sharpness, |z|^2 = sum (xi / x)^2; entries 0 stay out.

    A geodesic is that of the other space with the horizontal part of xi = x z as its velocity. The norm of z is no
    quotient metric and changes along the orbit: an ablation [paper, App. G].
    """

    def __init__(self, space: HorizontalSpace) -> None:
        super().__init__(space.point, ndim=len(space.dims))
        self.space = space

    def coordinates(self, eta: Tensor) -> Tensor:
        require_vector(self.point, eta, len(self.dims))
        return eta / torch.where(self.point != 0, self.point, torch.inf)

    def vector(self, z: Tensor) -> Tensor:
        return z * self.point

    def covector(self, egrad: Tensor) -> Tensor:
        require_vector(self.point, egrad, len(self.dims))
        return egrad * self.point

    def project(self, z: Tensor) -> Tensor:
        """Set z to 0 where the entry of the point is 0 and cannot move; vertical vectors stay, which move nothing."""
        return z * (self.point != 0)

    def relative_speed(self, z: Tensor) -> Tensor:
        return self.space.relative_speed(self._velocity(z))

    def linearised(self, order: str) -> Linearised:
        linearise_inner = self.space.linearised(order)  # which is fast, where autograd through all of it is not

        def linearise(z: Tensor, out: Rows) -> PullBack:
            pull_back_inner = linearise_inner(self._velocity(z), out)

            def pull_back(egrad: Rows, into: Tensor) -> None:
                pull_back_inner(egrad, into)
                with torch.enable_grad():  # the velocity is linear in z: its derivative at 0 is that everywhere
                    leaf = torch.zeros_like(self.point, requires_grad=True)
                    velocity = self.space.coordinates(self.vector(leaf))
                into.copy_(torch.autograd.grad(velocity, leaf, into)[0])

            return pull_back

        return linearise

    def _step(self, z: Tensor, order: str) -> Tensor:
        return self.space._step(self._velocity(z), order)

    def _exact(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.space._exact(self._velocity(z))

    def _velocity(self, z: Tensor) -> Tensor:
        return self.space.project(self.space.coordinates(self.vector(z)))
