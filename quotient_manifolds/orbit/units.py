"""Compare the units of two models - neurons, heads, channels - up to matrices that act inside each unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from quotient_manifolds.symmetries.groups import Algebra, Permutation, Rows, Symmetry

Placed = list[tuple[Rows, Tensor]]
"""Rows of a parameter, by their indices."""


class Units:
    """Hold the entries of each unit of a permutation, and the matrices that act inside units.

    exchanged: whether units are channels that matrices can exchange, too; these are distinguished by entries that no
    matrix changes, such as signs of gains. inside: the indices of symmetries that act inside units.
    """

    def __init__(self, permutation: Permutation, symmetries: Sequence[Symmetry], shapes: Mapping[str, int]) -> None:
        self.permutation, self.exchanged = permutation, False
        self._label(permutation)
        inside: dict[bytes, tuple[Algebra, Tensor | None, dict[int, Placed]]] = {}
        taken = {name: torch.zeros(len(unit), dtype=torch.bool) for name, unit in self._unit.items()}
        within: set[int] = set()
        for number, algebra, flips, placed in (
            (k, *block) for k, each in enumerate(symmetries) for block in each.blocks
        ):
            mine = [(rows, at) for rows, at, _ in placed if rows.name in self._unit]
            labels = [self._unit[rows.name][rows.places[at]] for rows, at in mine]
            units = torch.cat([label.flatten() for label in labels]).unique() if labels else torch.tensor([-1])
            if len(units) == 1 and int(units) >= 0 and len(mine) == len(placed):
                codes = [self._code[rows.name][rows.places[at]] for rows, at in mine]
                inside.setdefault(repr([c.tolist() for c in codes]).encode(), (algebra, flips, {}))[2][int(units)] = (
                    mine
                )
                within.add(number)
                for rows, at in mine:
                    taken[rows.name][rows.places[at]] = True
            else:
                self.exchanged |= any(_exchange(algebra, label) for label in labels)
        full = [each for each in inside.values() if len(each[2]) == permutation.units]
        self._inside = [(a, flips, [of[u] for u in range(permutation.units)]) for a, flips, of in full]
        self.inside = tuple(sorted(within))
        wide = any(shapes[name] > 1 for name in self._unit)
        names = [name for name in self._unit if shapes[name] > 1 or not wide]  # translations change biases
        if self.exchanged:
            turned = {name for each in symmetries if each.mixes for name in each.names}
            self._inside, names = [], [name for name in self._unit if name not in turned]
        self._rest = self._apart(taken, names)

    @property
    def told(self) -> bool:
        """Return whether any entries or matrices distinguish units."""
        return bool(self._count or self._inside)

    def order(self, here: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> Tensor:
        """Return the order of units with the least sum of squared distances to the units of another model.

        Distances are up to orthogonal matrices inside units. [Ainsworth et al., Git Re-Basin, 2209.04836, for neurons]
        """
        a, b = (self._numbers(params) for params in (here, there))
        gain = b @ a.mT
        gain = gain + 1e-9 * gain.abs().max() * torch.eye(len(gain), dtype=torch.float64)  # ties keep the order
        for algebra, flips, placed in self._inside:
            M = torch.zeros((), dtype=torch.float64)
            for slot in zip(*placed, strict=True):
                V, W = (torch.stack([rows.read(p)[at] for rows, at in slot]) for p in (here, there))
                M = M + torch.einsum("inc,jmc->ijnm", W, V)
            gain = gain + (M * algebra.nearest(M, flips)).sum((-2, -1))
        if bool((gain.diagonal() >= gain.amax(1)).all()):
            return torch.arange(len(gain))
        return torch.from_numpy(linear_sum_assignment(-gain.numpy())[1])

    def _label(self, permutation: Permutation) -> None:
        """Label each entry with its unit, -1 for none, -2 for several, and its place inside, the same in all units."""
        self._unit, self._code, base = dict[str, Tensor](), dict[str, Tensor](), 0
        for part in permutation.parts:
            k, m = part.at.shape
            number = torch.full((sum(map(len, part.rows)),), -1)
            number[part.at.flatten()] = torch.arange(k * m)
            columns = part.rows[0].columns
            for rows, own in zip(part.rows, number.split([len(each) for each in part.rows]), strict=True):
                unit, code = (
                    of.setdefault(rows.name, torch.full((rows.touched.numel(),), -1)) for of in (self._unit, self._code)
                )
                at, own = rows.places[own >= 0], own[own >= 0, None]
                unit[at] = torch.where((unit[at] == -1) | (unit[at] == own // m), own // m, -2)
                code[at] = base + own % m * columns + torch.arange(columns)
            base += m * columns

    def _apart(self, taken: Mapping[str, Tensor], names: Iterable[str]) -> list[tuple[str, Tensor, Tensor]]:
        """Return the entries that matrices inside units do not change, with their index in (units, numbers)."""
        free = {name: torch.nonzero((self._unit[name] >= 0) & ~taken[name])[:, 0] for name in names}
        codes = torch.cat([torch.zeros(0, dtype=torch.long), *(self._code[name][at] for name, at in free.items())])
        _, which, count = codes.unique(return_inverse=True, return_counts=True)
        good, self._count = count == self.permutation.units, int((count == self.permutation.units).sum())
        column, found = good.cumsum(0) - 1, []
        for (name, at), own in zip(free.items(), which.split([len(at) for at in free.values()]), strict=True):
            keep = good[own]
            found.append((name, at[keep], self._unit[name][at[keep]] * self._count + column[own[keep]]))
        return found

    def _numbers(self, params: Mapping[str, Tensor]) -> Tensor:
        made = torch.zeros(self.permutation.units * self._count, dtype=torch.float64)
        for name, at, to in self._rest:
            made[to] = params[name].detach().cpu().double().flatten()[at]
        return made.view(self.permutation.units, -1)


def _exchange(algebra: Algebra, labels: Tensor) -> bool:
    """Return whether a group contains the exchange of two rows of different units. labels: units (m, columns)."""
    single = (labels == labels[:, :1]).all(1) & (labels[:, 0] >= 0)
    rows = torch.nonzero(single)[:, 0]
    other = rows[labels[rows, 0] != labels[rows[:1], 0]] if len(rows) else rows
    if not len(other):
        return False
    order = torch.arange(algebra.n)
    order[rows[0]], order[other[0]] = int(other[0]), int(rows[0])
    return algebra.contains(torch.eye(algebra.n, dtype=torch.float64)[order])
