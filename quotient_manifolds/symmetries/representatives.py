"""Find canonical points of orbits, and draw elements of the groups of pairs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from quotient_manifolds.symmetries.pair import Params, SymmetricPair
from quotient_manifolds.symmetries.wires.reparameterization import Reparameterization, together

SWEEPS = 9  # of canonical points that depend on each other, at most
SETTLED = 1e-13  # relative: what a sweep changes at the end
SLOW = 0.1  # of the change before: where a sweep leaves more than that, it is the last one


def canonicalize(params: Params, reparameterizations: Iterable[Reparameterization]) -> bool:
    """Bring reparameterizations to their canonical point, in place (clone the tensors first).

    One after the other, and where lengths tell the place of one, which the others change, again until nothing moves.
    Return whether that converges; if not, what the first sweep led to is left.
    """
    every = [*together(reparameterizations)]
    for each in every:
        each.canonicalize(params)
    if not any(each.by_lengths for each in every):
        return True
    names = {name for each in every for name in each.names}
    first, last = {name: params[name].clone() for name in names}, math.inf
    with contextlib.suppress(RuntimeError):  # false claims may lead to infinity
        for _ in range(SWEEPS):
            before = {name: params[name].clone() for name in names}
            for each in every:
                each.canonicalize(params)
            change = max(float((params[name] - w).norm()) / (float(w.norm()) or 1.0) for name, w in before.items())
            if change <= SETTLED:
                return True
            if not change <= SLOW * last:
                break
            last = change
    params.update(first)
    return False


def balanced_point(pair: SymmetricPair, x: Tensor) -> Tensor:
    """Return the balanced representative of a point of the pair, in float64."""
    x = x.double()
    balanced = pair.manifold().balance(x)
    if pair.acts != "GL+(1)":
        return balanced
    return balanced * (balanced[:, : pair.n] * x[:, : pair.n]).sum(dim=(1, 2), keepdim=True).sign()  # of its own sign


def group_element(pair: SymmetricPair, condition: float, generator: torch.Generator) -> Tensor:
    """Draw A = U diag(s) V', (heads, h, h) in float64: U, V random orthogonal, s log-spaced around 1 to the condition.

    Numbers have no condition: they lie between condition^-1/2 and condition^1/2, complex ones (heads,) at any angle.
    """
    if pair.acts != "GL(h)":
        size = condition ** (torch.rand(pair.heads, generator=generator, dtype=torch.float64) - 0.5)
        if pair.acts == "GL+(1)":
            return size[:, None, None]
        return torch.polar(size, 2 * torch.pi * torch.rand(pair.heads, generator=generator, dtype=torch.float64))
    shape = (pair.heads, pair.h, pair.h)
    U, _ = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64))
    V, _ = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64))
    if pair.h == 1:  # some larger and some smaller: a norm behind them may not see one factor for all
        larger = torch.rand(pair.heads, generator=generator, dtype=torch.float64) < 0.5
        return U * condition ** (larger.double() - 0.5)[:, None, None]
    exponents = torch.linspace(-0.5, 0.5, pair.h, dtype=torch.float64)
    return U * condition**exponents @ V.mT


def gaussian_element(pair: SymmetricPair, generator: torch.Generator) -> Tensor:
    if pair.acts == "GL(1, C)":
        return torch.randn(pair.heads, generator=generator, dtype=torch.complex128)
    A = torch.randn(pair.heads, pair.h, pair.h, generator=generator, dtype=torch.float64)
    return A.exp() if pair.acts == "GL+(1)" else A
