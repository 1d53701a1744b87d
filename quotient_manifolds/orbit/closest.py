"""Bring parameters near to those of another model: by canonical points, and by Gauss-Newton on the charges."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from quotient_manifolds.orbit.group import GroupElement, Steps
from quotient_manifolds.symmetries.canonical import NoPlaceError, canonical
from quotient_manifolds.symmetries.groups import Params, Symmetry

ROUNDS = 30
FAR, HALVINGS = 0.5, 8  # of generators, in one step; of a step
GAIN = 1e-3  # of the distance: what a step has to gain
RANK = 1e-14  # of a Gram matrix


def settled(symmetries: Sequence[Symmetry], params: Params) -> tuple[Params, Steps]:
    """Return the canonical point of an orbit and what leads there; the parameters themselves where there is none."""
    with suppress(NoPlaceError):
        found = canonical(symmetries, params)
        return found.params, shortened(found.element, params, found.params)
    return params, ()


def shortened(steps: Steps, params: Params, there: Params) -> Steps:
    """Return one step for each symmetry, in place of several, where that leads to the same parameters."""
    short = GroupElement(GroupElement(steps).composed)
    apart = max((float((w - there[name]).abs().max()) for name, w in short.apply(params).items()), default=0.0)
    size = max((float(w.abs().max()) for w in there.values()), default=0.0)
    return short.steps if apart <= 1e-10 * size else steps


def fitted(
    own: Params, target: Params, symmetries: Sequence[Symmetry], steps: Steps, condition: float, enough: float
) -> Steps:
    """Return steps, and more that bring parameters nearest to others, all at once.

    |x - y|^2 falls by Gauss-Newton over all generators: its slopes are the charges of x with x - y.
    """
    names = [*dict.fromkeys(name for each in symmetries for name in each.names if name in target)]
    bases = [each.basis() for each in symmetries]

    def flat(params: Params) -> Tensor:
        return torch.cat([params[name].flatten() for name in names])

    here = GroupElement(steps).apply(own)
    steps = shortened(steps, own, here)
    for _ in range(ROUNDS if sum(map(len, bases)) else 0):
        r = flat(target) - flat(here)
        before = after = float(r.norm())
        if before <= enough:
            break
        generators = _nearest(symmetries, bases, here, names, r)
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


def _nearest(
    symmetries: Sequence[Symmetry], bases: Sequence[Tensor], here: Params, names: Sequence[str], r: Tensor
) -> list[Tensor]:
    """Return the generators of least norm whose changes of parameters are nearest to r."""
    rows = []
    for symmetry, B in zip(symmetries, bases, strict=True):
        tangent = symmetry.tangent(here, B)
        J = [tangent[n].flatten(1) if n in tangent else r.new_zeros(len(B), here[n].numel()) for n in names]
        rows.append(torch.cat(J, 1))
    J = torch.cat(rows)
    size = J.norm(dim=1, keepdim=True).clamp(min=1e-300)
    values, V = torch.linalg.eigh((J / size) @ (J / size).mT)
    keep = values > RANK * values[-1]
    z = (V[:, keep] / values[keep]) @ (V[:, keep].mT @ ((J / size) @ r)) / size[:, 0]
    return [torch.tensordot(part, B, 1) for part, B in zip(z.split([len(B) for B in bases]), bases, strict=True)]
