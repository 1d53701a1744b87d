"""Write what a trace computes as linear forms in the numbers that linear maps with parameters answer with.

A linear map y = x W makes one number per column of W for every token; column u is *unit* u of a *source*. As long as
nothing but views, sums, factors and averages over tokens come after it, a number is a sum of c y_u, one *term* each: it
is known which unit it comes from, and with which factor. Two numbers with the same path came the same way from their
units, token by token, so a matrix that acts on all units of a head passes from one end of the path to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

Change = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Source:
    """Hold numbers of a parameter in units: unit u is the numbers first[u] + rows, flat indices.

    A unit is a column of a linear map's matrix, or a row of the matrix that reads it. operations: the places in the
    trace that use the numbers so. dead: for every unit 0, or the number of the reason why nothing may act on it.
    """

    name: str
    first: Tensor
    rows: Tensor
    operations: set[int] = field(default_factory=set)
    inputs: set[tuple[object, ...]] = field(default_factory=set)
    dead: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.dead = torch.zeros(len(self.first), dtype=torch.int32)


@dataclass(frozen=True, eq=False)
class Term:
    """Hold coef times a unit of a source, for every entry of a tensor; unit -1 where there is none.

    coef: None where all are 1. positive: the coef depends on the unit's own sign, as that of a ReLU does. mixed: an
    average over tokens came between. source: its number; negative for products of activations (scores), whose units
    are keys.
    """

    source: int
    unit: Tensor
    path: Tensor
    coef: Tensor | None = None
    positive: bool = False
    mixed: bool = False

    def changed(self, change: Change) -> Term:
        """Return the term with the same change of shape in all that it holds."""
        coef = None if self.coef is None else change(self.coef)
        return replace(self, unit=change(self.unit), path=change(self.path), coef=coef)

    def times(self, factor: Tensor | float) -> Term:
        """Return the term times numbers of its shape."""
        if isinstance(factor, Tensor):
            coef = factor.double().expand(self.unit.shape)
            return replace(self, coef=coef if self.coef is None else self.coef * coef)
        if factor == 1:
            return self
        coef = torch.full((), float(factor), dtype=torch.float64) if self.coef is None else self.coef * factor
        return replace(self, coef=coef.expand(self.unit.shape))

    @property
    def factors(self) -> Tensor:
        """Return coef, 0 where there is no unit."""
        present = (self.unit >= 0).double()
        return present if self.coef is None else present * self.coef

    def is_like(self, other: Term) -> bool:
        """Return whether one may stand in the place of the other."""
        return (self.source, self.positive, self.mixed) == (other.source, other.positive, other.mixed)


@dataclass(frozen=True, eq=False)
class Form:
    """Hold the terms whose sum a tensor is, but where opaque: there it is something else."""

    terms: tuple[Term, ...]
    opaque: Tensor | None = None

    def changed(self, change: Change) -> Form:
        """Return the form with the same change of shape in all that it holds."""
        opaque = None if self.opaque is None else change(self.opaque)
        return Form(tuple(term.changed(change) for term in self.terms), opaque)

    def expanded(self, shape: Iterable[int]) -> Form:
        """Return the form broadcast to a shape."""
        return self.changed(lambda numbers: numbers.expand(tuple(shape)))


def memory(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor from others that are alive."""
    return tensor.untyped_storage().data_ptr()


def _layout(tensor: Tensor) -> tuple[list[int], list[int], int, int]:
    """Return sizes, strides and offset of a tensor in its memory, and the length of that, all in real numbers."""
    size, stride, offset = list(tensor.shape), list(tensor.stride()), int(tensor.storage_offset())
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    if not tensor.is_complex():
        return size, stride, offset, length
    return [*size, 2], [2 * step for step in stride] + [1], 2 * offset, 2 * length


def _flat(numbers: Tensor) -> Tensor:
    """Return the numbers in a row, at the beginning of a memory."""
    flat = numbers.reshape(-1).contiguous()
    return flat.clone() if flat.storage_offset() else flat


class Ledger:
    """Hold the forms of what lies in memory, so that a view, whichever, and what is written in place need no rule.

    Complex numbers are two real ones, along a last axis.
    """

    def __init__(self) -> None:
        self._stored: dict[int, tuple[Form, int]] = {}  # flat, with the length of the memory

    def forget(self, address: int) -> None:
        """Forget what lies in a memory that is not used any more."""
        self._stored.pop(address, None)

    def read(self, tensor: Tensor) -> Form | None:
        """Return the form of a tensor, None if it is something else everywhere."""
        if memory(tensor) not in self._stored:
            return None
        stored, known = self._stored[memory(tensor)]
        size, stride, offset, length = _layout(tensor)
        if known != length:  # read in another precision
            return None
        form = stored.changed(lambda flat: flat.as_strided(size, stride, offset))
        whole = tensor.numel() * (2 if tensor.is_complex() else 1) == length
        terms = tuple(term for term in form.terms if whole or bool((term.unit >= 0).any()))
        opaque = form.opaque if form.opaque is not None and bool(form.opaque.any()) else None
        return None if opaque is not None and not terms else Form(terms, opaque)

    def write(self, tensor: Tensor, form: Form | None) -> None:
        """Write the form of a tensor, or that it is something else."""
        address = memory(tensor)
        if form is None and address not in self._stored:
            return
        size, stride, offset, length = _layout(tensor)
        if form is not None and tensor.is_contiguous() and tensor.numel() * (2 if tensor.is_complex() else 1) == length:
            self._stored[address] = form.changed(_flat), length
            return
        stored, known = self._stored.get(address, (None, length))
        if known != length:
            self.forget(address)
            return
        stored = stored or Form((), torch.ones(length, dtype=torch.bool))

        def put(flat: Tensor, numbers: Tensor | float | bool) -> Tensor:
            written = flat.clone(memory_format=torch.contiguous_format)
            written.as_strided(size, stride, offset).copy_(torch.as_tensor(numbers, dtype=flat.dtype))
            return written

        def nothing(value: float, like: Tensor) -> Tensor:
            return torch.full((length,), value, dtype=like.dtype)

        left = list(form.terms) if form is not None else []
        terms: list[Term] = []
        for old in stored.terms:
            new = next((each for each in left if each.is_like(old)), None)
            if new is not None:
                left.remove(new)
            terms.append(_overwritten(old, new, put))
        for new in left:
            unit, path = put(nothing(-1, new.unit), new.unit), put(nothing(0, new.path), new.path)
            coef = None if new.coef is None else put(nothing(1, new.coef), new.coef)
            terms.append(replace(new, unit=unit, path=path, coef=coef))
        opaque = True if form is None else (False if form.opaque is None else form.opaque)
        clear = torch.zeros(length, dtype=torch.bool) if stored.opaque is None else stored.opaque
        self._stored[address] = Form(tuple(terms), put(clear, opaque)), length


def _overwritten(old: Term, new: Term | None, put: Callable[[Tensor, Tensor | float], Tensor]) -> Term:
    """Return a term of a memory in part of which another is written, or none."""
    if new is None:
        return replace(old, unit=put(old.unit, -1))
    coef = old.coef
    if coef is None and new.coef is not None:
        coef = torch.ones(old.unit.shape, dtype=torch.float64)
    if coef is not None:
        coef = put(coef, 1.0 if new.coef is None else new.coef)
    return replace(new, unit=put(old.unit, new.unit), path=put(old.path, new.path), coef=coef)
