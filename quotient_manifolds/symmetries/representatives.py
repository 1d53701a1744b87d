"""Move a model along its symmetry orbit: new parameters, the same function."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from quotient_manifolds.check import check_number
from quotient_manifolds.symmetries.checks import (
    Movable,
    check_parameters,
    check_symmetries,
    check_weights,
    fitting,
    generator_of,
)
from quotient_manifolds.symmetries.pair import Params, SymmetricPair
from quotient_manifolds.symmetries.reparameterization import Reparameterization, together

SWEEPS = 9  # of canonical points that depend on each other, at most
SETTLED = 1e-13  # relative: what a sweep changes at the end
SLOW = 0.1  # of the change before: where a sweep leaves more than that, it is the last one


def random_representative(
    model_or_params: nn.Module | Mapping[str, Tensor],
    symmetries: Movable,
    *,
    scale: float = 1.0,
    log_scale: float = 1.0,
    seed: int = 0,
) -> Params:
    """Return parameters of the same function elsewhere on its orbit: a random element of every symmetry group, applied.

    All named parameters, as new tensors; `Symmetries.transformed` returns a model with them.

    (G A^-1, H A^T) with A = scale x Gaussian for every head of every pair: real matrices, complex numbers for rotary
    planes, scale x exp(Gaussian) where only positive numbers act. Then reparameterizations act: numbers are shifted by
    log_scale x Gaussian times their typical size, gains are multiplied by exp(log_scale x Gaussian). They act in the
    reverse of the order in which `balance` folds them, so that no shift is as large as a gain makes it. Computed in
    float64 and cast back to each parameter's dtype.
    ValueError for weights without values, NaN or infinite, and for a scale so extreme that moved weights overflow.
    [paper, the invariance test of Sec. 6.2, ICML version]
    """
    check_number("scale", scale, positive=True)
    check_number("log_scale", log_scale)
    generator = generator_of(seed)
    stored, moved = _start(model_or_params, symmetries)
    with fitting():
        for pair in symmetries.pairs:
            A = scale * _gaussian_element(pair, generator)
            pair.write(moved, pair.act(A, pair.read(moved)))
        _rounded(moved, stored, symmetries, f"A = {scale:g} x Gaussian")
        for reparameterization in reversed([*together(symmetries.reparameterizations)]):
            reparameterization.transform(moved, generator, log_scale)
    return _rounded(moved, stored, symmetries, f"A = {scale:g} x Gaussian")


def balance(model_or_params: nn.Module | Mapping[str, Tensor], symmetries: Movable) -> Params:
    """Return the balanced parameters of the same function: the same from every point of its orbit, up to rounding.

    Where singular values coincide they are one of several.

    Reparameterizations are at their canonical points, redundant biases among them at 0; G^T G = H^T H is diagonal in
    every pair (|g| = |k| for planes of a rotary embedding). All named parameters, as new tensors; computed
    in float64.
    """
    stored, moved = _start(model_or_params, symmetries)
    with fitting():
        canonicalize(moved, symmetries.reparameterizations)
    for pair in symmetries.pairs:
        pair.write(moved, balanced_point(pair, pair.read(moved)))
    return _rounded(moved, stored, symmetries, "balancing")


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


def _gaussian_element(pair: SymmetricPair, generator: torch.Generator) -> Tensor:
    if pair.acts == "GL(1, C)":
        return torch.randn(pair.heads, generator=generator, dtype=torch.complex128)
    A = torch.randn(pair.heads, pair.h, pair.h, generator=generator, dtype=torch.float64)
    return A.exp() if pair.acts == "GL+(1)" else A


def _start(
    model_or_params: nn.Module | Mapping[str, Tensor], symmetries: Movable
) -> tuple[Mapping[str, Tensor], Params]:
    """Return the parameters, and copies of them: in float64 what symmetries move."""
    if isinstance(model_or_params, nn.Module):
        stored: Mapping[str, Tensor] = dict(model_or_params.named_parameters())
    else:
        check_parameters(model_or_params)
        stored = model_or_params
    check_symmetries(symmetries)
    check_weights(stored, symmetries.moved)
    moving = set(symmetries.moved)
    kinds = {name: torch.float64 if name in moving else w.dtype for name, w in stored.items()}
    return stored, {name: w.detach().to(kinds[name], copy=True) for name, w in stored.items()}


def _rounded(moved: Params, stored: Mapping[str, Tensor], symmetries: Movable, by: str) -> Params:
    """Return parameters in the precision of those stored; ValueError where they do not fit into it."""
    found = {name: w.to(stored[name].dtype) for name, w in moved.items()}
    overflown = [name for name in symmetries.moved if not bool(torch.isfinite(found[name]).all())]
    if overflown:
        raise ValueError(
            f"transforming {overflown[0]!r} by {by} overflows {found[overflown[0]].dtype}: "
            "choose a scale nearer 1 or a wider dtype."
        )
    return found
