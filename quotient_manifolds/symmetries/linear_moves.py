"""Pass linear forms through operations that put numbers elsewhere in memory, or put several tensors together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from quotient_manifolds.symmetries.linear_flow import Flow, Rule, scores, stopped
from quotient_manifolds.symmetries.linear_forms import Form, Term
from quotient_manifolds.symmetries.operations import Operation

LOW = -1e4  # what is put in the place of scores that softmax is to ignore


def is_low(value: Any) -> bool:
    """Return whether softmax ignores what has this value."""
    return bool((torch.as_tensor(value) <= LOW).all())


def _moved(flow: Flow, operation: Operation) -> Form | None:
    given, *rest = operation.arguments
    form = flow.form(given, parameters=True)
    if form is None or any(flow.form(each) is not None for each in operation.inputs if each is not given):
        return stopped(flow, operation)
    rest = tree_map_only(Tensor, Tensor.cpu, rest)
    return form.changed(lambda numbers: operation.call(numbers, *rest, **operation.options))


def _copied(flow: Flow, operation: Operation) -> Form | None:
    given, out = operation.arguments[0], operation.outputs[0]
    if not (out.is_floating_point() or out.is_complex()) or out.is_complex() != given.is_complex():
        return stopped(flow, operation)
    form = flow.form(given, parameters=True)
    if form is None or out.is_complex():
        return form
    return form.changed(lambda numbers: numbers.reshape(out.shape))


def _resized(flow: Flow, operation: Operation) -> Form | None:
    """Pass what is interpolated to the size that it has."""
    given, out = operation.inputs[0], operation.outputs[0]
    same = given.shape == out.shape and torch.equal(given, out)
    return _copied(flow, operation) if same else stopped(flow, operation)


def _written(flow: Flow, operation: Operation) -> Form | None:
    target, given = operation.arguments[:2]
    form = flow.form(given, parameters=True)
    return None if form is None else form.expanded(target.shape)


def _filled(flow: Flow, operation: Operation) -> Form | None:
    values = {"full": 1, "full_like": 1, "fill": 1, "fill_": 1, "new_full": 2}
    value = operation.arguments[values[operation.name]] if operation.name in values else 0
    return Form(()) if not isinstance(value, Tensor) and value == 0 else None


def _shaped(flow: Flow, operation: Operation) -> Form | None:
    """Read nothing but a shape."""
    return None


def _padded(flow: Flow, operation: Operation) -> Form | None:
    given, pads, *rest = operation.arguments
    value = rest[0] if rest else 0
    form = flow.form(given, parameters=True)

    def pad(numbers: Tensor, by: float) -> Tensor:
        padded: Tensor = torch.ops.aten.constant_pad_nd(numbers, pads, by)
        return padded

    if form is None:
        return None
    terms = tuple(
        replace(
            term,
            unit=pad(term.unit, -1),
            path=pad(term.path, 0),
            coef=None if term.coef is None else pad(term.coef, 0),
        )
        for term in form.terms
    )
    opaque = torch.zeros(given.shape, dtype=torch.bool) if form.opaque is None else form.opaque
    return Form(terms, pad(opaque, value != 0))


# ---- several tensors


def _concatenated(flow: Flow, operation: Operation) -> Form | None:
    tensors = [each for each in operation.arguments[0] if each.numel()]
    rest = operation.arguments[1:]
    forms = [flow.form(each, parameters=True) for each in tensors]
    shapes = [each.shape for each in tensors]
    return _together(forms, shapes, lambda parts: operation.call(parts, *rest, **operation.options))


def _chosen(flow: Flow, operation: Operation) -> Form | None:
    if len(operation.arguments) < 3:
        return stopped(flow, operation)
    where, *given = operation.arguments
    shape = operation.outputs[0].shape
    forms = [_form_or_zero(flow, each) for each in given]
    for form, other in zip(forms, given[::-1], strict=True):
        if (kept := scores(form)) is not None and is_low(other):
            return kept.expanded(shape)
    forms = [None if form is None else form.expanded(shape) for form in forms]
    return _together(forms, [shape] * 2, lambda parts: torch.where(where.cpu(), parts[0], parts[1]))


def _form_or_zero(flow: Flow, value: Any) -> Form | None:
    one = not isinstance(value, Tensor) or (value.numel() == 1 and not flow.owner(value))
    return Form(()) if one and value == 0 else flow.form(value, parameters=True)


def _masked(flow: Flow, operation: Operation) -> Form | None:
    given, mask, value = operation.arguments
    shape = operation.outputs[0].shape
    form = flow.form(given, parameters=True)
    if (kept := scores(form)) is not None and is_low(value):
        flow.end(form, operation.name)
        return kept.expanded(shape)
    forms = [_form_or_zero(flow, value), form]
    forms = [None if each is None else each.expanded(shape) for each in forms]
    return _together(forms, [shape] * 2, lambda parts: torch.where(mask.cpu(), parts[0], parts[1]))


def _together(
    forms: Sequence[Form | None], shapes: Sequence[Sequence[int]], put: Callable[[list[Tensor]], Tensor]
) -> Form | None:
    """Return the form of what `put` makes of several tensors, some of which may have a form."""
    if all(form is None for form in forms):
        return None
    terms = []
    for parts in _aligned(forms, shapes):
        factors = any(part.coef is not None for part in parts)
        terms.append(
            replace(
                parts[0],
                unit=put([part.unit for part in parts]),
                path=put([part.path for part in parts]),
                coef=put([part.factors for part in parts]) if factors else None,
            )
        )
    opaque = [
        torch.full((), form is None).expand(tuple(shape)) if form is None or form.opaque is None else form.opaque
        for form, shape in zip(forms, shapes, strict=True)
    ]
    return Form(tuple(terms), put(opaque))


def _aligned(forms: Sequence[Form | None], shapes: Sequence[Sequence[int]]) -> list[list[Term]]:
    """Return the terms of several tensors, as many of each: a term that one lacks is nowhere in it."""
    slots: list[dict[int, Term]] = []
    for index, form in enumerate(forms):
        for term in form.terms if form is not None else ():
            free = (slot for slot in slots if index not in slot and next(iter(slot.values())).is_like(term))
            slot = next(free, None)
            if slot is None:
                slots.append({index: term})
            else:
                slot[index] = term
    result = []
    for slot in slots:
        example = next(iter(slot.values()))
        nowhere = [torch.full((), -1).expand(tuple(shape)) for shape in shapes]
        result.append(
            [
                slot.get(index, replace(example, unit=none, path=torch.zeros_like(none), coef=None))
                for index, none in enumerate(nowhere)
            ]
        )
    return result


MOVES: dict[str, Rule] = {
    **dict.fromkeys(("index", "index_select", "gather", "repeat", "roll", "flip"), _moved),
    **dict.fromkeys(("clone", "_to_copy", "_unsafe_view", "reshape", "view"), _copied),
    **dict.fromkeys(("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d"), _resized),
    **dict.fromkeys(("cat", "stack"), _concatenated),
    **dict.fromkeys(("masked_fill", "masked_fill_"), _masked),
    "where": _chosen,
    "copy_": _written,
    "constant_pad_nd": _padded,
}
"""What takes numbers of parameters along without using them."""

FILLS: dict[str, Rule] = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "full", "full_like", "new_full"), _filled),
    **dict.fromkeys(("fill", "fill_", "zero_"), _filled),
    **dict.fromkeys(("empty", "empty_like", "new_empty", "ones_like", "new_ones"), _shaped),
}
