"""Represent what may be added to weights and biases: what nobody sees, what nothing reaches."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.reparameterization import Reparameterization, gaussian, typical
from quotient_manifolds.symmetries.wires.entries import Entries
from quotient_manifolds.symmetries.wires.labels import UNREACHED
from quotient_manifolds.symmetries.wires.linear_algebra import Array, kernel
from quotient_manifolds.symmetries.wires.partners import Partners
from quotient_manifolds.symmetries.wires.shifts import Offsets, Shifts
from quotient_manifolds.symmetries.wires.unreached import Unreached
from quotient_manifolds.symmetries.wires.unseen import Unseen
from quotient_manifolds.symmetries.wires.values import Values
from quotient_manifolds.symmetries.wires.walk import Linear, Vector, Walk


@dataclass(frozen=True, eq=False)
class At:
    """Hold what is unseen and unreached at some parameters, and what others keep of these."""

    values: Values
    unreached: Unreached
    unseen: Unseen
    kept: dict[str, Any] = field(default_factory=dict)

    def shifts(self, walk: Walk, scaled: Iterable[Offsets] = ()) -> Shifts:
        """Return the equations of shifts at these parameters; scaled: as of `Constants`."""
        if "equations" not in self.kept:
            self.kept["equations"] = Shifts(walk, self.values, self.unseen, self.unreached, scaled)
        found: Shifts = self.kept["equations"]
        return found


class Constants:
    """Evaluate what a walk says of constants, at any parameters; what was evaluated last is kept."""

    def __init__(self, walk: Walk, partners: Partners | None = None) -> None:
        self.walk, self.partners = walk, partners or Partners(walk, ())
        self.whole: frozenset[Any] = frozenset()
        """Keys of biases that are never 0: what nobody sees of them shifts with the rest."""
        self.scaled: tuple[Offsets, ...] = ()
        """Channels that scales change alike, and the constants that are added to them."""
        self._seen: Array | None = None
        self._last: At | None = None
        self.facing = False

    def at(self, params: Mapping[str, Tensor]) -> At:
        """Return what is unseen and unreached at these parameters."""
        if self._last is not None and self._last.values.hold(params):
            return self._last
        values = Values(self.walk, params)
        unreached = Unreached(self.walk, values)
        found = At(values, unreached, Unseen(self.walk, values, unreached, self._seen))
        if self._seen is None:  # full rank is the same all along an orbit: those matrices need not be read again
            self._seen = found.unseen.seen.copy()
        self._last, self.facing = found, self.facing or found.unseen.facing
        return found

    def forget(self) -> None:
        """Let go of what was evaluated last."""
        self._last = None

    def beside(self, partners: Partners, scaled: Iterable[Offsets] = ()) -> Constants:
        """Return the same with what measures constants, and what is scaled."""
        made = Constants(self.walk, partners)
        made.scaled, made.facing, made._seen = tuple(scaled), self.facing, self._seen
        made._last = replace(self._last, kept={}) if self._last and made.scaled else self._last
        return made


Change = tuple[Entries, Tensor]
"""What is added to entries of a parameter."""


class Additive(Reparameterization):
    """Describe a reparameterization that adds to parameters what constants tell at these parameters."""

    constants: Constants

    @abstractmethod
    def to_place(self, params: Mapping[str, Tensor]) -> list[Change]:
        """Return what leads to the one place."""

    @abstractmethod
    def drawn(
        self, params: Mapping[str, Tensor], generator: torch.Generator, size: float, control: bool
    ) -> list[Change]:
        """Return a random element, of this size; as a control noise that the function sees."""

    def canonicalize(self, params: Params) -> None:
        """Go to the one place, in place."""
        add(params, self.to_place(params))

    def transform(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Add a random element, in place."""
        add(params, self.drawn(params, generator, size, control))

    def tangent(self, params: Mapping[str, Tensor], generator: torch.Generator, control: bool = False) -> Params:
        """Return what is added of size 1: it is linear in the size."""
        tangent = {name: torch.zeros_like(params[name]) for name in self.names}
        for entries, change in self.drawn(params, generator, 1.0, control):
            entries.add_to(tangent, change.reshape(entries.shape))
        return tangent

    @property
    def alone(self) -> tuple[Additive, ...]:
        """Return those of which this consists."""
        return (self,)

    def toward(self, params: Params, other: Params) -> Tensor:
        """Return the difference from other parameters, of which `add` adds what the function does not depend on."""
        return torch.cat([(other[name].double() - params[name].double()).flatten() for name in self.names])

    def add(self, params: Params, change: Tensor) -> None:
        """Add to the parameters that part of a change on which the function does not depend, in place."""
        parts = change.split([params[name].numel() for name in self.names])
        own = {name: -part.view_as(params[name]) for name, part in zip(self.names, parts, strict=True)}
        add(params, self.to_place({**params, **own}))

    def beside(self, other: Reparameterization) -> Reparameterization | None:
        """Return both, whose constants are evaluated once: what one adds is nothing that the other looks at.

        Unless they face each other in a product.
        """
        if isinstance(other, Additive) and other.kind == self.kind and other.constants is self.constants:
            several = (*self.alone, *other.alone)
            return None if self.constants.facing else Several(self.constants, several, self.kind)
        return None


def add(params: Params, changes: Iterable[Change]) -> None:
    """Add changes to parameters, in place."""
    for entries, change in changes:
        entries.add_to(params, change.reshape(entries.shape))


@dataclass(frozen=True, eq=False)
class Several(Additive):
    """Hold additive reparameterizations of one kind, evaluated at the same parameters."""

    constants: Constants
    parts: tuple[Additive, ...]
    kind: str

    @property
    def alone(self) -> tuple[Additive, ...]:
        """Return those of which this consists."""
        return self.parts

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters of all of them."""
        return tuple(dict.fromkeys(name for each in self.parts for name in each.names))

    @property
    def families(self) -> dict[str, int]:
        """Return the dimensions of all of them."""
        found = Counter[str]()
        for each in self.parts:
            found.update(each.families)
        return dict(found)

    def to_place(self, params: Mapping[str, Tensor]) -> list[Change]:
        """Return what leads each to its place."""
        return [change for each in self.parts for change in each.to_place(params)]

    def drawn(
        self, params: Mapping[str, Tensor], generator: torch.Generator, size: float, control: bool
    ) -> list[Change]:
        """Return a random element of each."""
        return [change for each in self.parts for change in each.drawn(params, generator, size, control)]


@dataclass(frozen=True, eq=False)
class FreeDirections(Additive):
    """Describe what may be added to one parameter: outputs that nobody sees, or answers to inputs that never occur.

    In the directions K, orthonormal columns, it is 0 at the one place: K^T W = 0, or W K = 0.
    """

    constants: Constants
    uses: tuple[Linear | Vector, ...]  # of the same entries
    kind: str  # UNREAD or UNREACHED
    dimension: int
    number: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameter."""
        return (self.uses[0].entries.name,)

    @property
    def families(self) -> dict[str, int]:
        """Return the number of directions."""
        return {self.kind: self.dimension}

    def to_place(self, params: Mapping[str, Tensor]) -> list[Change]:
        """Return less what is in these directions."""
        W, bases = self._turned(self.uses[0].entries.read(params).numpy()), self.bases(params)
        return self._change(-K @ (K.T @ rows) for K, rows in zip(bases, W, strict=True))

    def drawn(
        self, params: Mapping[str, Tensor], generator: torch.Generator, size: float, control: bool
    ) -> list[Change]:
        """Return Gaussians in these directions; as a control a matrix of rank one that they tell nothing of."""
        entries, bases = self.uses[0].entries, self.bases(params)
        size = size * typical(params[entries.name])
        width = self._turned(np.empty(entries.shape)).shape[2]
        noise = _rank_one if control else _combination
        return self._change(size * noise(K, width, generator) for K in bases)

    def bases(self, params: Mapping[str, Tensor]) -> list[Array]:
        """Return the directions for each tap of a weight, or row of a vector."""
        at, first = self.constants.at(params), self.uses[0]
        if isinstance(first, Vector):
            return [at.unseen.common([each.outs[row] for each in self.uses]) for row in range(len(first.outs))]
        weights = [each for each in self.uses if isinstance(each, Linear)]
        if self.kind == UNREACHED:
            return [unreached_basis(at, weights)] * first.shape[0]
        return [at.unseen.common([row for each in weights for row in each.outs])] * first.shape[0]

    def _turned(self, W: Array) -> Array:
        """Return numbers (taps or rows, n, columns) of which the directions are combinations of n."""
        W = W[:, :, None] if isinstance(self.uses[0], Vector) else W
        return W.swapaxes(1, 2) if self.kind == UNREACHED else W

    def _change(self, parts: Iterable[Array]) -> list[Change]:
        change = np.stack([*parts])
        return [(self.uses[0].entries, torch.from_numpy(change.swapaxes(1, 2) if self.kind == UNREACHED else change))]


def _combination(basis: Array, width: int, generator: torch.Generator) -> Array:
    """Draw Gaussian combinations (n, width) of the columns of an orthonormal basis (n, k)."""
    return np.asarray(basis @ gaussian(torch.empty(basis.shape[1], width), generator).numpy())


def _rank_one(basis: Array, width: int, generator: torch.Generator) -> Array:
    """Draw a matrix (n, width) of rank one that no basis (n, k) tells anything of."""
    rows, columns = (gaussian(torch.empty(n), generator).numpy() for n in (len(basis), width))
    return np.outer(rows, columns)


def unreached_basis(at: At, several: Sequence[Linear]) -> Array:
    """Return an orthonormal basis (in, m) of the directions u with u . x = 0 for all that these uses take."""
    U, c = at.unreached.common([row for each in several for row in each.ins])
    if not len(c):
        return np.zeros((several[0].shape[2], 0))
    return scipy.linalg.orth((kernel(c[None]).T @ U).T)


def uses(several: list[Any]) -> list[list[Any]]:
    """Group what takes the same entries in the same way, and leave out what is used in another way, too."""
    found: dict[Any, list[Any]] = {}
    for each in several:
        if each.shared in ("", "alike"):
            found.setdefault(each.entries.key, []).append(each)
    return list(found.values())
