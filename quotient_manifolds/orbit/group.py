"""Represent elements of a model's symmetry group as steps, and parametrize its identity component by generators."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from quotient_manifolds.symmetries import Symmetries
from quotient_manifolds.symmetries.groups import Params, Permutation, Symmetry

Acting: TypeAlias = Symmetry | Permutation
Steps: TypeAlias = tuple[tuple[Acting, Tensor], ...]
CONDITION = 1e3  # the default bound on the condition number of a group element


@dataclass(frozen=True, eq=False)
class GroupElement:
    """Hold an element of a model's symmetry group, as elements of single groups that act one after another.

    steps: (symmetry or permutation, its group element), in the order of action. The latter is A (n, n) of a gauge,
    log-scales, the numbers that a translation adds, or the order of units.
    """

    steps: Steps = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of parameters and buffers that the element changes, each once."""
        return names_of(symmetry for symmetry, _ in self.steps)

    def apply(self, params: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Params:
        """Return all parameters after the action, changed ones as new tensors; the given tensors are not modified.

        Buffers may change, too, such as the statistics of a norm whose channels are permuted. Computed in float64.
        dtype: the dtype of changed parameters, by default their own; they are rounded once, after all steps. Raises
        ValueError if a parameter or buffer is missing or has another shape.
        """
        names = set(self.names)
        moved = {name: w.to(torch.float64, copy=True) if name in names else w for name, w in params.items()}
        for symmetry, value in self.steps:
            moved = symmetry.act(moved, value)
        return {name: w.to(dtype or params[name].dtype) if name in names else w for name, w in moved.items()}

    @property
    def composed(self) -> Steps:
        """Return steps in which each symmetry acts once between permutations of its entries: its steps are composed.

        The order of different symmetries is lost.
        """
        found: list[tuple[Acting, Tensor]] = []
        for symmetry, value in self.steps:
            for k in reversed(range(len(found))):
                other, before = found[k]
                if other == symmetry:
                    found[k] = symmetry, symmetry.compose(before, value)
                    break
                if _exchanges(other, symmetry) or _exchanges(symmetry, other):
                    found.append((symmetry, value))
                    break
            else:
                found.append((symmetry, value))
        return tuple(found)

    @property
    def conditions(self) -> dict[str, float]:
        """Return condition numbers by the names of changed parameters: of matrices, or the ratio of scales; else 1.

        An upper bound if a symmetry acts before and after a permutation of its units.
        """
        every = [(symmetry, symmetry.condition(value.detach())) for symmetry, value in self.composed]
        bounds: dict[str, float] = {}
        for symmetry, _ in every:
            name, bound = ", ".join(symmetry.names), math.prod(own for other, own in every if other == symmetry)
            bounds[name] = max(bound, bounds.get(name, 1.0))
        return bounds

    @property
    def condition(self) -> float:
        """Return the largest of the condition numbers."""
        return max(self.conditions.values(), default=1.0)

    @property
    def inverse(self) -> GroupElement:
        """Return the element that undoes this one."""
        return GroupElement(tuple((symmetry, symmetry.inverse(value)) for symmetry, value in reversed(self.steps)))


def _exchanges(one: Acting, other: Acting) -> bool:
    """Return whether the first permutes parameters that the other changes."""
    return isinstance(one, Permutation) and not set(one.names).isdisjoint(other.names)


def names_of(symmetries: Iterable[Acting]) -> tuple[str, ...]:
    """Return the names of parameters that symmetries change, each once."""
    return tuple(dict.fromkeys(name for each in symmetries for name in each.names))


def check_condition(bound: object) -> None:
    """Raise ValueError unless a bound on a condition number is a finite number above 1."""
    if not isinstance(bound, (int, float)) or not 1 < bound < math.inf:
        raise ValueError(f"The bound on the condition number must be a number above 1. Found {bound!r}.")


class Group:
    """Parametrize the identity component of a model's symmetry group by generators, which are 0 at the identity.

    Elements act by exp(X) of each symmetry, one after another. X is shortened so that the condition number stays below
    the bound.

    fold: first bring gains that scales can change to 1, and keep them there. moves: selects the symmetries that act, by
    default all.
    """

    def __init__(
        self,
        symmetries: Symmetries,
        params: Mapping[str, Tensor],
        *,
        condition: float = CONDITION,
        fold: bool = False,
        moves: Callable[[Symmetry], bool] | None = None,
    ) -> None:
        check_condition(condition)
        self.condition = float(condition)
        self.pairs = symmetries.pairs
        self.start = folded(symmetries.groups, params) if fold else GroupElement()
        self.symmetries = tuple(each for each in symmetries.groups if moves is None or moves(each))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of parameters that the group changes, each once."""
        return names_of((*(symmetry for symmetry, _ in self.start.steps), *self.symmetries))

    def zeros(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """Return the generators at the identity, a tensor for each symmetry, as leaves of autograd."""
        return [torch.zeros(each.shape, dtype=dtype, requires_grad=True) for each in self.symmetries]

    def element(self, numbers: Iterable[Tensor]) -> GroupElement:
        """Return the group element of tensors with the shapes of generators; differentiable."""
        every = zip(self.symmetries, self.projected(numbers), strict=True)
        return GroupElement((*self.start.steps, *((each, each.exp(self._within(each, X))) for each, X in every)))

    def projected(self, numbers: Iterable[Tensor]) -> list[Tensor]:
        """Project tensors onto the generators of their symmetries."""
        return [each.project(X.double()) for each, X in zip(self.symmetries, numbers, strict=True)]

    def _within(self, symmetry: Symmetry, X: Tensor) -> Tensor:
        """Shorten a generator X so that exp(X) keeps the bound on the condition number."""
        most = math.log(self.condition) / 2
        size = symmetry.stretching(X).square().sum().clamp(min=1e-30).sqrt()
        return X * (most * (size / most).tanh() / size)


class Walk:
    """Transform parameters along generators of a group, in float64, and hold the group element that has acted."""

    def __init__(self, group: Group, params: Mapping[str, Tensor]) -> None:
        self.group = group
        self.values = [each.identity for each in group.symmetries]
        wide = {**params, **{name: params[name].detach().double() for name in group.names}}
        self._start = group.start.apply(wide)
        self._act()

    @property
    def element(self) -> GroupElement:
        """Return the group element that has acted so far."""
        return GroupElement((*self.group.start.steps, *zip(self.group.symmetries, self.values, strict=True)))

    @property
    def params(self) -> Params:
        """Return the current parameters."""
        return {name: w.detach() for name, w in self._places[-1].items()}

    @torch.enable_grad()
    def _act(self) -> None:
        self._places = [{**self._start, **{name: self._start[name].requires_grad_() for name in self.group.names}}]
        for symmetry, value in zip(self.group.symmetries, self.values, strict=True):
            self._places.append(symmetry.act(self._places[-1], value))

    def charges(self, slope: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the slopes of a function along the generators of each symmetry, from its gradient in the parameters.

        A generator acts at the place of its symmetry in the sequence, because symmetries need not commute.
        """
        ends = [self._places[-1][name] for name in slope]
        asked = [(k, name) for k, each in enumerate(self.group.symmetries, 1) for name in each.names]
        places = [self._places[k][name] for k, name in asked]
        pulled = torch.autograd.grad(ends, places, [*slope.values()], allow_unused=True)
        there: list[Params] = [{} for _ in self._places]
        for (k, name), y in zip(asked, pulled, strict=True):
            there[k][name] = torch.zeros_like(self._start[name]) if y is None else y
        every = zip(self.group.symmetries, self._places[1:], there[1:], strict=True)
        return [each.charge({n: w.detach() for n, w in x.items()}, y).value for each, x, y in every]

    def go(self, generators: Iterable[Tensor]) -> None:
        """Act by exp(X) of each symmetry, as far as the bound on condition numbers allows."""
        moves = zip(self.group.symmetries, self.values, self.group.projected(generators), strict=True)
        self.values = [
            each.bounded(each.compose(before, each.exp(X.to(before.device))), self.group.condition)
            for each, before, X in moves
        ]
        self._act()


def folded(symmetries: Iterable[Symmetry], params: Mapping[str, Tensor]) -> GroupElement:
    """Return the group element that brings all gains to 1 that log-scales can change."""
    steps = []
    for symmetry in symmetries:
        z = symmetry.identity
        for each in symmetry.gains(params):
            own = each.rows.read(params).detach().cpu()[:, 0].abs()
            row, unknown = each.index
            good = own[row] > 0
            z[unknown[good]] = -own[row[good]].log() / each.powers[good]
        if bool(z.any()) and symmetry.gains(params):
            steps.append((symmetry, z))
    return GroupElement(tuple(steps))
