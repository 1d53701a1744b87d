"""Follow linear forms through the operations of a trace, and note where units are used in any other way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds.symmetries.linear_forms import Form, Ledger, Source, Term, memory
from quotient_manifolds.symmetries.operations import Operation
from quotient_manifolds.symmetries.trace import Trace

MOST_TERMS = 8
SAMPLES = 5  # tokens whose factors are compared


@dataclass(frozen=True)
class Reason:
    """Say which operation stands in the way of a unit, and whether an average over tokens came before it."""

    operation: str
    mixed: bool


@dataclass(frozen=True, eq=False)
class Side:
    """Hold one side of products over an axis k: for every product and term the units, (n, terms, k).

    coefs, paths: (n, samples, terms, k), at some tokens. everywhere: (n, terms, k), whether all tokens have the unit.
    """

    sources: tuple[int, ...]
    units: Tensor
    coefs: Tensor
    paths: Tensor
    everywhere: Tensor
    positive: tuple[bool, ...]
    mixed: tuple[bool, ...]
    parameter: bool = False


@dataclass(eq=False)
class Product:
    """Hold what an operation contracts over an axis of units: the left and the right side, head by head.

    softmax: what softmax is taken of the product over, "right" or "left" tokens, or "" if it is taken of none.
    free: whether it sees nothing of what all right tokens add to a score. single: whether it is taken over one token.
    """

    operation: int
    left: Side
    right: Side
    softmax: str = ""
    free: bool = True
    single: bool = False


@dataclass(eq=False)
class _Bias:
    """Hold what is added to the answers of a linear map: for each of its units, a number of a parameter."""

    source: int
    units: Tensor
    operations: set[int]


@dataclass(eq=False)
class Flow:
    """Hold what is found while the operations of a trace are gone through in their order."""

    trace: Trace
    ledger: Ledger = field(default_factory=Ledger)
    sources: list[Source] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=lambda: [Reason("", False)])
    uses: dict[str, list[tuple[int, Tensor]]] = field(default_factory=dict)
    biases: dict[int, _Bias] = field(default_factory=dict)
    summed: set[tuple[int, int]] = field(default_factory=set)
    updated: set[int] = field(default_factory=set)
    index: int = 0

    def __post_init__(self) -> None:
        self.parameters = {memory(w): name for name, w in self.trace.params.items() if w.numel()}
        self._known: dict[Any, int] = {}

    # ---- sources

    def source(self, name: str, first: Tensor, rows: Tensor, reads: bool) -> int:
        """Return the number of the source with these units, and note that this operation uses it.

        reads: the units are what a matrix reads, not what it answers with.
        """
        found = (name, first.numpy().tobytes(), rows.numpy().tobytes(), reads)
        if found not in self._known:
            self._known[found] = len(self.sources)
            self.sources.append(Source(name, first, rows))
        number = self._known[found]
        self.sources[number].operations.add(self.index)
        return number

    def single(self, name: str) -> int:
        """Return the source of a parameter each of whose numbers is a unit."""
        if (name, "single") not in self._known:
            self._known[(name, "single")] = len(self.sources)
            self.sources.append(Source(name, torch.arange(self.trace.params[name].numel()), torch.zeros(1).long()))
        return self._known[(name, "single")]

    def known_single(self, name: str) -> int | None:
        """Return the source of a parameter each of whose numbers is a unit, if there is one."""
        return self._known.get((name, "single"))

    def is_single(self, number: int) -> bool:
        """Return whether a source is a parameter each of whose numbers is a unit."""
        return number >= 0 and self._known.get((self.sources[number].name, "single")) == number

    def owner(self, tensor: object) -> str:
        """Return the name of the parameter whose memory a tensor views, "" if it is none's."""
        return self.parameters.get(memory(tensor), "") if isinstance(tensor, Tensor) else ""

    def note_bias(self, terms: Sequence[Term]) -> None:
        """Note that single numbers of a parameter are added to all that a linear map answers with."""
        if len(terms) != 2 or any(term.coef is not None or bool((term.unit < 0).any()) for term in terms):
            return
        for term, other in (terms, terms[::-1]):
            if self.is_single(other.source) and not self.is_single(term.source):
                units = torch.full((len(self.sources[term.source].first),), -1)
                units[term.unit] = other.unit
                if torch.equal(units[term.unit], other.unit) and bool((units >= 0).all()):
                    known = self.biases.setdefault(term.source, _Bias(other.source, units, set()))
                    if known.source == other.source and torch.equal(known.units, units):
                        known.operations.add(self.index)

    def note_use(self, tensor: Tensor) -> None:
        """Note that this operation uses numbers of a parameter, if the tensor is some."""
        if name := self.owner(tensor):
            self.uses.setdefault(name, []).append((self.index, tensor))

    # ---- forms

    def form(self, value: object, parameters: bool = False) -> Form | None:
        """Return the form of an argument; with `parameters`, single numbers of parameters are units, too."""
        if not isinstance(value, Tensor) or not value.numel():
            return None
        name = self.owner(value)
        if not name:
            return self.ledger.read(value)
        if not parameters or value.is_complex():
            return None
        unit = positions(value)
        return Form((Term(self.single(name), unit, torch.zeros((), dtype=torch.long).expand(unit.shape)),))

    def is_of_parameters(self, form: Form | None) -> bool:
        """Return whether all terms are single numbers of parameters."""
        return form is not None and bool(form.terms) and all(self.is_single(term.source) for term in form.terms)

    def lives(self, form: Form | None) -> bool:
        """Return whether any unit may still be acted on."""
        return form is not None and any(
            term.source >= 0 and bool((self.sources[term.source].dead[term.unit[term.unit >= 0]] == 0).any())
            for term in form.terms
        )

    def end(self, form: Form | None, operation: str) -> None:
        """Note that an operation stands in the way of all units of a form."""
        for term in form.terms if form is not None else ():
            self.mark(term.source, term.unit, operation, term.mixed)

    def mark(self, source: int, units: Tensor, operation: str, mixed: bool = False) -> None:
        """Note that an operation stands in the way of units of a source."""
        if source < 0:
            return
        reason = Reason(operation, mixed)
        if reason not in self.reasons:
            self.reasons.append(reason)
        dead = self.sources[source].dead
        touched = torch.zeros(len(dead) + 1, dtype=torch.bool)
        touched[units.flatten()] = True  # unit -1, none, is the last
        dead[touched[:-1] & (dead == 0)] = self.reasons.index(reason)


def positions(tensor: Tensor) -> Tensor:
    """Return for every entry of a view of contiguous memory which number of it it is."""
    found = torch.full((), int(tensor.storage_offset()))
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found = found[..., None] + torch.arange(size) * stride
    return found


def is_constant_along(term: Term, axis: int) -> bool:
    """Return whether each entry comes from the same unit along an axis, or from none."""
    top = term.unit.amax(axis, keepdim=True)
    return bool(((term.unit == top) | (term.unit < 0)).all())


def tokens_mixed(path: Tensor, axis: int, seed: int) -> Tensor:
    """Return the path of sums along an axis: equal where all the paths are."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(1, 2**62, (path.shape[axis],), generator=generator)
    shape = [1] * path.ndim
    shape[axis] = -1
    return (path * weights.view(shape)).sum(axis) + seed * 7_368_787


def scores(form: Form | None) -> Form | None:
    """Return the terms of a form that are products of activations, to which anything may be added."""
    terms = tuple(term for term in form.terms if term.source < 0) if form is not None else ()
    return Form(terms) if terms else None


def added(
    flow: Flow, operation: Operation, forms: Sequence[Form | None], factors: Sequence[float], shape: Sequence[int]
) -> Form | None:
    """Return the form of a sum with factors, of two tensors that are broadcast to the shape."""
    if any(form is None for form in forms):
        kept = [found for form in forms if (found := scores(form)) is not None]
        ended = [form for form in forms if form is not None and form.terms and not flow.lives(form)]
        for form in forms:
            flow.end(form, operation.name)
        if not kept:
            return ended[0].expanded(shape) if ended else None
        factors = [f for form, f in zip(forms, factors, strict=True) if scores(form) is not None]
        forms = kept
    elif any(scores(form) is not None for form in forms):  # what else is added stays as it is beside them
        for form in forms:
            flow.end(form, operation.name)
        factors = [f for form, f in zip(forms, factors, strict=True) if scores(form) is not None]
        forms = [found for form in forms if (found := scores(form)) is not None]
    whole = [form.expanded(shape) for form in forms if form is not None]
    terms = tuple(term.times(factor) for form, factor in zip(whole, factors, strict=True) for term in form.terms)
    opaque = [form.opaque for form in whole if form.opaque is not None]
    sources = [term.source for term in terms]
    if len(terms) > MOST_TERMS:
        flow.end(Form(terms), operation.name)
        return None
    for number in sources:
        if flow.is_single(number):
            flow.sources[number].operations.add(flow.index)
    flow.note_bias(terms)
    for term in terms:
        size = term.unit.numel()
        most = len(flow.sources[term.source].first) if flow.is_single(term.source) else 0
        if 1 < size <= most and len(term.unit.unique()) == size:  # a matrix, not a bias
            flow.updated |= {other.source for other in terms if other is not term}
    flow.summed |= {(one, other) for one in sources for other in sources if one != other and min(one, other) >= 0}
    if opaque:
        somewhere = torch.stack([each.expand(tuple(shape)) for each in opaque]).any(0)
        partly = [term.changed(lambda numbers: numbers[somewhere]) for term in terms]
        flow.end(Form(tuple(partly)), operation.name)
        terms = tuple(replace(term, unit=term.unit.masked_fill(somewhere, -1)) for term in terms)
        return Form(terms, somewhere)
    return Form(terms)


Rule = Callable[[Flow, Operation], Form | None]
"""Return the form of what an operation answers first."""


def stopped(flow: Flow, operation: Operation) -> Form | None:
    """Note that an operation stands in the way of what it reads; what keeps its shape is followed all the same."""
    used = [(each, form) for each in operation.inputs if (form := flow.form(each)) is not None]
    for _, form in used:
        flow.end(form, operation.name)
    for out in operation.outputs[:1]:
        for each, form in used:
            terms = tuple(term for term in form.terms if term.source >= 0)
            if each.shape == out.shape and each.is_complex() == out.is_complex() and terms and out.is_floating_point():
                return Form(terms, form.opaque)
    return None


def side_of(form: Form) -> Side | None:
    """Return a form (b, tokens, k) as a side of products; None if its units are not the same for all tokens."""
    if form.opaque is not None or not form.terms or any(term.source < 0 for term in form.terms):
        return None
    if not all(is_constant_along(term, 1) for term in form.terms):
        return None
    present = torch.stack([(term.unit >= 0).any(2).any(0) for term in form.terms]).any(0)
    tokens = present.nonzero()[:, 0]  # others are padded
    if not len(tokens):
        return None
    some = tokens[torch.linspace(0, len(tokens) - 1, min(len(tokens), SAMPLES)).round().long()]
    return Side(
        tuple(term.source for term in form.terms),
        torch.stack([term.unit.amax(1) for term in form.terms], 1),
        torch.stack([term.changed(lambda numbers: numbers[:, some]).factors for term in form.terms], 2),
        torch.stack([term.path[:, some] for term in form.terms], 2),
        torch.stack([(term.unit >= 0).all(1) for term in form.terms], 1),
        tuple(term.positive for term in form.terms),
        tuple(term.mixed for term in form.terms),
    )


def without_repeats(sides: Sequence[Side]) -> list[Side]:
    """Return the sides of each product once, however many examples have it."""
    together = torch.cat([side.units.flatten(1) for side in sides], 1)
    if bool((together == together[:1]).all()):
        together = together[:1]
    distinct, number = torch.unique(together, dim=0, return_inverse=True)
    number = number.expand(len(sides[0].units))
    known = sum((side.coefs != 0).flatten(1).sum(1) for side in sides)  # nothing is said by what is padded
    best = torch.argsort(torch.as_tensor(known), descending=True, stable=True)
    best = best[torch.argsort(number[best], stable=True)]
    starts = torch.bincount(number, minlength=len(distinct)).cumsum(0).roll(1)
    starts[0] = 0
    kept = best[starts]
    first = torch.full((len(distinct),), len(number)).scatter_reduce(0, number, torch.arange(len(number)), "amin")
    kept = kept[first.argsort()]
    return [
        Side(
            side.sources,
            side.units[kept],
            side.coefs[kept],
            side.paths[kept],
            side.everywhere[kept],
            side.positive,
            side.mixed,
            side.parameter,
        )
        for side in sides
    ]
