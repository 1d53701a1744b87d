"""Balance pairs, and draw random elements of their groups."""

from __future__ import annotations

import torch
from torch import Tensor

from quotient_manifolds.symmetries.pair import SymmetricPair


def balanced_point(pair: SymmetricPair, x: Tensor) -> Tensor:
    """Return the balanced representative of a point of the pair, in float64."""
    x = x.double()
    balanced = pair.manifold().balance(x)
    if pair.acts != "GL+(1)":
        return balanced
    return balanced * (balanced[:, : pair.n] * x[:, : pair.n]).sum(dim=(1, 2), keepdim=True).sign()  # keep the sign


def group_element(pair: SymmetricPair, condition: float, generator: torch.Generator) -> Tensor:
    """Draw A = U diag(s) V', (heads, h, h) in float64: U, V random orthogonal, s log-spaced with ratio `condition`.

    Scalars lie between condition^-1/2 and condition^1/2, complex ones (heads,) at a random angle.
    """
    if pair.acts != "GL(h)":
        size = condition ** (torch.rand(pair.heads, generator=generator, dtype=torch.float64) - 0.5)
        if pair.acts == "GL+(1)":
            return size[:, None, None]
        return torch.polar(size, 2 * torch.pi * torch.rand(pair.heads, generator=generator, dtype=torch.float64))
    shape = (pair.heads, pair.h, pair.h)
    U, _ = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64))
    V, _ = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64))
    if pair.h == 1:  # draw both large and small factors, because a norm may cancel one factor shared by all heads
        larger = torch.rand(pair.heads, generator=generator, dtype=torch.float64) < 0.5
        return U * condition ** (larger.double() - 0.5)[:, None, None]
    exponents = torch.linspace(-0.5, 0.5, pair.h, dtype=torch.float64)
    return U * condition**exponents @ V.mT


def gaussian_element(pair: SymmetricPair, generator: torch.Generator) -> Tensor:
    if pair.acts == "GL(1, C)":
        return torch.randn(pair.heads, generator=generator, dtype=torch.complex128)
    A = torch.randn(pair.heads, pair.h, pair.h, generator=generator, dtype=torch.float64)
    return A.exp() if pair.acts == "GL+(1)" else A
