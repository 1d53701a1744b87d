"""Differentiate distances by their logarithms, in reverse and in forward mode."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from quotient_manifolds.derivatives import many_batches, one_batch, outer_derivatives, primal
from quotient_manifolds.linalg import full_precision
from quotient_manifolds.manifolds.horizontal import HorizontalSpace


class Logarithmic(Protocol):
    """Describe the methods of a `QuotientManifold` that the derivative of a distance needs."""

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """Return log_x(y), by values."""

    def norm(self, x: Tensor, u: Tensor) -> Tensor:
        """Return |u|_x."""

    def _departure(self, x: Tensor, y: Tensor, log: Tensor) -> Tensor:
        """Return log_x(y) once more, given `log` = log_x(y)."""

    def _arrival(self, x: Tensor, y: Tensor, log: Tensor) -> Tensor:
        """Return log_y(x), given `log` = log_x(y)."""

    def _space(self, x: Tensor, dtype: torch.dtype) -> HorizontalSpace:
        """Return the horizontal space at x."""


class Distance(torch.autograd.Function):
    r"""Compute dist(x, y)^power, and log_x(y), a constant, by values; power is 1 or 2. Shapes (batch, *shape).

    By the first variation of length, d dist = -(<log_x y, dx>_x + <log_y x, dy>_y) / dist. If dist is 0, so are both
    logarithms and the derivative. Second derivatives differentiate the logarithms.
    """

    @staticmethod
    def forward(manifold: Logarithmic, power: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        log = manifold.logmap(x, y)
        return manifold.norm(x, log) ** power, log

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.manifold, ctx.power, *points = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*points, *output)
        ctx.save_for_forward(*points, *output)

    @staticmethod
    @full_precision
    def backward(ctx: Any, slope: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, found = ctx.saved_tensors, [None, None, None, None]
        if slope is None:
            return tuple(found)
        for i in (0, 1):
            if ctx.needs_input_grad[2 + i]:
                change = _Change(ctx, saved, i)
                found[2 + i] = torch.func.vjp(change, torch.zeros_like(saved[i]))[1](slope)[0]
        return tuple(found)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, None]:
        with outer_derivatives():
            saved = tuple(map(primal, ctx.saved_tensors))
            changes = [_Change(ctx, saved, i)(way) for i, way in enumerate(tangents[2:]) if way is not None]
            return sum(changes[1:], changes[0]), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return many_batches(info, Distance.apply(*one_batch(info, in_dims, args)))


class _Change:
    """Hold the derivative in x (0) or in y (1), a linear map of tangent vectors (batch, *shape) to (batch,)."""

    def __init__(self, ctx: Any, saved: tuple[Tensor, ...], which: int) -> None:
        x, y, distance, log = saved
        manifold, point = ctx.manifold, (x, y)[which]
        self._log = (manifold._departure, manifold._arrival)[which](x, y, log)
        self._space = manifold._space(point, point.dtype)
        self._over = distance.where(distance > 0, 1.0) if ctx.power == 1 else 0.5

    def __call__(self, way: Tensor) -> Tensor:
        return -self._space.inner(self._log, way) / self._over
