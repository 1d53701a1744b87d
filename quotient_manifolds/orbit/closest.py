"""Bring parameters near to those of another model: by balancing, and by Gauss-Newton on the charges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quotient_manifolds.orbit.group import GroupElement, Steps, folded
from quotient_manifolds.symmetries.groups import Params, Symmetry

SWEEPS, SETTLED = 60, 1e-2  # of the square of all numbers, in a sweep
FAR, HALVINGS = 0.5, 8  # of generators, in one step; of a step
GAIN = 1e-3  # of the distance: what a step has to gain
RANK = 1e-14  # of a Gram matrix


def balanced(symmetries: Sequence[Symmetry], params: Params) -> tuple[Params, Steps]:
    """Return parameters with gains of 1 and about the least norm on their orbit, and what leads there.

    From there orthogonal elements lead to the points of the same orbit that are so, too.
    """
    start = folded(symmetries, params)
    here, steps = start.apply(params), [*start.steps]
    for_sweeps = [each for each in symmetries if each.balancing(here) is not None]
    others = [each for each in symmetries if each.balancing(here) is None and _stretches(each, here)]
    zeros = {name: torch.zeros_like(w) for name, w in params.items()}
    names, square = dict.fromkeys(name for each in symmetries for name in each.names), torch.inf
    for number in range(SWEEPS):
        if others and number < 2:
            here, more = Fit(here, zeros, (), others).run((), 8, torch.inf, 0.0)
            steps += more
        for symmetry in for_sweeps:
            if (value := symmetry.balancing(here)) is not None:
                here = symmetry.act(here, value)
                steps.append((symmetry, value))
        last, square = square, sum(float(here[name].square().sum()) for name in names)
        if last - square <= SETTLED * square:
            break
    return here, shortened(tuple(steps), params, here)


def _stretches(symmetry: Symmetry, params: Params) -> bool:
    """Return whether a symmetry changes the norm of parameters."""
    value, size = symmetry.charge(params, params)
    return bool((value.abs() > 1e-9 * size.max().clamp(min=1e-300)).any())


def shortened(steps: Steps, params: Params, there: Params) -> Steps:
    """Return one step for each symmetry, in place of several, where that leads to the same parameters."""
    short = GroupElement(GroupElement(steps).composed)
    apart = (float((w - there[name]).abs().max()) for name, w in short.apply(params).items() if w.is_floating_point())
    size = max(float(w.abs().max()) for w in there.values() if w.is_floating_point())
    return short.steps if max(apart) <= 1e-10 * size else steps


class Fit:
    """Fit an element to the parameters of another model: local symmetries act first, then steps.

    |x - y|^2 falls by Gauss-Newton over all generators at once: its slopes are the charges of x with x - y.
    """

    def __init__(self, own: Params, target: Params, local: Sequence[Symmetry], symmetries: Sequence[Symmetry]) -> None:
        self.own, self.target, self.local, self.symmetries = own, target, local, symmetries
        self.names = [*dict.fromkeys(name for each in (*local, *symmetries) for name in each.names)]
        self.names = [name for name in self.names if name in target]
        self.shifts = [each.identity for each in local]
        self.bases = [each.basis() for each in symmetries]

    def run(self, steps: Steps, rounds: int, condition: float, enough: float) -> tuple[Params, Steps]:
        """Return parameters that no step brings nearer, and all that acts."""
        here = GroupElement(steps).apply(self.own)
        steps = shortened(steps, self.own, here)
        for _ in range(rounds if self.names else 0):
            r = self._flat({name: self.target[name] - here[name] for name in self.names})
            before = float(r.norm())
            rows = [*self._slopes(here, steps)]
            J = torch.cat(rows) if rows else torch.zeros(0, len(r), dtype=torch.float64)
            if not len(J) or before <= enough:
                break
            size = J.norm(dim=1, keepdim=True).clamp(min=1e-300)
            J = J / size
            values, V = torch.linalg.eigh(J @ J.mT)
            keep = values > RANK * values[-1]
            z = (V[:, keep] / values[keep]) @ (V[:, keep].mT @ (J @ r)) / size[:, 0]
            here, steps = self._stepped(here, steps, z, before, condition)
            after = float(self._flat({name: self.target[name] - here[name] for name in self.names}).norm())
            if not after < before * (1 - GAIN):
                break
        shifts = tuple((each, z) for each, z in zip(self.local, self.shifts, strict=True) if bool(z.any()))
        return here, (*shifts, *steps)

    def _flat(self, params: Params) -> Tensor:
        return torch.cat([params[name].flatten() for name in self.names])

    def _stepped(self, here: Params, steps: Steps, z: Tensor, before: float, condition: float) -> tuple[Params, Steps]:
        """Return where a step, or a part of it, leads that comes nearer."""
        counts = [each.identity.numel() for each in self.local] + [len(B) for B in self.bases]
        parts = z.split(counts)
        shifts = [part.view(each.shape) for part, each in zip(parts, self.local, strict=False)]
        turns = [torch.tensordot(part, B, 1) for part, B in zip(parts[len(self.local) :], self.bases, strict=True)]
        far = max((float(X.abs().max()) for X in turns if X.numel()), default=0.0)
        share = min(1.0, FAR / far) if far else 1.0
        for _ in range(HALVINGS):
            added = [a + share * b for a, b in zip(self.shifts, shifts, strict=True)]
            moved = self._shifted(steps, added) if shifts else here
            new: list[tuple[Symmetry, Tensor]] = []
            for symmetry, X in zip(self.symmetries, turns, strict=True):
                if bool(X.any()):
                    value = symmetry.bounded(symmetry.exp(symmetry.project(share * X)), condition)
                    moved = symmetry.act(moved, value)
                    new.append((symmetry, value))
            if float(self._flat({name: self.target[name] - moved[name] for name in self.names}).norm()) < before:
                self.shifts = added
                return moved, shortened((*steps, *new), self._shifted((), added), moved)
            share /= 4
        return here, steps

    def _shifted(self, steps: Steps, shifts: Sequence[Tensor]) -> Params:
        moved = self.own
        for symmetry, z in zip(self.local, shifts, strict=True):
            moved = symmetry.act(moved, z)
        return GroupElement(steps).apply(moved)

    def _slopes(self, here: Params, steps: Steps) -> Iterable[Tensor]:
        """Yield the changes of parameters along generators, (k, numbers)."""
        if self.local:
            z = [each.clone().requires_grad_() for each in self.shifts]
            with torch.enable_grad():
                x = self._flat(self._shifted(steps, z))
                u = torch.zeros_like(x, requires_grad=True)
                pulled = torch.cat([g.flatten() for g in torch.autograd.grad(x, z, u, create_graph=True)])
                (J,) = torch.autograd.grad(pulled, u, torch.eye(len(pulled), dtype=u.dtype), is_grads_batched=True)
            yield J
        for symmetry, B in zip(self.symmetries, self.bases, strict=True):
            tangent = symmetry.tangent(here, B)
            J = [
                tangent[name].flatten(1) if name in tangent else here[name].new_zeros(len(B), here[name].numel())
                for name in self.names
            ]
            yield torch.cat(J, 1)
