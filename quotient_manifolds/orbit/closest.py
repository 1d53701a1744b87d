"""Bring parameters near to those of another model: by balancing, and by Gauss-Newton on the charges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from quotient_manifolds.orbit.group import GroupElement, Steps, folded
from quotient_manifolds.symmetries.groups import Params, Symmetry

ROUNDS, SWEEPS = 30, 60
SETTLED = 1e-2  # of the square of all numbers, in a sweep
FAR, HALVINGS = 0.5, 8  # of generators, in one step; of a step
GAIN = 1e-3  # of the distance: what a step has to gain
RANK = 1e-14  # of a Gram matrix
DENSE = 5e7  # numbers of a Jacobian that is held
CONJUGATE, INEXACT = 200, 1e-3  # steps of conjugate gradients, relative error of the slope


def balanced(symmetries: Sequence[Symmetry], params: Params) -> tuple[Params, Steps]:
    """Return parameters with gains of 1 and about the least norm on their orbit, and what leads there.

    From there orthogonal elements lead to the points of the same orbit that are so, too.
    """
    start = folded(symmetries, params)
    here, steps = start.apply(params), start.steps
    alone = [each for each in symmetries if each.balancing(here) is not None]
    others = [each for each in symmetries if each.balancing(here) is None and _stretches(each, here)]
    zeros = {name: torch.zeros_like(w) for name, w in params.items()}
    names, square = dict.fromkeys(name for each in symmetries for name in each.names), torch.inf
    for number in range(SWEEPS):
        if others and number < 2:
            steps = fitted(params, zeros, others, steps, torch.inf, 0.0, 8)
            here = GroupElement(steps).apply(params)
        for symmetry in alone:
            if (value := symmetry.balancing(here)) is not None:
                here = symmetry.act(here, value)
                steps = (*steps, (symmetry, value))
        last, square = square, sum(float(here[name].square().sum()) for name in names)
        if last - square <= SETTLED * square:
            break
    return here, shortened(steps, params, here)


def _stretches(symmetry: Symmetry, params: Params) -> bool:
    """Return whether a symmetry changes the norm of parameters."""
    value, size = symmetry.charge(params, params)
    return bool((value.abs() > 1e-9 * size.max().clamp(min=1e-300)).any())


def shortened(steps: Steps, params: Params, there: Params) -> Steps:
    """Return one step for each symmetry, in place of several, where that leads to the same parameters."""
    short = GroupElement(GroupElement(steps).composed)
    apart = max((float((w - there[name]).abs().max()) for name, w in short.apply(params).items()), default=0.0)
    size = max((float(w.abs().max()) for w in there.values()), default=0.0)
    return short.steps if apart <= 1e-10 * size else steps


def fitted(
    own: Params,
    target: Params,
    symmetries: Sequence[Symmetry],
    steps: Steps,
    condition: float,
    enough: float,
    rounds: int = ROUNDS,
) -> Steps:
    """Return steps, and more that bring parameters nearest to others, all at once.

    |x - y|^2 falls by Gauss-Newton over all generators: its slopes are the charges of x with x - y.
    """
    names = [*dict.fromkeys(name for each in symmetries for name in each.names if name in target)]
    entries = sum(own[name].numel() for name in names)
    dense = entries * sum(each.identity.numel() for each in symmetries) <= DENSE
    nearest = _nearest(symmetries) if dense else partial(_by_conjugate_gradients, symmetries)

    def flat(params: Params) -> Tensor:
        return torch.cat([params[name].flatten() for name in names])

    here = GroupElement(steps).apply(own)
    steps = shortened(steps, own, here)
    for _ in range(rounds if names else 0):
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
    """Return what computes the generators of least norm whose changes of parameters are nearest to r."""
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


def _by_conjugate_gradients(
    symmetries: Sequence[Symmetry], here: Params, names: Sequence[str], r: Tensor
) -> list[Tensor]:
    """Return the same where that has too many numbers, about: slopes are charges. [Björck, Numerical methods for least
    squares problems, 1996, 7.4]
    """
    sizes = [here[name].numel() for name in names]

    def slopes(r: Tensor) -> list[Tensor]:
        y = {name: part.view(here[name].shape) for name, part in zip(names, r.split(sizes), strict=True)}
        return [each.charge(here, y).value for each in symmetries]

    def change(generators: Sequence[Tensor]) -> Tensor:
        total = {name: torch.zeros_like(here[name]) for name in names}
        for symmetry, X in zip(symmetries, generators, strict=True):
            total |= {name: total[name] + w for name, w in symmetry.tangent(here, symmetry.project(X)).items()}
        return torch.cat([total[name].flatten() for name in names])

    slope = p = slopes(r)
    z = [torch.zeros_like(each) for each in slope]
    first = last = sum(float(each.square().sum()) for each in slope)
    for _ in range(CONJUGATE):
        if last <= INEXACT**2 * first:
            break
        q = change(p)
        t = last / float(q.square().sum())
        z, r = [a + t * b for a, b in zip(z, p, strict=True)], r - t * q
        slope = slopes(r)
        last, before = sum(float(each.square().sum()) for each in slope), last
        p = [a + last / before * b for a, b in zip(slope, p, strict=True)]
    return z
