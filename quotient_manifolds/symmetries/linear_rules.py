"""Say for the operations of ATen how linear forms pass through them; all others stand in the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds.symmetries.linear_flow import Flow, Rule, added, is_constant_along, scores, tokens_mixed
from quotient_manifolds.symmetries.linear_forms import Form, Term, memory
from quotient_manifolds.symmetries.products import PRODUCTS
from quotient_manifolds.symmetries.trace import Operation

LOW = -1e4  # what is put in the place of scores that softmax is to ignore

# ---- what moves numbers to a new place in memory


def _moved(flow: Flow, operation: Operation) -> None:
    tensor, *rest = operation.arguments
    form = flow.form(tensor, parameters=True)
    others = [each for each in operation.inputs if each is not tensor]
    if form is None or any(flow.form(each) is not None for each in others):
        return _stops(flow, operation)
    flow.ledger.write(
        operation.outputs[0], form.changed(lambda numbers: operation.call(numbers, *rest, **operation.options))
    )


def _copied(flow: Flow, operation: Operation) -> None:
    out = operation.outputs[0]
    form = flow.form(operation.arguments[0], parameters=True)
    if not out.is_floating_point() and not out.is_complex():
        return _stops(flow, operation)
    if form is not None and out.is_complex() != operation.inputs[0].is_complex():
        return _stops(flow, operation)
    flow.ledger.write(out, None if form is None else form.changed(lambda numbers: _as(numbers, out)))


def _resized(flow: Flow, operation: Operation) -> None:
    """Pass what is interpolated to the size that it has."""
    given, out = operation.inputs[0], operation.outputs[0]
    same = given.shape == out.shape and torch.equal(given, out)
    return _copied(flow, operation) if same else _stops(flow, operation)


def _as(numbers: Tensor, out: Tensor) -> Tensor:
    return numbers if numbers.ndim > out.ndim else numbers.reshape(out.shape)


def _written(flow: Flow, operation: Operation) -> None:
    target, given = operation.arguments[:2]
    form = flow.form(given, parameters=True)
    flow.ledger.write(target, None if form is None else form.expanded(target.shape))


def _filled(flow: Flow, operation: Operation) -> None:
    value = operation.arguments[1] if operation.name in ("full", "full_like", "fill_", "fill", "new_full") else 0
    value = operation.arguments[2] if operation.name == "new_full" else value
    zero = not isinstance(value, Tensor) and value == 0
    flow.ledger.write(operation.outputs[0], Form(()) if zero else None)


def _padded(flow: Flow, operation: Operation) -> None:
    tensor, pads, *rest = operation.arguments
    form = flow.form(tensor, parameters=True)
    value = rest[0] if rest else operation.options.get("value", 0)

    def pad(numbers: Tensor, by: float) -> Tensor:
        return torch.ops.aten.constant_pad_nd(numbers, pads, by)

    if form is None:
        return flow.ledger.write(operation.outputs[0], None)
    terms = tuple(
        replace(
            term,
            unit=pad(term.unit, -1),
            path=pad(term.path, 0),
            coef=None if term.coef is None else pad(term.coef, 0),
        )
        for term in form.terms
    )
    opaque = torch.zeros(tensor.shape, dtype=torch.bool) if form.opaque is None else form.opaque
    flow.ledger.write(operation.outputs[0], Form(terms, pad(opaque, value != 0)))


def aligned(forms: Sequence[Form | None], shapes: Sequence[Sequence[int]]) -> list[list[Term]]:
    """Return the terms of several tensors, as many of each: a term that one lacks is nowhere in it."""
    slots: list[list[Term | None]] = []
    for index, form in enumerate(forms):
        free = [slot for slot in slots]
        for term in form.terms if form is not None else ():
            found = next((slot for slot in free if any(each is not None and each.is_like(term) for each in slot)), None)
            if found is None:
                found = [None] * len(forms)
                slots.append(found)
            else:
                free = [slot for slot in free if slot is not found]
            found[index] = term
    result = []
    for slot in slots:
        example = next(term for term in slot if term is not None)
        nowhere = [torch.full((), -1).expand(tuple(shape)) for shape in shapes]
        filled = [
            replace(example, unit=none, path=torch.zeros_like(none), coef=None) if term is None else term
            for term, none in zip(slot, nowhere, strict=True)
        ]
        if any(term.coef is not None for term in filled):
            filled = [replace(term, coef=term.factors) for term in filled]
        result.append(filled)
    return result


def _together(
    flow: Flow, out: Tensor, forms: Sequence[Form | None], shapes: Sequence[Sequence[int]], put: Callable[..., Tensor]
) -> None:
    """Write what `put` makes of several tensors, some of which have a form."""
    if all(form is None for form in forms):
        return flow.ledger.write(out, None)
    terms = []
    for slot in aligned(forms, shapes):
        coef = None if slot[0].coef is None else put([term.coef for term in slot])
        terms.append(
            replace(slot[0], unit=put([term.unit for term in slot]), path=put([term.path for term in slot]), coef=coef)
        )
    opaque = [
        torch.full((), form is None).expand(tuple(shape)) if form is None or form.opaque is None else form.opaque
        for form, shape in zip(forms, shapes, strict=True)
    ]
    flow.ledger.write(out, Form(tuple(terms), put(opaque)))


def _concatenated(flow: Flow, operation: Operation) -> None:
    tensors, *rest = operation.arguments
    tensors = [each for each in tensors if each.numel()]
    forms = [flow.form(each, parameters=True) for each in tensors]
    shapes = [each.shape for each in tensors]
    _together(
        flow,
        operation.outputs[0],
        forms,
        shapes,
        lambda parts: operation.call([part.contiguous() for part in parts], *rest, **operation.options),
    )


def _chosen(flow: Flow, operation: Operation) -> None:
    if len(operation.arguments) < 3:
        return _stops(flow, operation)
    where, *given = operation.arguments
    out = operation.outputs[0]
    forms = [flow.form(each, parameters=True) for each in given]
    for index, each in enumerate(given):
        if forms[index] is None and _is_low(each) and scores(forms[1 - index]):
            return flow.ledger.write(out, scores(forms[1 - index]).expanded(out.shape))  # type: ignore[union-attr]
        if forms[index] is None and not isinstance(each, Tensor) and each == 0:
            forms[index] = Form(())
        elif forms[index] is None and isinstance(each, Tensor) and each.numel() == 1 and not bool(each.any()):
            forms[index] = Form(())
    forms = [None if form is None else form.expanded(out.shape) for form in forms]
    if any(form is not None and form.terms for form in forms):
        _together(flow, out, forms, [out.shape] * 2, lambda parts: torch.where(where, parts[0], parts[1]))
    else:
        flow.ledger.write(out, None)


def _is_low(value: Any) -> bool:
    return bool((torch.as_tensor(value) <= LOW).all())


def _masked(flow: Flow, operation: Operation) -> None:
    tensor, mask, value = operation.arguments
    form = flow.form(tensor, parameters=True)
    out = operation.outputs[0]
    if form is not None and _is_low(value) and scores(form):
        flow.end(replace(form, terms=tuple(term for term in form.terms if term.source >= 0)), operation.name)
        return flow.ledger.write(out, scores(form))
    filled = Form(()) if bool((torch.as_tensor(value) == 0).all()) else None
    forms = [filled, form]
    forms = [None if each is None else each.expanded(out.shape) for each in forms]
    _together(flow, out, forms, [out.shape] * 2, lambda parts: torch.where(mask, parts[0], parts[1]))


# ---- sums and factors


def _added(flow: Flow, operation: Operation) -> None:
    left, right = operation.arguments[:2]
    out = operation.outputs[0]
    factor = operation.options.get("alpha", 1) * (-1 if operation.name in ("sub", "sub_") else 1)
    factors = (-1, 1) if operation.name == "rsub" else (1, factor)
    forms = [flow.form(each, parameters=True) for each in (left, right)]
    if any(isinstance(each, Tensor) and each.is_complex() for each in (left, right)):
        return _stops(flow, operation)
    if flow.is_of_parameters(forms[0]) and flow.is_of_parameters(forms[1]):
        return _stops(flow, operation)
    flow.ledger.write(out, added(flow, operation, forms, factors, out.shape))


def _is_plain(value: object, flow: Flow) -> bool:
    """Return whether it is one number, and not the model's."""
    return not isinstance(value, Tensor) or (value.numel() == 1 and not flow.owner(value))


def _multiplied(flow: Flow, operation: Operation) -> None:
    left, right = operation.arguments[:2]
    out = operation.outputs[0]
    if out.is_complex():
        return _turned(flow, operation)
    forms = [
        flow.form(each, parameters=_is_plain(other, flow)) for each, other in ((left, right), (right, left))
    ]
    for index in (0, 1):
        if flow.is_of_parameters(forms[index]) and not _is_plain((right, left)[index], flow):
            flow.end(forms[index], operation.name)  # gains and the like
            forms[index] = None
    if isinstance(left, Tensor) and isinstance(right, Tensor) and _same(left, right):
        return _stops(flow, replace(operation, name="pow"))
    choice = 0 if forms[0] is not None else 1
    if forms[0] is not None and forms[1] is not None:
        lives = [flow.lives(form) for form in forms]
        positive = [any(term.positive for term in form.terms) for form in forms if form is not None]
        choice = 1 if lives[1] and (not lives[0] or (positive[0] and not positive[1])) else 0
        flow.end(forms[1 - choice], operation.name)
    form, other = forms[choice], (right, left)[choice]
    if form is None:
        return flow.ledger.write(out, None)
    if isinstance(other, Tensor) and (other.is_complex() or not other.dtype.is_floating_point):
        other = other.double() if not other.is_complex() else other
    factor = other.detach().cpu() if isinstance(other, Tensor) else float(other)
    form = form.expanded(out.shape)
    flow.ledger.write(out, replace(form, terms=tuple(term.times(factor) for term in form.terms)))


def _same(left: Tensor, right: Tensor) -> bool:
    return memory(left) == memory(right) and left.storage_offset() == right.storage_offset() and (
        left.shape == right.shape and left.stride() == right.stride()
    )


def _turned(flow: Flow, operation: Operation) -> None:
    """Write the form of a product with complex numbers, which is one of pairs of real ones."""
    left, right = operation.arguments[:2]
    if not isinstance(left, Tensor) or flow.form(left) is None:
        left, right = right, left
    form = flow.form(left)
    out = operation.outputs[0]
    if form is None or not left.is_complex() or flow.form(right) is not None:
        return _stops(flow, operation)
    by = torch.as_tensor(right).to(torch.complex128)
    shape = (*out.shape, 2)
    form = form.changed(lambda numbers: numbers.expand(shape))
    real = by.real.expand(out.shape)[..., None].expand(shape)
    turned = torch.stack([-by.imag, by.imag], -1).expand(shape)
    swapped = form.changed(lambda numbers: numbers.flip(-1))
    terms = [term.times(real) for term in form.terms] + [term.times(turned) for term in swapped.terms]
    flow.ledger.write(out, Form(tuple(terms), form.opaque))


def _divided(flow: Flow, operation: Operation) -> None:
    left, right = operation.arguments[:2]
    form = flow.form(left, parameters=_is_plain(right, flow))
    flow.end(flow.form(right), operation.name)
    if operation.options.get("rounding_mode") is not None or operation.outputs[0].is_complex():
        return _stops(flow, operation)
    if form is None:
        return flow.ledger.write(operation.outputs[0], None)
    form = form.expanded(operation.outputs[0].shape)
    by = 1 / right.double().cpu() if isinstance(right, Tensor) else 1 / right
    flow.ledger.write(operation.outputs[0], replace(form, terms=tuple(term.times(by) for term in form.terms)))


def _negated(flow: Flow, operation: Operation) -> None:
    form = flow.form(operation.arguments[0])
    terms = tuple(term.times(-1.0) for term in form.terms) if form is not None else ()
    flow.ledger.write(operation.outputs[0], None if form is None else replace(form, terms=terms))


def _homogeneous(flow: Flow, operation: Operation) -> None:
    """Pass a positive factor, as relu(a y) = a relu(y) does for a > 0."""
    form = flow.form(operation.arguments[0])
    if form is None or len(operation.inputs) > 1 + (operation.name == "_prelu_kernel"):
        return _stops(flow, operation)
    if operation.name.startswith("threshold") and tuple(operation.arguments[1:]) != (0, 0):
        return _stops(flow, operation)
    terms = tuple(replace(term, positive=True) for term in form.terms)
    flow.ledger.write(operation.outputs[0], replace(form, terms=terms))


def _averaged(flow: Flow, operation: Operation) -> None:
    form = flow.form(operation.arguments[0])
    if form is None or form.opaque is not None or len(operation.arguments) < 2 or operation.arguments[1] is None:
        return _stops(flow, operation)
    tensor, axes, *_ = operation.arguments
    axes = [axes] if isinstance(axes, int) else list(axes)
    out = operation.outputs[0]
    terms = []
    for term in form.terms:
        for axis in sorted((axis % tensor.ndim for axis in axes), reverse=True):
            if not is_constant_along(term, axis):
                return _stops(flow, operation)
            factors = term.factors.mean(axis) if operation.name == "mean" else term.factors.sum(axis)
            path = tokens_mixed(term.path, axis, flow.index)
            term = replace(term, unit=term.unit.amax(axis), path=path, coef=factors)
        terms.append(term.changed(lambda numbers: numbers.reshape(out.shape)))
    flow.ledger.write(out, Form(tuple(terms)))


def _softmaxed(flow: Flow, operation: Operation) -> None:
    tensor, axis = operation.arguments[:2]
    form = flow.form(tensor)
    for term in form.terms if form is not None else ():
        if term.source >= 0:
            continue
        product = flow.products[-1 - term.source]
        over_keys = not is_constant_along(term, axis % tensor.ndim)
        product.softmax = product.softmax or ("right" if over_keys else "left")
        keys = term.unit.movedim(axis, -1).sort(-1).values
        same = term.coef is None or _is_same_where_seen(term.coef, tensor, axis)
        whole = torch.equal(keys, torch.arange(keys.shape[-1]).expand(keys.shape)) and form is not None
        product.free &= over_keys and same and whole
    flow.end(form, operation.name)
    _ignored(flow, operation)


def _is_same_where_seen(coef: Tensor, scores: Tensor, axis: int) -> bool:
    """Return whether scores have one factor along an axis, but where softmax ignores them: a factor of 0 masks."""
    seen = (coef != 0) | (scores > LOW / 2)
    return bool(((coef == coef.amax(axis, keepdim=True)) | ~seen).all())


def _stops(flow: Flow, operation: Operation) -> None:
    """Note that the operation stands in the way of what it reads; what has the same shape is followed all the same."""
    used = [flow.form(each) for each in operation.inputs]
    for form in used:
        flow.end(form, operation.name)
    for out in operation.outputs:
        followed = next(
            (
                form
                for form, each in zip(used, operation.inputs, strict=True)
                if form is not None and each.shape == out.shape and each.is_complex() == out.is_complex()
            ),
            None,
        )
        if followed is not None:
            real = tuple(term for term in followed.terms if term.source >= 0)
            followed = Form(real, followed.opaque) if real and out.is_floating_point() else None
        flow.ledger.write(out, followed)


_SHAPED_ONLY = ("zeros_like", "empty_like", "new_empty", "new_ones", "ones_like", "empty", "new_empty_strided")
_ZEROS = ("zeros", "zeros_like", "new_zeros", "full", "full_like", "new_full", "fill_", "fill", "zero_")


def _ignored(flow: Flow, operation: Operation) -> None:
    for out in operation.outputs:
        flow.ledger.write(out, None)


RULES: dict[str, Rule] = {
    **dict.fromkeys(_SHAPED_ONLY, _ignored),
    **dict.fromkeys(_ZEROS, _filled),
    **dict.fromkeys(("index", "index_select", "gather", "repeat", "roll", "flip"), _moved),
    **dict.fromkeys(("clone", "_to_copy", "_unsafe_view", "reshape", "view"), _copied),
    **dict.fromkeys(("cat", "stack"), _concatenated),
    **dict.fromkeys(("add", "add_", "sub", "sub_", "rsub"), _added),
    **dict.fromkeys(("mul", "mul_"), _multiplied),
    **dict.fromkeys(("div", "div_"), _divided),
    **dict.fromkeys(("neg", "neg_"), _negated),
    **dict.fromkeys(("masked_fill", "masked_fill_"), _masked),
    **dict.fromkeys(("mean", "sum"), _averaged),
    **dict.fromkeys(("_softmax", "_safe_softmax"), _softmaxed),
    **dict.fromkeys(
        ("relu", "relu_", "leaky_relu", "leaky_relu_", "threshold", "threshold_", "abs", "_prelu_kernel"), _homogeneous
    ),
    **dict.fromkeys(("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d"), _resized),
    "copy_": _written,
    "constant_pad_nd": _padded,
    "where": _chosen,
    **PRODUCTS,
}


def follow(flow: Flow) -> None:
    """Go through all operations, and end the forms that the model answers with."""
    operations = flow.trace.operations
    last = {memory(tensor): index for index, each in enumerate(operations) for tensor in each.inputs + [*each.outputs]}
    for output in flow.trace.outputs:
        last[memory(output)] = len(operations)
    gone: dict[int, list[int]] = {}
    for address, index in last.items():
        gone.setdefault(index, []).append(address)
    for flow.index, operation in enumerate(operations):
        if not _only_views(operation):
            rule = RULES.get(operation.name, _stops)
            if rule not in (_moved, _copied, _resized, _concatenated, _chosen, _written, _padded):
                for tensor in operation.inputs:
                    if name := flow.owner(tensor):
                        flow.uses.setdefault(name, []).append((flow.index, tensor))
            rule(flow, operation)
        for address in gone.get(flow.index, ()):
            flow.ledger.forget(address)
    flow.index = len(operations)
    for output in flow.trace.outputs:
        flow.end(flow.form(output, parameters=True), "output")


def _only_views(operation: Operation) -> bool:
    """Return whether all that it gives lies in the memory of what it takes, unchanged."""
    if operation.call._schema.is_mutable or not operation.outputs:
        return False
    taken = {memory(tensor) for tensor in operation.inputs if tensor.numel()}
    return all(memory(output) in taken for output in operation.outputs if output.numel())
