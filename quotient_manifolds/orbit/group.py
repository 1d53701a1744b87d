"""Parametrize the symmetry group of a model by unconstrained numbers; it acts on parameters by autograd."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from quotient_manifolds.symmetries import (
    Gauge,
    Params,
    Permutation,
    Reparameterization,
    Scaling,
    Shift,
    SymmetricPair,
    Symmetries,
)
from quotient_manifolds.symmetries.wires.constants import FreeDirections

Record: TypeAlias = SymmetricPair | Reparameterization | Permutation
Steps: TypeAlias = tuple[tuple[Record, Tensor], ...]
CANONICAL = torch.zeros(0, dtype=torch.float64)
"""In place of an element: the one that brings parameters to the canonical point of a record's orbits."""
CONDITION = 1e3  # of a group element, at most


@dataclass(frozen=True, eq=False)
class GroupElement:
    """Hold an element of a model's symmetry group, as elements of the groups of its records that act one by one.

    steps: records and what acts, in this order: A (heads, h, h) or (heads,) complex of a pair, log-scales z, A (n, n)
    of a gauge, the order of a permutation, what shifts and other constants add.
    """

    steps: Steps = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that it changes, each once."""
        return names_of(record for record, _ in self.steps)

    def apply(self, params: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Params:
        """Return all parameters, those that change as new tensors; the dict's tensors stay as they are.

        What acts is computed in its own precision, float64 by default. dtype: of parameters that change, by default
        their own, to which they are rounded once, after all steps.
        """
        wide = dtype or torch.float64
        moved = {**params, **{name: params[name].to(wide, copy=True) for name in self.names}}
        for record, value in self.steps:
            act_on(record, value, moved)
        return {name: w if dtype else w.to(params[name].dtype) for name, w in moved.items()}

    @property
    def conditions(self) -> dict[str, float]:
        """Return the condition number of what acts, by record: of matrices; the ratio of scales; 1 for the rest.

        Where pairs act before and after a permutation of their heads, an upper bound.
        """
        runs, total, bounds = Counter[Record](), dict[tuple[Record, int], Tensor](), dict[str, float]()
        for record, value in self.steps:
            if isinstance(record, Permutation):
                runs.update(each for each in {one for one, _ in total} if not set(each.names).isdisjoint(record.names))
            elif value is not CANONICAL and isinstance(record, (SymmetricPair, Gauge, Scaling)):
                join = torch.add if isinstance(record, Scaling) else torch.matmul if value.ndim > 1 else torch.mul
                place = record, runs[record] * isinstance(record, SymmetricPair)
                total[place] = join(value, total[place]) if place in total else value
        for (record, _), value in total.items():
            bounds[record.name] = bounds.get(record.name, 1.0) * _condition(value.detach())
        return bounds

    @property
    def condition(self) -> float:
        """Return the largest condition number of what acts."""
        return max(self.conditions.values(), default=1.0)


def names_of(records: Iterable[Record]) -> tuple[str, ...]:
    """Return the parameters that records change, each once."""
    return tuple(dict.fromkeys(name for each in records for name in each.names))


def copied(params: Mapping[str, Tensor], names: Iterable[str]) -> Params:
    """Return all parameters, those of these names as new tensors."""
    return {**params, **{name: params[name].clone() for name in names}}


def act_on(record: Record, value: Tensor, params: Params) -> None:
    """Act with an element of a record's group, in place."""
    if value is CANONICAL and isinstance(record, Reparameterization):
        record.canonicalize(params)
    elif isinstance(record, SymmetricPair):
        record.write(params, record.act(value, record.read(params)))
    elif isinstance(record, Scaling):
        record.apply(params, value)
    elif isinstance(record, Gauge):
        record.act(params, value, torch.linalg.inv(value))
    elif isinstance(record, (Shift, FreeDirections)):
        record.add(params, value)
    elif isinstance(record, Permutation):
        record.permute(params, value)


def acted(record: Record, value: Tensor, params: Params) -> Params | None:
    """Return the parameters on which an element has acted; None where constants vanish that weights have to answer."""
    moved = copied(params, record.names)
    try:
        act_on(record, value, moved)
    except ValueError:
        return None
    return moved


def check_condition(bound: object) -> None:
    """Raise ValueError unless a bound on a condition number is a finite number above 1."""
    if not isinstance(bound, (int, float)) or not 1 < bound < math.inf:
        raise ValueError(f"The bound on the condition number must be a number above 1. Found {bound!r}.")


def _condition(value: Tensor) -> float:
    if value.is_complex():  # a plane's z: by how much it scales
        return float((value.abs().log().abs().max() * 2).exp())
    if value.ndim == 1:
        return float((value.max() - value.min()).exp()) if len(value) else 1.0
    sizes = torch.linalg.svdvals(value)
    return float((sizes[..., 0] / sizes[..., -1]).max())


class Group:
    """Parametrize the connected group of a model's symmetries by unconstrained numbers, 0 at the identity.

    An invertible matrix is A = Q P: Q is the Cayley transform of the skew part of a square matrix, and P = f(S) of its
    symmetric part S, f(s) = (1 + u^2 + 2 a u) / (1 + u^2 - 2 a u), u = s / 4a, whose values lie between 1 / r and r for
    a = (r - 1) / (r + 1); r^2 is the bound on the condition number. Scales are exp(l tanh(s / l)), between 1 / r and r.
    Rotations are Cayley transforms, which miss those by half a turn. Shifts, what is unseen and what is unreached stay
    as they are; so do scales for which shifts make up, and gauges that meet them.

    fold: bring gains that scales can change to 1 first, and leave them there. records: what acts, by default all.
    """

    def __init__(
        self,
        symmetries: Symmetries,
        params: Mapping[str, Tensor],
        *,
        condition: float = CONDITION,
        fold: bool = False,
        moves: Callable[[Record], bool] | None = None,
    ) -> None:
        check_condition(condition)
        self.condition = float(condition)
        free = symmetries.reparameterizations
        scalings = [each for each in free if isinstance(each, Scaling) and each.offsets is None]
        gauges = [each for each in free if isinstance(each, Gauge) and set(each.scalings) <= set(scalings)]
        folded = [each for each in scalings if fold and each.tells]
        own = {name: params[name].detach() for each in folded for name in each.names}
        self.start = GroupElement(tuple((each, torch.from_numpy(each.by_gains(own))) for each in folded))
        # gauges act where gains are those of `start`, which autograd does not follow: scales come after them
        found: list[Record] = [*gauges, *symmetries.pairs]
        found += [each for each in scalings if each not in folded]
        self.records = tuple(each for each in found if moves is None or moves(each))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that the group changes, each once."""
        return names_of((*(record for record, _ in self.start.steps), *self.records))

    def zeros(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """Return the numbers at the identity, a tensor for each record, as leaves of autograd."""
        return [torch.zeros(_shape(each), dtype=dtype, requires_grad=True) for each in self.records]

    def element(self, numbers: Iterable[Tensor]) -> GroupElement:
        """Return the group element of numbers, in their precision; differentiable."""
        steps = ((record, self._value(record, s)) for record, s in zip(self.records, numbers, strict=True))
        return GroupElement((*self.start.steps, *steps))

    def _value(self, record: Record, s: Tensor) -> Tensor:
        if isinstance(record, SymmetricPair):
            if record.acts == "GL(1, C)":
                return torch.polar(self._scale(s[:, 0]), s[:, 1])
            return self._scale(s) if record.h == 1 else self._invertible(s)
        if isinstance(record, Scaling):
            return self._log_scale(s)
        assert isinstance(record, Gauge)
        return self._turn(record, s)

    def _turn(self, gauge: Gauge, s: Tensor) -> Tensor:
        S = gauge.weights.to(s.dtype)
        if gauge.acts == "complex":
            return torch.stack([s.cos(), -s.sin(), s.sin(), s.cos()]).reshape(2, 2)
        if gauge.acts == "mean":  # I + 1 v^T: a shear, then what scales the mean
            total, bound = s.sum(), self.condition**0.25
            v = s - s.mean()
            v = v / (1 + 4 * gauge.n * v.square().sum() / bound**2).sqrt()
            v = v + (self._scale(total, 0.25) - 1) / gauge.n
            return torch.eye(gauge.n, dtype=s.dtype) + torch.outer(1 / S, v * S)
        if gauge.acts == "linear":
            A = self._invertible(s)
            return A / torch.linalg.det(A).abs().pow(1 / gauge.n)
        B = gauge.basis().to(s.dtype)
        R = B @ cayley(s) @ B.mT + torch.eye(gauge.n, dtype=s.dtype) - B @ B.mT
        return R * S / S[:, None]

    def _invertible(self, M: Tensor) -> Tensor:
        root = self.condition**0.5
        a = (root - 1) / (root + 1)
        U = (M + M.mT) / (8 * a)
        one = torch.eye(M.shape[-1], dtype=M.dtype) + U @ U
        return cayley(M) @ torch.linalg.solve(one - 2 * a * U, one + 2 * a * U)

    def _log_scale(self, s: Tensor, share: float = 1.0) -> Tensor:
        most = share * math.log(self.condition) / 2
        return most * torch.tanh(s / most)

    def _scale(self, s: Tensor, share: float = 1.0) -> Tensor:
        return self._log_scale(s, share).exp()


def cayley(M: Tensor) -> Tensor:
    """Return the rotation (I - K/2)^-1 (I + K/2) of the skew part K of square matrices."""
    K, one = (M - M.mT) / 4, torch.eye(M.shape[-1], dtype=M.dtype)
    return torch.linalg.solve(one - K, one + K)


def _shape(record: Record) -> tuple[int, ...]:
    if isinstance(record, SymmetricPair):
        return (record.heads, 2) if record.acts == "GL(1, C)" else (record.heads, record.h, record.h)
    if isinstance(record, Scaling):
        return (record.dimension,)
    assert isinstance(record, Gauge)
    n = record.n - (record.acts == "centred")
    return {"complex": (), "mean": (n,)}.get(record.acts, (n, n))
