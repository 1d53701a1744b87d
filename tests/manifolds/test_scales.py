"""Points with entries of any size: everything is homogeneous, and no square on the way overflows or underflows."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from quotient_manifolds.manifolds import QuotientManifold, ScaleQuotient, TranslationQuotient
from tests.cases import EVERY_BUILT_IN, INVARIANT, RELAXED, Case, fixed_rank

seeds = st.integers(0, 2**31)
SIZES = {torch.float32: 40, torch.float64: 100}
"""Entries are multiplied by 2 to this power or to minus it: about 1e12, and 1e30 in double precision."""
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-7}
"""Relative; logarithms of `mix` are searched to 1e-9."""


def power(manifold: QuotientManifold) -> float:
    """The t for which norms of (c x, c u) are c^2t times those of (x, u)."""
    return {ScaleQuotient: 0.0, TranslationQuotient: 0.5}.get(type(manifold)) or getattr(manifold, "t", 0.0)


Method = Callable[[QuotientManifold, Tensor, Tensor, Tensor, Tensor], Tensor]
Degree = Callable[[float], float]

AT_POINTS: dict[str, tuple[Method, Degree]] = {
    "balance": (lambda m, x, y, u, v: m.balance(x), lambda t: 1),
    "norm": (lambda m, x, y, u, v: m.norm(x, u), lambda t: 2 * t),
    "inner": (lambda m, x, y, u, v: m.inner(x, u, v), lambda t: 4 * t),
    "proju": (lambda m, x, y, u, v: m.proju(x, u), lambda t: 1),
    "retr": (lambda m, x, y, u, v: m.retr(x, u), lambda t: 1),
    "a long retr": (lambda m, x, y, u, v: m.retr(x, 30 * u), lambda t: 1),
    "geodesic": (lambda m, x, y, u, v: m.geodesic(x, u, 0.5), lambda t: 1),
    "expmap": (lambda m, x, y, u, v: m.expmap(x, u), lambda t: 1),
    "transp": (lambda m, x, y, u, v: m.transp(x, y, u), lambda t: 1),
    "speed": (lambda m, x, y, u, v: m.at(x).relative_speed(m.at(x).coordinates(u)), lambda t: 0),
    "same orbit": (lambda m, x, y, u, v: m.same_orbit(torch.stack([x, x]), torch.stack([x, y])).double(), lambda t: 0),
    "tangent": (lambda m, x, y, u, v: torch.tensor(float(m.check_vector_on_tangent(x, m.proju(x, u)))), lambda t: 0),
    "not tangent": (lambda m, x, y, u, v: torch.tensor(float(m.check_vector_on_tangent(x, u))), lambda t: 0),
    "logmap": (lambda m, x, y, u, v: m.logmap(x, y), lambda t: 1),
    "dist": (lambda m, x, y, u, v: m.dist(x, y), lambda t: 2 * t),
}
"""Methods of points x, y and vectors u, v of one size c, and the power of c that results are proportional to."""


def pulled_back(m: QuotientManifold, x: Tensor, u: Tensor, egrad: Tensor, order: str) -> Tensor:
    """The gradient at the point that u leads to, pulled back to a vector at x."""
    space = m.at(x)
    y, gradient = torch.empty_like(x), torch.empty_like(x)
    space.linearised(order)(space.project(space.coordinates(u)), (y,))((egrad,), gradient)
    return space.vector(gradient)


WITH_GRADIENTS: dict[str, Callable[[QuotientManifold, Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "egrad2rgrad": lambda m, x, u, egrad, ehess: m.egrad2rgrad(x, egrad),
    "ehess2rhess": lambda m, x, u, egrad, ehess: m.at(x).hessian(egrad, ehess, u),
    "second": lambda m, x, u, egrad, ehess: pulled_back(m, x, u, egrad, "second"),
    "exact": lambda m, x, u, egrad, ehess: pulled_back(m, x, u, egrad, "exact"),
}
"""With gradients of size 1 / c, of losses about 1, everything has the size c^(1 - 4t)."""


def tensors(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Near points, two vectors, and what a gradient is made of."""
    x, u, v, g = (case.vector(seed) for seed in range(1, 5))
    return tuple(p.to(dtype) for p in (x, x + 0.01 * v, 0.05 * u, 0.05 * v, g))  # type: ignore[return-value]


def known(case: Case, name: str) -> bool:
    searched = name in ("dist", "logmap")
    if name == "balance" and isinstance(case.manifold, ScaleQuotient):
        return False  # of length 1
    return not (searched and (case in RELAXED or case.name.startswith("rotary")))


def error(found: Tensor, expected: Tensor) -> float:
    """How far off entries are, relative to the largest; of what is out of range, whether that is told."""
    found, size, limits = found.double(), float(expected.abs().max()), torch.finfo(found.dtype)
    if size > limits.max:
        return math.inf if bool(found.isfinite().all()) else 0.0
    return float((found - expected).abs().max()) / max(size, limits.tiny / limits.eps)


@pytest.mark.parametrize("case", EVERY_BUILT_IN, ids=str)
@pytest.mark.parametrize(("dtype", "sign"), [(torch.float32, 1), (torch.float64, -1)], ids=str)
def test_everything_is_homogeneous(case: Case, dtype: torch.dtype, sign: int) -> None:
    t, two = power(case.manifold), torch.tensor(2.0, dtype=torch.float64)
    # c^2t and c^(4t - 1) have to be numbers, too
    exponent = sign * int(3 * SIZES[dtype] / max(abs(4 * t - 1), 2 * abs(t), 3))
    c = 2.0**exponent
    x, y, u, v, g = tensors(case, dtype)
    there, off = case.manifold, {}
    if case in RELAXED:
        there = fixed_rank(4, 3, 2, there.metric, eps=there.eps * c * c).manifold
    for name, (method, degree) in AT_POINTS.items():
        if known(case, name):
            expected = method(case.manifold, x, y, u, v).double() * two ** (exponent * degree(t))
            off[name] = error(method(there, c * x, c * y, c * u, c * v), expected)
    for name, method in WITH_GRADIENTS.items():
        if x.ndim > 1 or name not in ("second", "exact"):
            egrad, ehess = g, 0.1 * g.flip(-1)
            expected = method(case.manifold, x, u, egrad, ehess).double() * two ** (exponent * (1 - 4 * t))
            off[name] = error(method(there, c * x, c * u, egrad / c, ehess / c), expected)
    assert all(each <= ROUNDING[dtype] for each in off.values()), off


@pytest.mark.parametrize("case", INVARIANT, ids=str)
@pytest.mark.parametrize("size", [2.0**-80, 2.0**80])
def test_representatives_whose_factors_are_far_apart_in_size(case: Case, size: float) -> None:
    x, y, u, v, _ = tensors(case, torch.float32)
    A = case.group(torch.Generator().manual_seed(1), 1.0)
    A = size * (A.to(torch.complex64) if A.is_complex() else A.float())

    def found(x: Tensor, y: Tensor, u: Tensor, v: Tensor) -> list[Tensor]:
        m = case.manifold
        distances = [m.dist(x, y)] if known(case, "dist") else []
        horizontal = m.proju(x, u)
        return [m.balance(x), m.norm(x, u), m.norm(x, horizontal), m.inner(x, horizontal, v), *distances]

    there = [case.manifold.action(A, each) for each in (x, y, u, v)]
    for here, moved in zip(found(x, y, u, v), found(*there), strict=True):
        torch.testing.assert_close(moved, here, rtol=1e-3, atol=1e-5)
    assert not case.manifold.same_orbit(there[0], there[1])
    assert case.manifold.same_orbit(there[0], x)
