"""Check points and vectors as geoopt asks it, for tensors of every kind, with one sentence each."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any

import geoopt
import torch
from torch import Tensor

from quotient_manifolds.linalg import FullPrecision
from quotient_manifolds.manifolds.arguments import (
    NOT_FINITE,
    all_finite,
    has_values,
    require_no_vmap,
    require_tensor,
    require_type,
    require_values,
    require_vector,
    unusable,
)

Answer = tuple[bool, str | None]
"""Whether a check is passed, and the reason if not."""


def _tell(answer: Answer, explain: bool) -> Any:
    return answer if explain else answer[0]


def insist(answer: Answer) -> None:
    """Raise ValueError with the reason of a check that is not passed."""
    if not answer[0]:
        raise ValueError(answer[1])


def _asserting(check: Callable[..., Any]) -> Callable[..., None]:
    """Make of geoopt's check the one of its methods that raises ValueError, with the reason, where the check fails."""

    @functools.wraps(check)
    def assert_check(self: CheckedManifold, *tensors: Tensor, **options: Any) -> None:
        insist(check(self, *tensors, **options, explain=True))

    assert_check.__doc__ = f"Raise ValueError, with the reason, where `{check.__name__}` is False."
    return assert_check


class CheckedManifold(FullPrecision, geoopt.Manifold, abc.ABC):
    """Answer what geoopt asks before it computes. What is no tensor is a TypeError everywhere.

    Subclasses say which shapes and which values are points, `_misfit` and `_fault`, and which vectors are horizontal.
    """

    @abc.abstractmethod
    def _misfit(self, shape: tuple[int, ...]) -> str | None:
        """Say which shape the points of which manifold should have; None where `shape` is one."""

    @abc.abstractmethod
    def _fault(self, x: Tensor) -> str | None:
        """Say which equation a finite tensor of the right shape fails; None where it is a point."""

    def _check_shape(self, shape: tuple[int, ...], name: str) -> Answer:
        wanted = self._misfit(tuple(shape))
        return (True, None) if wanted is None else (False, f"'{name}' on {wanted}; found {tuple(shape)}")

    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> Answer:
        reason = self._fault(x) if bool(torch.isfinite(x).all()) else NOT_FINITE
        return reason is None, reason

    def check_point(self, x: Tensor, *, explain: bool = False) -> Any:
        """Tell whether x has the dtype and the shape of a point: True or False, or with `explain` also the reason.

        >>> manifold.check_point(torch.ones(2, 3)), manifold.check_point(torch.ones(3, 2))
        (True, False)
        """
        return _tell(self._usable(x, "x"), explain)

    def check_vector(self, u: Tensor, *, explain: bool = False) -> Any:
        """Tell whether u has the dtype and the shape of a tangent vector.

        >>> manifold.check_vector(torch.ones(2, 3, dtype=torch.int64))
        False
        """
        return _tell(self._usable(u, "u"), explain)

    def check_point_on_manifold(
        self, x: Tensor, *, explain: bool = False, atol: float = 1e-5, rtol: float = 1e-5
    ) -> Any:
        """Tell whether x is a point of the manifold.

        >>> manifold.check_point_on_manifold(torch.tensor([[0.0], [1.0]]), explain=True)
        (False, 'u_i != 0 and v_i != 0 fails: 1 entries are 0')
        """
        answer = self._usable(x, "x")
        if answer[0]:
            require_values(x, "x")
            require_no_vmap("a check of values", x)
            answer = self._check_point_on_manifold(x)
        return _tell(answer, explain)

    def check_vector_on_tangent(
        self,
        x: Tensor,
        u: Tensor,
        *,
        ok_point: bool = False,
        explain: bool = False,
        atol: float = 1e-5,
        rtol: float = 1e-5,
    ) -> Any:
        """Tell whether u is horizontal at x: its vertical part is at most `rtol` of it (`atol` plays no part).

        >>> manifold.check_vector_on_tangent(torch.ones(2, 1), torch.tensor([[1.0], [-1.0]]))
        False
        """
        for answer in (self._usable(u, "u"), self.check_point_on_manifold(x, explain=True)):
            if not answer[0]:
                return _tell(answer, explain)
        try:
            require_vector(x, u, self.ndim)
        except ValueError as error:
            return _tell((False, str(error)), explain)
        require_values(u, "u")
        require_no_vmap("a check of values", u)
        return _tell(self._check_vector_on_tangent(x, u, rtol=rtol), explain)

    assert_check_point = _asserting(check_point)
    assert_check_vector = _asserting(check_vector)
    assert_check_point_on_manifold = _asserting(check_point_on_manifold)
    assert_check_vector_on_tangent = _asserting(check_vector_on_tangent)

    def _usable(self, x: Tensor, name: str) -> Answer:
        """Check shape and dtype; parameters on the meta device, which get their values later, pass."""
        require_type(x, name)
        reason = unusable(x, name)
        return (False, reason) if reason else self._check_shape(tuple(x.shape), name)

    def _require(self, **tensors: Tensor) -> None:
        """Raise TypeError or ValueError unless all have the dtype and shape of points, and go together."""
        first, *others = tensors.values()
        for name, x in tensors.items():
            require_tensor(x, name)
            insist(self._check_shape(tuple(x.shape), name))
            require_values(x, name)
        for x in others:
            require_vector(first, x, self.ndim, "two points")

    def _require_finite(self, **points: Tensor) -> None:
        """Raise also unless all entries are finite, as far as they are known."""
        self._require(**points)
        if not all(map(all_finite, points.values())):
            raise ValueError(NOT_FINITE)

    def _require_points(self, **points: Tensor) -> None:
        """Raise also unless all lie on the manifold, as far as values are known."""
        self._require(**points)
        for x in points.values():
            if has_values(x):
                insist(self._check_point_on_manifold(x))
