"""The one table of manifolds under test, each with its geometry written down a second time, densely and plainly.

A case knows its metric and vertical space as textbook formulas on one unbatched point, through Gram matrices and their
inverses: slow, and independent of the frames the package works in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from quotient_manifolds.manifolds import (
    DiagonalQuotient,
    FixedRankQuotient,
    QuotientManifold,
    Recipe,
    RotaryQuotient,
    ScaleQuotient,
    TranslationQuotient,
)


@dataclass(frozen=True)
class Case:
    name: str
    manifold: QuotientManifold
    shape: tuple[int, ...]
    dimension: int
    metric: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(x, eta, zeta) -> <eta, zeta>_x"""
    vertical: Callable[[Tensor], Tensor]
    """x -> (k, *shape), a basis of the vertical space"""
    group: Callable[[torch.Generator, float], Tensor]
    """(generator, condition number) -> a group element"""
    product: Callable[[Tensor], Tensor]
    """x -> what the orbit determines"""

    def __str__(self) -> str:
        return self.name

    def point(self, seed: int, *batch: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(*batch, *self.shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)

    vector = point

    def gram(self, x: Tensor) -> Tensor:
        """The metric at x as a dense matrix in the standard basis."""
        basis = torch.eye(x.numel(), dtype=x.dtype).reshape(-1, *x.shape)
        return vmap(lambda a: vmap(lambda b: self.metric(x, a, b))(basis))(basis)

    def acceleration(self, x: Tensor, v: Tensor) -> Tensor:
        """x'' of the geodesic: M x'' = grad <v, v> / 2 - (d/ds M) v, from the metric alone by autograd."""

        def lowered(y: Tensor) -> Tensor:
            return grad(lambda u: self.metric(y, u, v))(v)

        force = grad(lambda y: self.metric(y, v, v) / 2)(x) - jvp(lowered, (x,), (v,))[1]
        return torch.linalg.solve(self.gram(x), force.flatten()).reshape(x.shape)

    def push(self, A: Tensor, eta: Tensor) -> Tensor:
        """The derivative of the action, which may be affine, along a tangent vector."""
        return self.manifold.action(A, eta) - self.manifold.action(A, 0 * eta)

    def project(self, x: Tensor, eta: Tensor) -> Tensor:
        """eta less its vertical part, by dense least squares in the metric."""
        basis, gram = self.vertical(x).flatten(1), self.gram(x)
        weights = torch.linalg.solve(basis @ gram @ basis.T, basis @ gram @ eta.flatten())
        return eta - (weights @ basis).reshape(eta.shape)


def geometric_mean(A: Tensor, B: Tensor, t: float) -> Tensor:
    """A #_t B = A^(1/2) (A^(-1/2) B A^(-1/2))^t A^(1/2) of positive definite matrices."""

    def power(M: Tensor, k: float) -> Tensor:
        values, vectors = torch.linalg.eigh(M)
        return vectors * values**k @ vectors.mT

    root, unroot = power(A, 0.5), power(A, -0.5)
    return root @ power(unroot @ B @ unroot, t) @ root


def fixed_rank(n: int, m: int, h: int, metric: str | float, eps: float = 0.0) -> Case:
    inv, eye = torch.linalg.inv, torch.eye(h, dtype=torch.float64)

    def weights(x: Tensor) -> tuple[Tensor, Tensor]:
        G, H = x[:n], x[n:]
        grams = G.T @ G + eps * eye, H.T @ H + eps * eye
        if isinstance(metric, float):
            return geometric_mean(inv(grams[0]), grams[1], metric), geometric_mean(inv(grams[1]), grams[0], metric)
        return (inv(grams[0]), inv(grams[1])) if metric == "inv" else (grams[1], grams[0])

    def inner(x: Tensor, eta: Tensor, zeta: Tensor) -> Tensor:
        W_G, W_H = weights(x)
        return torch.trace(W_G @ eta[:n].T @ zeta[:n]) + torch.trace(W_H @ eta[n:].T @ zeta[n:])

    def vertical(x: Tensor) -> Tensor:
        units = torch.eye(h * h, dtype=x.dtype).reshape(-1, h, h)
        return torch.stack([torch.cat([x[:n] @ K, -x[n:] @ K.T]) for K in units])

    def group(generator: torch.Generator, condition: float) -> Tensor:
        Q, R = (torch.linalg.qr(torch.randn(h, h, generator=generator, dtype=torch.float64)).Q for _ in range(2))
        return Q @ torch.diag(torch.logspace(0, -1, h, base=condition, dtype=torch.float64)) @ R

    return Case(
        name=f"fixed-rank-{n}-{m}-{h}-{metric}" + (f"-eps{eps}" if eps else ""),
        manifold=FixedRankQuotient(n, m, metric, eps=eps),
        shape=(n + m, h),
        dimension=(n + m - h) * h,
        metric=inner,
        vertical=vertical,
        group=group,
        product=lambda x: x[..., :n, :] @ x[..., n:, :].mT,
    )


def diagonal(d: int, metric: str | float) -> Case:
    def weights(x: Tensor) -> Tensor:
        if isinstance(metric, float):
            return x.prod(0).abs() ** (2 * metric) / x**2
        return x**-2 if metric == "inv" else x.flip(0) ** 2

    def group(generator: torch.Generator, condition: float) -> Tensor:
        signs = torch.randn(d, generator=generator, dtype=torch.float64).sign()
        return signs * torch.logspace(0, -1, d, base=condition, dtype=torch.float64)

    return Case(
        name=f"diagonal-{d}-{metric}",
        manifold=DiagonalQuotient(metric),
        shape=(2, d),
        dimension=d,
        metric=lambda x, eta, zeta: (weights(x) * eta * zeta).sum(),
        vertical=lambda x: torch.stack([torch.diag(x[0]), -torch.diag(x[1])], dim=1),
        group=group,
        product=lambda x: x[..., 0, :] * x[..., 1, :],
    )


def rotary(n: int, m: int, metric: str | float, eps: float = 0.0) -> Case:
    """The real pair of one column (2n + 2m, 1), with the phase as one more vertical direction."""
    real = fixed_rank(2 * n, 2 * m, 1, metric, eps)

    def column(x: Tensor) -> Tensor:
        return x.reshape(-1, 1)

    def vertical(x: Tensor) -> Tensor:
        sign = torch.cat([-torch.ones(n, 1), torch.ones(m, 1)]).to(x)
        return torch.stack([sign * x, torch.stack([-x[:, 1], x[:, 0]], dim=1)])

    def group(generator: torch.Generator, condition: float) -> Tensor:
        angle = torch.rand((), generator=generator, dtype=torch.float64)
        return torch.polar(torch.tensor(condition, dtype=torch.float64), 7 * angle)

    def product(x: Tensor) -> Tensor:
        """Real and imaginary part of g k^H, without complex numbers."""
        (a, b), (c, d) = x[..., :n, :].unbind(-1), x[..., n:, :].unbind(-1)

        def outer(p: Tensor, q: Tensor) -> Tensor:
            return p[..., :, None] * q[..., None, :]

        return torch.stack([outer(a, c) + outer(b, d), outer(b, c) - outer(a, d)], dim=-3)

    return Case(
        name=f"rotary-{n}-{m}-{metric}" + (f"-eps{eps}" if eps else ""),
        manifold=RotaryQuotient(n, m, metric, eps=eps),
        shape=(n + m, 2),
        dimension=2 * (n + m) - 2,
        metric=lambda x, eta, zeta: real.metric(column(x), column(eta), column(zeta)),
        vertical=vertical,
        group=group,
        product=product,
    )


def scale(d: int) -> Case:
    return Case(
        name=f"scale-{d}",
        manifold=ScaleQuotient(),
        shape=(d,),
        dimension=d - 1,
        metric=lambda x, eta, zeta: (eta @ zeta) / (x @ x),
        vertical=lambda x: x[None],
        group=lambda generator, condition: torch.tensor(condition, dtype=torch.float64),
        product=lambda x: x / x.norm(dim=-1, keepdim=True),
    )


def translation(d: int) -> Case:
    return Case(
        name=f"translation-{d}",
        manifold=TranslationQuotient(),
        shape=(d,),
        dimension=d - 1,
        metric=lambda x, eta, zeta: eta @ zeta,
        vertical=lambda x: torch.ones_like(x)[None],
        group=lambda generator, condition: condition * torch.randn((), generator=generator, dtype=torch.float64),
        product=lambda x: x - x.mean(dim=-1, keepdim=True),
    )


PAIRS = [(4, 3, 2), (3, 5, 1), (3, 3, 3), (1, 1, 1), (6, 4, 3)]

INVARIANT = [
    *(fixed_rank(n, m, h, metric) for n, m, h in PAIRS for metric in ("inv", "mix")),
    *(fixed_rank(3, 4, 2, t) for t in (-0.5, 0.5, 1.3)),
    *(diagonal(d, metric) for d in (1, 4) for metric in ("inv", "mix")),
    *(diagonal(3, t) for t in (-0.5, 0.3)),
    *(rotary(n, m, metric) for n, m in ((3, 2), (1, 1)) for metric in ("inv", "mix")),
    rotary(2, 3, 0.5),
]
"""Cases whose metric is invariant under the whole group."""

RELAXED = [fixed_rank(4, 3, 2, metric, eps=0.3) for metric in ("inv", "mix")]
"""The paper's relaxation: a metric on the same points, invariant under orthogonal group elements only."""

CASES = INVARIANT + RELAXED

VECTORS = [*(scale(d) for d in (2, 5)), *(translation(d) for d in (2, 5))]
"""Invariant metrics on points that are vectors. Translation acts on points only and leaves tangent vectors alone."""

EVERY_BUILT_IN = [*CASES, *VECTORS]


def recipe(case: Case) -> Recipe:
    """The recipe of a case, from its own formula of the metric: it never sees the package's frames."""
    A, action = case.group(torch.Generator(), 1.0), case.manifold.action
    if A.is_complex():  # a pair of real numbers, to differentiate by
        identity = torch.tensor([1.0, 0.0], dtype=A.real.dtype)
        action = lambda a, x: case.manifold.action(torch.view_as_complex(a), x)  # noqa: E731
    elif isinstance(case.manifold, TranslationQuotient):
        identity = torch.zeros_like(A)
    else:
        identity = torch.eye(len(A), dtype=A.dtype) if A.ndim == 2 else torch.ones_like(A)
    given = {"shape": case.shape, "identity": identity, "balance": case.manifold.balance}
    return Recipe(action, case.metric, **given, invariant=not getattr(case.manifold, "eps", 0))


EVERY = [*EVERY_BUILT_IN, replace(VECTORS[0], name="recipe", manifold=recipe(VECTORS[0]))]
"""With a manifold made of functions."""
