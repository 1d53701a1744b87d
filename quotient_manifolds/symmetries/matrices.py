"""Tell which numbers of a parameter a matrix is, in units, or which units of others its numbers come from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quotient_manifolds.symmetries.linear_flow import Flow, is_constant_along, positions
from quotient_manifolds.symmetries.linear_forms import Form


@dataclass(frozen=True, eq=False)
class Elements:
    """Hold flat indices (b, units, rows) into a parameter, as sums of one number for each axis where they are such.

    first: (b, units). rows: (rows,). every: all of them, where they are no such sums.
    """

    first: Tensor
    rows: Tensor
    every: Tensor | None = None

    @staticmethod
    def of(view: Tensor) -> Elements:
        """Return those of a view (b, units, rows) of a parameter's own memory."""
        return Elements(positions(view[:, :, 0]), torch.arange(view.shape[2]) * view.stride(2))

    @staticmethod
    def listed(elements: Tensor) -> Elements:
        """Return those of flat indices (b, units, rows)."""
        first, rows = elements[:, :, 0], elements[0, 0, :] - elements[0, 0, 0]
        return Elements(first, rows, None if torch.equal(first[:, :, None] + rows, elements) else elements)

    def all(self) -> Tensor:
        """Return the flat indices (b, units, rows)."""
        return self.first[:, :, None] + self.rows if self.every is None else self.every


@dataclass(frozen=True, eq=False)
class Matrices:
    """Hold one side of a product (b, rows, k): its numbers, its form, and the parameter it is, if it is one.

    elements: flat indices into the parameter `name`, with rows as units; across: with k as units.
    """

    numbers: Tensor
    form: Form | None
    name: str = ""
    elements: Elements | None = None
    across: Elements | None = None

    @property
    def is_carried(self) -> bool:
        """Return whether the units are the same along k, so that the product averages over tokens."""
        one = self.form is not None and self.numbers.shape[-1] > 1
        return one and self.form is not None and all(is_constant_along(term, -1) for term in self.form.terms)


def matrices_of(flow: Flow, tensor: Tensor, transposed: bool = False) -> Matrices:
    """Return an argument of a product as matrices (b, rows, k); `transposed` if it is given as (b, k, rows)."""
    numbers = tensor if tensor.ndim == 3 else tensor[None]
    numbers = numbers.mT if transposed else numbers
    if name := flow.owner(tensor):
        return Matrices(numbers, None, name, Elements.of(numbers), Elements.of(numbers.mT))
    form = flow.form(tensor)
    if form is None or not form.terms:
        return Matrices(numbers, None)
    form = form.changed(lambda each: each if each.ndim == 3 else each[None])
    form = form.changed(lambda each: each.mT) if transposed else form
    if form.opaque is not None:
        flow.end(form, "cat")
        return Matrices(numbers, None)
    if flow.is_of_parameters(form):
        (term, *others) = form.terms
        if not others and bool((term.unit >= 0).all()) and (term.coef is None or term.coef.unique().numel() == 1):
            name = flow.sources[term.source].name
            flow.uses.setdefault(name, []).append((flow.index, tensor))
            return Matrices(numbers, None, name, Elements.listed(term.unit), Elements.listed(term.unit.mT))
        flow.end(form, "mm")
        return Matrices(numbers, None)
    return Matrices(numbers, form)


def units_of(flow: Flow, name: str, elements: Elements, reads: bool = False) -> tuple[int, Tensor] | None:
    """Return a source that has each of elements (b, unit, row) as a unit, and the units (b, unit)."""
    distinct, number = torch.unique(elements.first, return_inverse=True)
    if elements.every is None:
        rows = elements.rows
        if len(rows) > 1 and int(rows[0]) == int(rows[1]):  # one for every example
            rows = torch.unique(rows)
        if _are_disjoint(distinct, rows):
            return flow.source(name, distinct, rows, reads), number
    every = elements.all()
    first = every[0, :, 0]
    shifts = every - every[:, :1, :]
    if not torch.equal(shifts, (first - first[0])[None, :, None].expand(shifts.shape)):
        return None
    rows = torch.unique(every[:, 0, :] - first[0])
    if not _are_disjoint(first, rows) or len(first) * len(rows) != flow.trace.params[name].numel():
        return None  # a table of which other inputs may use other rows
    order = first.argsort()
    number = flow.source(name, first[order] + rows[0], rows - rows[0], reads)
    return number, order.argsort().expand(every.shape[:2])


def _are_disjoint(first: Tensor, rows: Tensor) -> bool:
    if len(rows) == 1 or len(first) == 1:
        return len(torch.unique(rows)) == len(rows)
    low, high = sorted(((_span(first), _step(first)), (_span(rows), _step(rows))), key=lambda each: each[1])
    if low[0] < high[1]:
        return True
    everything = (first[:, None] + rows).flatten()
    return len(torch.unique(everything)) == len(everything)


def _span(numbers: Tensor) -> int:
    return int(numbers.max() - numbers.min())


def _step(numbers: Tensor) -> int:
    return int(numbers.sort().values.diff().min())
