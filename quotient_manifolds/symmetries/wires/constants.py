"""Represent what may be added to weights and biases: what nobody sees, what nothing reaches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from quotient_manifolds.symmetries.freedom import Freedom, gaussian, typical
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.wires.linear_algebra import kernel
from quotient_manifolds.symmetries.wires.shifts import Shifts
from quotient_manifolds.symmetries.wires.unreached import Unreached
from quotient_manifolds.symmetries.wires.unseen import Unseen
from quotient_manifolds.symmetries.wires.values import Values
from quotient_manifolds.symmetries.wires.walk import Linear, Vector, Walk

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class At:
    """Hold what is unseen and unreached at some parameters, and what others keep of these."""

    values: Values
    unreached: Unreached
    unseen: Unseen
    kept: dict[str, Any] = field(default_factory=dict)

    def shifts(self, walk: Walk) -> Shifts:
        """Return the equations of shifts at these parameters."""
        if "equations" not in self.kept:
            self.kept["equations"] = Shifts(walk, self.values, self.unseen, self.unreached)
        found: Shifts = self.kept["equations"]
        return found


class Constants:
    """Evaluate what a walk says of constants, at any parameters; what was evaluated last is kept."""

    def __init__(self, walk: Walk, still: Collection[Any] = ()) -> None:
        """Evaluate constants of a walk; still: numbers of biases from which no shift starts, as others move them."""
        self.walk, self.still = walk, frozenset(still)
        self._seen: Array | None = None
        self._last: At | None = None

    def at(self, params: Mapping[str, Tensor]) -> At:
        """Return what is unseen and unreached at these parameters."""
        if self._last is not None and self._last.values.hold(params):
            return self._last
        values = Values(self.walk, params)
        unreached = Unreached(self.walk, values)
        found = At(values, unreached, Unseen(self.walk, values, unreached, self._seen))
        if self._seen is None:  # full rank is the same all along an orbit: those matrices need not be read again
            self._seen = found.unseen.seen.copy()
        self._last = found
        return found

    def beside(self, still: Collection[Any]) -> Constants:
        """Return the same with numbers of biases from which no shift starts."""
        made = Constants(self.walk, still)
        made._seen, made._last = self._seen, self._last
        return made


@dataclass(frozen=True, eq=False)
class UnseenOutput(Freedom):
    """Describe what nobody sees of what a parameter writes: anything may be added to it. It is 0 at the one place."""

    constants: Constants
    uses: tuple[Linear | Vector, ...]  # of the same entries
    dimension: int
    kind = "unseen"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameter."""
        return (self.uses[0].entries.name,)

    @property
    def families(self) -> dict[str, int]:
        """Return the number of directions."""
        return {"outputs that nothing reads": self.dimension}

    def count(self, params: Mapping[str, Tensor]) -> int:
        """Return the number of directions at these parameters."""
        first = self.uses[0]
        width = first.shape[2] if isinstance(first, Linear) else 1
        return width * sum(K.shape[1] for K in self._kernels(params))

    def fold(self, params: Params) -> None:
        """Take away what nobody sees, in place."""
        W = self._read(params).copy()
        for axis, K in enumerate(self._kernels(params)):
            W[axis] -= K @ (K.T @ W[axis])
        self._write(params, W)

    def move(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Add Gaussians that nobody sees, in place; as a control Gaussians."""
        W = self._read(params).copy()
        for axis, K in enumerate(self._kernels(params)):
            noise = size * typical(torch.from_numpy(W)) * gaussian(torch.from_numpy(W[axis]), generator).numpy()
            W[axis] += noise if control else K @ (K.T @ noise)
        self._write(params, W)

    def _kernels(self, params: Mapping[str, Tensor]) -> list[Array]:
        """Return an orthonormal basis of what is unseen for each tap of a weight, or row of a vector."""
        unseen, first = self.constants.at(params).unseen, self.uses[0]
        if isinstance(first, Linear):
            return [unseen.common([row for each in self.uses for row in each.outs])] * first.shape[0]
        return [unseen.common([each.outs[r] for each in self.uses]) for r in range(len(first.outs))]

    def _read(self, params: Params) -> Array:
        """Return the numbers, (taps or rows, channels, columns)."""
        W = self.uses[0].entries.read(params).cpu().numpy()
        return W if isinstance(self.uses[0], Linear) else W[:, :, None]

    def _write(self, params: Params, W: Array) -> None:
        entries = self.uses[0].entries
        entries.write(params, torch.from_numpy(W).reshape(entries.shape))


@dataclass(frozen=True, eq=False)
class UnreachedInput(Freedom):
    """Describe directions that what a weight takes never has: its answer to them is 0 at the one place."""

    constants: Constants
    uses: tuple[Linear, ...]
    dimension: int
    kind = "unreached"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameter."""
        return (self.uses[0].entries.name,)

    @property
    def families(self) -> dict[str, int]:
        """Return the number of directions."""
        return {"inputs that never occur": self.dimension}

    def fold(self, params: Params) -> None:
        """Take away the answer to what never occurs, in place."""
        W = self.uses[0].entries.read(params).cpu().numpy()
        Q = self._basis(params)
        self.uses[0].entries.write(params, torch.from_numpy(W - (W @ Q) @ Q.T))

    def move(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Add Gaussian answers to what never occurs, in place; as a control Gaussians."""
        W = self.uses[0].entries.read(params)
        noise = size * typical(W) * gaussian(W, generator).cpu().numpy()
        Q = self._basis(params)
        self.uses[0].entries.write(params, W.cpu() + torch.from_numpy(noise if control else (noise @ Q) @ Q.T))

    def _basis(self, params: Params) -> Array:
        return unreached_basis(self.constants.at(params), self.uses)


def unreached_basis(at: At, several: Sequence[Linear]) -> Array:
    """Return an orthonormal basis (in, m) of the directions u with u . x = 0 for all that these uses take."""
    U, c = at.unreached.common([row for each in several for row in each.ins])
    if not len(c):
        return np.zeros((several[0].shape[2], 0))
    return scipy.linalg.orth((kernel(c[None]).T @ U).T)
