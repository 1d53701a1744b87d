"""Bring parameters close to another model's parameters, by Gauss-Newton on the charges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from scipy.sparse.linalg import LinearOperator, lsmr
from torch import Tensor

from quotient_manifolds.orbit.group import GroupElement, Steps
from quotient_manifolds.symmetries.groups import Params, Symmetry

ROUNDS = 30
FAR, HALVINGS = 0.5, 8  # the largest entry of generators in one step; tries with shorter steps
GAIN = 1e-3  # the least relative decrease of the distance in a step
RANK = 1e-14  # relative eigenvalues of a Gram matrix up to this count as 0
DENSE = 5e7  # the largest number of entries of a Jacobian that is stored
ITERATIONS, INEXACT = 200, 1e-3  # of LSMR, and its relative error


def shortened(steps: Steps, params: Params, there: Params) -> Steps:
    """Return one step for each symmetry, in place of several, if this leads to the same parameters."""
    short = GroupElement(GroupElement(steps).composed)
    apart = max((float((w - there[name]).abs().max()) for name, w in short.apply(params).items()), default=0.0)
    size = max((float(w.abs().max()) for w in there.values()), default=0.0)
    return short.steps if apart <= 1e-10 * size else steps


def fitted(
    own: Params, target: Params, symmetries: Sequence[Symmetry], steps: Steps, condition: float, enough: float
) -> Steps:
    """Return the steps, extended by steps over all generators at once that bring parameters closest to the target.

    Gauss-Newton decreases |x - y|^2, whose slopes along the generators are the charges of x with x - y.
    """
    names = [*dict.fromkeys(name for each in symmetries for name in each.names if name in target)]
    entries = sum(own[name].numel() for name in names)
    dense = entries * sum(each.identity.numel() for each in symmetries) <= DENSE
    nearest = _nearest(symmetries) if dense else partial(_about_nearest, symmetries)

    def flat(params: Params) -> Tensor:
        return torch.cat([params[name].flatten() for name in names])

    here = GroupElement(steps).apply(own)
    steps = shortened(steps, own, here)
    for _ in range(ROUNDS if names else 0):
        r = flat(target) - flat(here)
        before = after = float(r.norm())
        if before <= enough:
            break
        generators = nearest(here, names, r)
        far = max((float(X.abs().max()) for X in generators if X.numel()), default=0.0)
        share = min(1.0, FAR / far) if far else 1.0
        for _ in range(HALVINGS):
            turns = [(each, each.exp(each.project(share * X))) for each, X in zip(symmetries, generators, strict=True)]
            new = GroupElement(tuple((each, each.bounded(value, condition)) for each, value in turns))
            moved = new.apply(here)
            if (after := float((flat(target) - flat(moved)).norm())) < before:
                here, steps = moved, shortened((*steps, *new.steps), own, moved)
                break
            share /= 4
        if not after < before * (1 - GAIN):
            break
    return steps


def _nearest(symmetries: Sequence[Symmetry]) -> Callable[[Params, Sequence[str], Tensor], list[Tensor]]:
    """Return a function that computes the generators of least norm whose changes of parameters are closest to r."""
    bases = [each.basis() for each in symmetries]

    def solved(here: Params, names: Sequence[str], r: Tensor) -> list[Tensor]:
        rows = []
        for symmetry, B in zip(symmetries, bases, strict=True):
            tangent = symmetry.tangent(here, B)
            parts = [tangent[n].flatten(1) if n in tangent else r.new_zeros(len(B), here[n].numel()) for n in names]
            rows.append(torch.cat(parts, 1))
        J = torch.cat(rows)
        size = J.norm(dim=1, keepdim=True).clamp(min=1e-300)
        values, V = torch.linalg.eigh((J / size) @ (J / size).mT)
        keep = values > RANK * values[-1:].clamp(min=1e-300)
        z = (V[:, keep] / values[keep]) @ (V[:, keep].mT @ ((J / size) @ r)) / size[:, 0]
        return [torch.tensordot(part, B, 1) for part, B in zip(z.split([len(B) for B in bases]), bases, strict=True)]

    return solved


def _about_nearest(symmetries: Sequence[Symmetry], here: Params, names: Sequence[str], r: Tensor) -> list[Tensor]:
    """Approximate the same generators if the Jacobian is too large, by products with it: tangents and charges.

    [Fong and Saunders, LSMR, 1006.0758]
    """

    def cut(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        parts = flat.double().flatten().split([each.numel() for each in tensors])
        return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.flatten() for part in parts])

    identities = [each.identity for each in symmetries]

    def change(z: Any) -> Any:
        total = {name: torch.zeros_like(here[name]) for name in names}
        for symmetry, X in zip(symmetries, cut(torch.from_numpy(z), identities), strict=True):
            total |= {name: total[name] + w for name, w in symmetry.tangent(here, symmetry.project(X)).items()}
        return joined([total[name] for name in names]).numpy()

    def slopes(y: Any) -> Any:
        along = dict(zip(names, cut(torch.from_numpy(y), [here[name] for name in names]), strict=True))
        return joined([each.charge(here, along).value for each in symmetries]).numpy()

    J = LinearOperator((r.numel(), joined(identities).numel()), matvec=change, rmatvec=slopes, dtype=float)
    z, *_ = lsmr(J, r.numpy(), atol=INEXACT, btol=INEXACT, maxiter=ITERATIONS)
    return cut(torch.from_numpy(z), identities)
