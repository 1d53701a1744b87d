"""Represent what may be added to weights and biases: what nobody sees, what nothing reaches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.wires.entries import Entries
from quotient_manifolds.symmetries.wires.labels import UNREACHED
from quotient_manifolds.symmetries.wires.linear_algebra import Array, kernel
from quotient_manifolds.symmetries.wires.partners import Partners
from quotient_manifolds.symmetries.wires.reparameterization import Reparameterization, gaussian, typical
from quotient_manifolds.symmetries.wires.shifts import Offsets, Shifts
from quotient_manifolds.symmetries.wires.unreached import Unreached
from quotient_manifolds.symmetries.wires.unseen import Unseen
from quotient_manifolds.symmetries.wires.uses import Linear, Vector
from quotient_manifolds.symmetries.wires.values import Values
from quotient_manifolds.symmetries.wires.walk import Walk


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
        values = Values(params)
        unreached = Unreached(self.walk, values)
        found = At(values, unreached, Unseen(self.walk, values, unreached, self._seen))
        if self._seen is None:  # full rank is the same all along an orbit: those matrices need not be read again
            self._seen = found.unseen.seen.copy()
        self._last, self.facing = found, self.facing or found.unseen.facing
        return found

    def forget(self) -> None:
        """Let go of what was evaluated last."""
        self._last = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: what was evaluated last is not, which refers to the parameters that it was for."""
        return self.__dict__ | {"_last": None}

    def beside(self, partners: Partners, scaled: Iterable[Offsets] = ()) -> Constants:
        """Return the same with what measures constants, and what is scaled."""
        made = Constants(self.walk, partners)
        made.scaled, made.facing, made._seen = tuple(scaled), self.facing, self._seen
        made._last = replace(self._last, kept={}) if self._last and made.scaled else self._last
        return made


Uses = tuple[Linear | Vector, ...]
"""Uses of the same entries in the same way."""
Change = tuple[Entries, Tensor]
"""What is added to entries of a parameter."""


def add(params: Params, changes: Iterable[Change]) -> None:
    """Add changes to parameters, in place."""
    for entries, change in changes:
        entries.add_to(params, change.reshape(entries.shape))


@dataclass(frozen=True, eq=False)
class FreeDirections(Reparameterization):
    """Describe what may be added to parameters: outputs that nobody sees, or answers to inputs that never occur.

    In the directions K of a parameter W, orthonormal columns, it is 0 at the one place: K^T W = 0, or W K = 0.
    parts: uses of the same entries, and the number of directions of these. answered: weights on the same channels may
    change themselves, as not all that they read is reached.
    """

    constants: Constants
    kind: str  # UNREAD or UNREACHED
    parts: tuple[tuple[Uses, int], ...]
    answered: bool = False
    number: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters, each once."""
        return tuple(dict.fromkeys(uses[0].entries.name for uses, _ in self.parts))

    @property
    def families(self) -> dict[str, int]:
        """Return the number of directions."""
        return {self.kind: sum(dimension for _, dimension in self.parts)}

    def determined(self, params: Mapping[str, Tensor]) -> bool:
        """Return False where what is unread depends on what is unreached, and this on that."""
        return not self.answered

    def canonicalize(self, params: Params) -> None:
        """Go to the one place, in place."""
        add(params, self._to_place(params))

    def transform(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Add a random element, in place."""
        add(params, self._drawn(params, generator, size, control))

    def tangent(self, params: Mapping[str, Tensor], generator: torch.Generator, control: bool = False) -> Params:
        """Return what is added of size 1: it is linear in the size."""
        tangent = {name: torch.zeros_like(params[name]) for name in self.names}
        add(tangent, self._drawn(params, generator, 1.0, control))
        return tangent

    def toward(self, params: Params, other: Params) -> Tensor:
        """Return the difference from other parameters, of which `add` adds what the function does not depend on."""
        return torch.cat([(other[name].double() - params[name].double()).flatten() for name in self.names])

    def add(self, params: Params, change: Tensor) -> None:
        """Add to the parameters that part of a change on which the function does not depend, in place."""
        parts = change.split([params[name].numel() for name in self.names])
        own = {name: -part.view_as(params[name]) for name, part in zip(self.names, parts, strict=True)}
        add(params, self._to_place({**params, **own}))

    def beside(self, other: Reparameterization) -> Reparameterization | None:
        """Return both, whose constants are evaluated once: what one adds is nothing that the other looks at.

        Unless they face each other in a product.
        """
        alike = isinstance(other, FreeDirections) and (other.kind, other.constants) == (self.kind, self.constants)
        if not alike or self.constants.facing:
            return None
        assert isinstance(other, FreeDirections)
        answered = self.answered or other.answered
        return FreeDirections(self.constants, self.kind, (*self.parts, *other.parts), answered)

    def _to_place(self, params: Mapping[str, Tensor]) -> list[Change]:
        """Return less what is in these directions."""
        found = []
        for uses, _ in self.parts:
            W, bases = self._turned(uses, uses[0].entries.read(params).numpy()), self.bases(uses, params)
            found.append(self._change(uses, [-K @ (K.T @ rows) for K, rows in zip(bases, W, strict=True)]))
        return found

    def _drawn(
        self, params: Mapping[str, Tensor], generator: torch.Generator, size: float, control: bool
    ) -> list[Change]:
        """Return Gaussians in these directions; as a control matrices of rank one that they tell nothing of."""
        found, noise = [], _rank_one if control else _combination
        for uses, _ in self.parts:
            entries, bases = uses[0].entries, self.bases(uses, params)
            width = 1 if isinstance(uses[0], Vector) else entries.shape[1 if self.kind == UNREACHED else 2]
            most = size * typical(params[entries.name])
            found.append(self._change(uses, [most * noise(K, width, generator) for K in bases]))
        return found

    def bases(self, uses: Uses, params: Mapping[str, Tensor]) -> list[Array]:
        """Return the directions for each tap of a weight, or row of a vector."""
        at, first = self.constants.at(params), uses[0]
        if isinstance(first, Vector):
            return [at.unseen.common([each.outs[row] for each in uses]) for row in range(len(first.outs))]
        weights = [each for each in uses if isinstance(each, Linear)]
        if self.kind == UNREACHED:
            return [unreached_basis(at, weights)] * first.shape[0]
        return [at.unseen.common([row for each in weights for row in each.outs])] * first.shape[0]

    def _turned(self, uses: Uses, W: Array) -> Array:
        """Return numbers (taps or rows, n, columns) of which the directions are combinations of n."""
        W = W[:, :, None] if isinstance(uses[0], Vector) else W
        return W.swapaxes(1, 2) if self.kind == UNREACHED else W

    def _change(self, uses: Uses, parts: Sequence[Array]) -> Change:
        change = np.stack(parts)
        return uses[0].entries, torch.from_numpy(change.swapaxes(1, 2) if self.kind == UNREACHED else change)


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
