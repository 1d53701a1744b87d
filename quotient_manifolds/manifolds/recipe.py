"""Make a quotient manifold of two plain functions, a group action and a metric, by automatic differentiation alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from quotient_manifolds.linalg import solve
from quotient_manifolds.manifolds.horizontal import HorizontalSpace, require_vector
from quotient_manifolds.manifolds.quotient import QuotientManifold
from quotient_manifolds.manifolds.runge_kutta import follow, inside

Action = Callable[[Tensor, Tensor], Tensor]
"""(A, x) -> A x: the group element A applied to one point x."""

MetricFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x, eta, zeta) -> <eta, zeta>_x: symmetric, bilinear, positive definite; a scalar."""


VARIES = math.sqrt(torch.finfo(torch.float32).eps)
"""The smallest relative change of a metric that counts, as functions may hold constants in single precision."""
STEP = 1e-2
"""Of the difference by which that is seen: its error is of third order, and what rounding leaves is divided by it."""


@final
class Recipe(QuotientManifold):
    r"""Form the quotient of R^shape by any smooth action that preserves a metric, both given as functions.

    `action(A, x)` applies a group element to a point, `metric(x, eta, zeta)` is the inner product of two tangent
    vectors there. Both are asked about one point of shape `shape` at a time; batches are visited one by one. `identity`
    is the neutral element of the group, and `algebra` (k, *identity.shape) a basis of its Lie algebra: by default every
    direction (and i times it if `identity` is complex), as for invertible matrices, positive numbers, translations.

    The paper treats every symmetry by the same four steps (Sec. 4 and 5, App. B):

    (i)   *Vertical space.* Moving along the orbit changes nothing the function sees. Its directions are the velocities
          d/ds action(identity + s K, x) at s = 0: one jvp for every K of the basis of the Lie algebra.
    (ii)  *Horizontal projection.* With the vertical vectors as columns of V and the metric as a matrix M, the part of
          eta orthogonal to them is eta - V c, where the normal equations V^T M V c = V^T M eta give c.
    (iii) *Riemannian gradient.* M^{-1} times the Euclidean one: <gradient, eta> is then the directional derivative. For
          an invariant function it is horizontal.
    (iv)  *Geodesics.* x'' = -Gamma(x', x') with M Gamma(xi, xi) = d/ds (M(x + s xi) xi) - grad_x <xi, xi>_x / 2. Of
          second order: x + xi - Gamma(xi, xi) / 2 [paper, Eq. 4]. For the exact one an ODE solver follows the same
          equation in Hamilton's form: the momentum p = M(x) x' changes by p' = grad_x <x', x'>_x / 2.

    Everything is dense, O(d^3) for points of d entries: for reading, for small problems and as the yardstick of the
    closed forms of the other manifolds. The scalar toy model of [paper, App. D], two numbers of which only the product
    matters:

    >>> def rescale(a, x):
    ...     return torch.stack([x[0] / a, x[1] * a])
    >>> def metric(x, eta, zeta):
    ...     return (eta * zeta / x**2).sum()
    >>> toy = Recipe(rescale, metric, shape=(2,), identity=torch.tensor(1.0))
    >>> x = torch.tensor([2.0, 3.0])
    >>> toy.vertical(x)  # (i) one direction: (-u, v)
    tensor([[-2.,  3.]])
    >>> xi = toy.proju(x, torch.tensor([0.5, 0.0]))  # (ii) horizontal: multiples of (u, v)
    >>> [round(float(e), 4) for e in xi]
    [0.25, 0.375]
    >>> egrad = torch.func.grad(lambda x: x[0] * x[1])(x)
    >>> [round(float(e), 4) for e in toy.egrad2rgrad(x, egrad)]  # (iii) egrad * x^2
    [12.0, 18.0]
    >>> [round(float(e), 4) for e in toy.expmap(x, xi) / x]  # (iv) the curve is x exp(t / 8)
    [1.1331, 1.1331]

    At the first point a random action is tried, and a metric that it changes is a ValueError, unless `invariant` is
    False: the formulas hold for any metric, but then depend on the representative, as with the paper's relaxation.

    `balance`, if given, maps a point to a canonical one of its orbit, and `same_orbit` compares those; nothing else
    needs it. The examples below use x = (3, 4) and `rays`, with action(a, x) = a x and metric <eta, zeta> / |x|^2.
    """

    name = "Recipe"
    settings = ("shape",)
    vertical_equation = "<xi, d/ds action(identity + s K, x)>_x = 0 for all K (horizontal space, [paper, App. B.3])"

    def __init__(
        self,
        action: Action,
        metric: MetricFunction,
        *,
        shape: tuple[int, ...],
        identity: Tensor,
        algebra: Tensor | None = None,
        balance: Callable[[Tensor], Tensor] | None = None,
        invariant: bool = True,
    ) -> None:
        super().__init__()
        self.shape, self.ndim = tuple(shape), len(shape)
        self._single, self._inner, self._canonical = action, metric, balance
        if algebra is None:
            algebra = torch.eye(identity.numel()).reshape(-1, *identity.shape)
            algebra = torch.cat([algebra, 1j * algebra]) if identity.is_complex() else algebra
        self._identity, self._algebra, self.complex_group = identity, algebra, identity.is_complex()
        self._invariant = not invariant  # or until it was tried, at the first point

    def vertical(self, x: Tensor) -> Tensor:
        """Compute step (i): d/ds action(identity + s K, x), K in the basis of the Lie algebra. (..., k, *shape).

        >>> rays.vertical(x)
        tensor([[3., 4.]])
        """
        self._require(x=x)
        identity, algebra = self._group(x)

        def at(x: Tensor) -> Tensor:
            return torch.stack([jvp(lambda A: self._single(A, x), (identity,), (K,))[1] for K in algebra])

        return _each(at, (self.ndim,), x)

    def _group(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the identity and the basis of the Lie algebra in the precision of a point."""
        dtype = x.dtype.to_complex() if self.complex_group else x.dtype
        identity, algebra = (K.to(dtype=dtype, device=x.device) for K in (self._identity, self._algebra))
        return identity, algebra

    def _change(self, x: Tensor) -> float:
        """Return d/ds <dA eta, dA eta>_{A x} / <eta, eta>_x at A = identity + s K, s = 0, by a difference, at a point.

        K and eta are random, and K changes neither x nor the identity by more than their lengths, in any units. It is 0
        for an invariant metric. Nested `jvp` is not used, because torch's is wrong for some solves.
        """
        identity, algebra = self._group(x)
        draw = torch.Generator().manual_seed(0)
        K = torch.tensordot(torch.randn(len(algebra), generator=draw, dtype=torch.float64).to(algebra), algebra, dims=1)
        eta = torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x)

        def squared(s: float) -> float:
            there, moved = jvp(lambda y: self._single(identity + s * K, y), (x,), (eta,))[:2]
            return float(self._inner(there, moved, moved))

        turned = jvp(lambda A: self._single(A, x), (identity,), (K,))[1]
        sizes = ((K, identity), (turned, x))
        step = STEP / (max(float(by.norm() / of.norm()) for by, of in sizes if bool(of.any())) or 1.0)
        return (squared(step) - squared(-step)) / (2 * STEP * squared(0.0))

    def dimension(self, x: Tensor) -> Tensor:
        """Compute the dimension of the quotient at x: entries less the rank of the vertical space. Shape (...,).

        >>> rays.dimension(x)
        tensor(1)
        """
        vertical = self.vertical(x).flatten(-self.ndim)
        return vertical.shape[-1] - torch.linalg.matrix_rank(vertical)

    def _metric_matrix(self, x: Tensor) -> Tensor:
        """Compute the symmetric matrix M of the metric at x. Shape (..., d, d) for points of d entries."""
        return _each(self._matrix, (self.ndim,), x)

    def _matrix(self, x: Tensor) -> Tensor:  # this and the next two at one point
        basis = torch.eye(x.numel(), dtype=x.dtype, device=x.device).reshape(-1, *x.shape)
        return vmap(lambda e: vmap(lambda f: self._inner(x, e, f))(basis))(basis)

    def _force(self, x: Tensor, xi: Tensor) -> Tensor:
        return grad(lambda y: self._inner(y, xi, xi) / 2)(x)

    def _christoffel(self, x: Tensor, xi: Tensor) -> Tensor:
        """Compute step (iv): Gamma(xi, xi), minus the acceleration of the geodesic with velocity xi."""

        def lowered(y: Tensor) -> Tensor:  # M(y) xi, the metric being linear in eta
            return grad(lambda eta: self._inner(y, eta, xi))(torch.zeros_like(xi))

        change = jvp(lowered, (x,), (xi,))[1]
        return solve(self._matrix(x), (change - self._force(x, xi)).reshape(-1, 1)).reshape(x.shape)

    def _space(self, x: Tensor, dtype: torch.dtype) -> RecipeSpace:
        return RecipeSpace(self, x.to(dtype))

    def _element(self, x: Tensor) -> tuple[int, ...]:
        return tuple(self._identity.shape)

    def _act(self, A: Tensor, x: Tensor) -> Tensor:
        return _each(self._single, (self._identity.ndim, self.ndim), A, x)

    def _balanced(self, x: Tensor) -> Tensor:
        if self._canonical is None:
            raise NotImplementedError(
                "balance must be given when the Recipe is built, a function of one point. Found none: an action and a "
                "metric alone do not tell canonical representatives"
            )
        return _each(self._canonical, (self.ndim,), x)

    def _key(self) -> tuple[Any, ...]:
        tensors = tuple((tuple(K.shape), K.dtype, tuple(K.flatten().tolist())) for K in (self._identity, self._algebra))
        return (self._single, self._inner, self._canonical, self.shape, *tensors)

    def _misfit(self, shape: tuple[int, ...]) -> str | None:
        if len(shape) >= self.ndim and tuple(shape[len(shape) - self.ndim :]) == self.shape:
            return None
        return f"this Recipe must have shape (..., {', '.join(map(str, self.shape))})"

    def _fault(self, x: Tensor) -> str | None:
        M = self._metric_matrix(x).detach()
        if not bool(torch.isfinite(M).all()):
            return "the metric must be finite at a point. Found NaN or infinity in its matrix"
        asymmetry = float((M - M.mT).abs().max() / M.abs().max().clamp_min(torch.finfo(M.dtype).tiny))
        if asymmetry > math.sqrt(torch.finfo(M.dtype).eps):
            return f"<eta, zeta> = <zeta, eta> fails: the metric's matrix is asymmetric by {asymmetry:.3g} of its size"
        if bool((torch.linalg.cholesky_ex(M).info != 0).any()):
            smallest = float(torch.linalg.eigvalsh(M).min())
            return f"<eta, eta> > 0 fails: the matrix of the metric has the eigenvalue {smallest:.3g}"
        return None if self._invariant or not x.numel() or not len(self._algebra) else self._variation(x)

    def _variation(self, x: Tensor) -> str | None:
        """Return an error message if a random action changes the metric; the first result is kept."""
        with suppress(RuntimeError, NotImplementedError):  # functions that have no such derivatives are not tried
            change = self._change(x.detach().double().reshape(-1, *self.shape)[0])
            if abs(change) > VARIES:
                return (
                    "the metric must be invariant, <dA eta, dA zeta>_{A x} = <eta, zeta>_x. Found that a random action "
                    f"changes <eta, eta> at the relative rate {change:.2g}; take a metric that the action preserves, "
                    "or say invariant=False"
                )
        self._invariant = True
        return None


@final
class RecipeSpace(HorizontalSpace):
    """Hold coordinates z = R^T eta with the Cholesky factor M = R R^T of the metric's matrix.

    Row vectors throughout, so that a point's entries stay the last dimension: z = eta R, and R is `root`.
    """

    def __init__(self, manifold: Recipe, x: Tensor) -> None:
        super().__init__(x, ndim=manifold.ndim)
        self._manifold = manifold
        self._root = torch.linalg.cholesky(manifold._metric_matrix(x))  # (..., d, d)
        V = (manifold.vertical(x).flatten(-manifold.ndim) @ self._root).mT  # (..., d, k): vertical, in coordinates
        # Step (ii): V (V^T V)^-1 V^T, by the pseudo-inverse, which also stands actions that leave a point fixed.
        self._onto_vertical = V @ torch.linalg.pinv(V)

    def coordinates(self, eta: Tensor) -> Tensor:
        require_vector(self.point, eta, len(self.dims))
        return self._rows(eta, lambda row: row @ self._root)

    def vector(self, z: Tensor) -> Tensor:
        return self._rows(z, lambda row: torch.linalg.solve_triangular(self._root, row, upper=False, left=False))

    def covector(self, egrad: Tensor) -> Tensor:  # step (iii): as a vector it is M^-1 egrad
        require_vector(self.point, egrad, len(self.dims))
        return self._rows(egrad, lambda row: torch.linalg.solve_triangular(self._root.mT, row, upper=True, left=False))

    def project(self, z: Tensor) -> Tensor:
        return z - self._rows(z, lambda row: row @ self._onto_vertical)

    def relative_speed(self, z: Tensor) -> Tensor:
        raise NotImplementedError("a recipe does not say what a velocity is small against: compare geodesics directly")

    def _step(self, z: Tensor, order: str) -> Tensor:
        xi, m = self.vector(z), self._manifold
        return xi if order == "first" else xi - _each(m._christoffel, (m.ndim, m.ndim), self.point, xi) / 2

    def _exact(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Solve Hamilton's equations by a Runge-Kutta method of order 8 (`runge_kutta`), in float64.

        The unknowns are the way y from the start and the momentum p, both in coordinates at the start, where the metric
        is the identity: tolerances then mean the same at every representative of an orbit. A curve is stopped at the
        end of its domain, where the metric becomes singular.
        """
        batch, flat = z.shape[: z.ndim - len(self.dims)], z.double().reshape(-1, *self._manifold.shape)
        here = RecipeSpace(self._manifold, self.point.double().expand_as(z).reshape(flat.shape))
        start = torch.cat([torch.zeros_like(flat), flat], dim=1).flatten(1)
        cure = "take a shorter vector, or a metric that is smooth where the curve runs"
        end, reached = follow(partial(_System, here), start, (here.point, here._root), (cure, cure))
        y = _System(here, here.point, here._root).moved(end.chunk(2, dim=-1)[0])
        return y.reshape(z.shape).to(z.dtype), reached.reshape(batch).to(z.dtype)

    def _shaped(self, row: Tensor) -> Tensor:
        return row.unflatten(-1, self._manifold.shape)

    def _rows(self, eta: Tensor, linear: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a linear map of row vectors (..., 1, d) to tensors (..., *shape)."""
        row = linear(eta.flatten(-len(self.dims))[..., None, :])[..., 0, :]
        return self._shaped(row)


class _System:
    """Hold Hamilton's equations of a batch, the unknowns being way and momentum in coordinates at the start."""

    def __init__(self, like: RecipeSpace, point: Tensor, root: Tensor) -> None:
        self._space = copy.copy(like)
        self._space.point, self._space._root = point, root

    def of(self, rows: Tensor) -> _System:
        """Return the equations at some points of the batch."""
        return _System(self._space, self._space.point[rows], self._space._root[rows])

    def trial(self, state: Tensor) -> Tensor:
        """Compute the change of way and momentum, NaN where the metric is singular."""
        y, p = state.chunk(2, dim=-1)
        # in coordinates at the start, where its eigenvalues are 1
        within = inside(self._relative(y))[..., None]
        return torch.where(within, self.motion(torch.cat([torch.where(within, y, 0.0), p], dim=-1)), torch.nan)

    def motion(self, state: Tensor) -> Tensor:
        """Compute the change of way and momentum where the metric is positive definite."""
        space, m, (y, p) = self._space, self._space._manifold, state.chunk(2, dim=-1)
        w = solve(self._relative(y), p[..., None])[..., 0]  # velocity from momentum
        xi = space.vector(space._shaped(w))
        force = space.covector(_each(m._force, (m.ndim, m.ndim), self.moved(y), xi))
        return torch.cat([w, force.flatten(-m.ndim)], dim=-1)

    def energy(self, state: Tensor) -> Tensor:
        """Compute twice the kinetic energy, which is constant."""
        y, p = state.chunk(2, dim=-1)
        return (p * solve(self._relative(y), p[..., None])[..., 0]).sum(dim=-1)

    def moved(self, y: Tensor) -> Tensor:
        """Return the point that the way leads to."""
        return self._space.point + self._space.vector(self._space._shaped(y))

    def _relative(self, y: Tensor) -> Tensor:
        """Compute R^-1 M R^-T, the matrix of the metric where the way leads, in coordinates at the start."""
        M, root = self._space._manifold._metric_matrix(self.moved(y)), self._space._root
        half = torch.linalg.solve_triangular(root, M, upper=False)
        return torch.linalg.solve_triangular(root, half.mT, upper=False)


def _each(f: Callable[..., Tensor], ndims: tuple[int, ...], *tensors: Tensor) -> Tensor:
    """Apply f, which takes single tensors of `ndims` dimensions, over all leading dimensions, which broadcast."""
    split = [x.ndim - k for x, k in zip(tensors, ndims, strict=True)]
    batch = torch.broadcast_shapes(*(x.shape[:i] for x, i in zip(tensors, split, strict=True)))
    flat = [x.expand(batch + x.shape[i:]).reshape(-1, *x.shape[i:]) for x, i in zip(tensors, split, strict=True)]
    result = torch.stack([f(*single) for single in zip(*flat, strict=True)])
    return result.reshape(batch + result.shape[1:])
