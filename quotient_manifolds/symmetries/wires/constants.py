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
from quotient_manifolds.symmetries.wires.blocks import Direction
from quotient_manifolds.symmetries.wires.entries import Entries
from quotient_manifolds.symmetries.wires.labels import UNREACHED, UNREAD
from quotient_manifolds.symmetries.wires.linear_algebra import Array, kernel
from quotient_manifolds.symmetries.wires.partners import Partners
from quotient_manifolds.symmetries.wires.shifts import Shifts
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

    def shifts(self, walk: Walk, scaled: Iterable[Direction] = ()) -> Shifts:
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
        self.scaled: tuple[Direction, ...] = ()
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

    def beside(self, partners: Partners, scaled: Iterable[Direction] = ()) -> Constants:
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
        entries.write(params, entries.read(params) + change.reshape(entries.shape))


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
class UnseenOutput(Additive):
    """Describe what nobody sees of what a parameter writes: anything may be added to it. It is 0 at the one place."""

    constants: Constants
    uses: tuple[Linear | Vector, ...]  # of the same entries
    dimension: int
    number: int = 1
    kind = UNREAD

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameter."""
        return (self.uses[0].entries.name,)

    @property
    def families(self) -> dict[str, int]:
        """Return the number of directions."""
        return {self.kind: self.dimension}

    def count(self, params: Mapping[str, Tensor]) -> int:
        """Return the number of directions at these parameters."""
        return self._width * sum(K.shape[1] for K in self._kernels(params))

    @property
    def _width(self) -> int:
        first = self.uses[0]
        return first.shape[2] if isinstance(first, Linear) else 1

    def to_place(self, params: Mapping[str, Tensor]) -> list[Change]:
        """Return less what nobody sees."""
        W = self._read(params)
        change = np.zeros_like(W)
        for axis, K in enumerate(self._kernels(params)):
            change[axis] = -K @ (K.T @ W[axis])
        return [(self.uses[0].entries, torch.from_numpy(change))]

    def drawn(
        self, params: Mapping[str, Tensor], generator: torch.Generator, size: float, control: bool
    ) -> list[Change]:
        """Return Gaussians that nobody sees; as a control Gaussians."""
        entries, kernels = self.uses[0].entries, self._kernels(params)
        size, width = size * typical(params[entries.name]), self._width
        noise = _rank_one if control else _combination
        change = [size * noise(K, width, generator) for K in kernels]
        return [(entries, torch.from_numpy(np.stack(change)))]

    def _kernels(self, params: Mapping[str, Tensor]) -> list[Array]:
        """Return an orthonormal basis of what is unseen for each tap of a weight, or row of a vector."""
        unseen, first = self.constants.at(params).unseen, self.uses[0]
        if isinstance(first, Linear):
            return [unseen.common([row for each in self.uses for row in each.outs])] * first.shape[0]
        return [unseen.common([each.outs[r] for each in self.uses]) for r in range(len(first.outs))]

    def _read(self, params: Mapping[str, Tensor]) -> Array:
        """Return the numbers, (taps or rows, channels, columns)."""
        W = self.uses[0].entries.read(params).numpy()
        return W if isinstance(self.uses[0], Linear) else W[:, :, None]


@dataclass(frozen=True, eq=False)
class UnreachedInput(Additive):
    """Describe directions that what a weight takes never has: its answer to them is 0 at the one place."""

    constants: Constants
    uses: tuple[Linear, ...]
    dimension: int
    number: int = 1
    kind = UNREACHED

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameter."""
        return (self.uses[0].entries.name,)

    @property
    def families(self) -> dict[str, int]:
        """Return the number of directions."""
        return {self.kind: self.dimension}

    def to_place(self, params: Mapping[str, Tensor]) -> list[Change]:
        """Return less the answer to what never occurs."""
        W = self.uses[0].entries.read(params).numpy()
        Q = self._basis(params)
        return [(self.uses[0].entries, torch.from_numpy(-(W @ Q) @ Q.T))]

    def drawn(
        self, params: Mapping[str, Tensor], generator: torch.Generator, size: float, control: bool
    ) -> list[Change]:
        """Return Gaussian answers to what never occurs; as a control Gaussians."""
        entries, Q = self.uses[0].entries, self._basis(params)
        taps, out, _ = self.uses[0].shape
        size = size * typical(params[entries.name])
        noise = _rank_one if control else _combination
        change = [size * noise(Q, out, generator).T for _ in range(taps)]
        return [(entries, torch.from_numpy(np.stack(change)))]

    def _basis(self, params: Mapping[str, Tensor]) -> Array:
        return unreached_basis(self.constants.at(params), self.uses)


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
