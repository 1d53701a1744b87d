"""Pass linear forms through sums, factors, averages and softmax; operations without a rule stand in the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds.symmetries.linear_flow import (
    Flow,
    Rule,
    added,
    is_constant_along,
    stopped,
    tokens_mixed,
)
from quotient_manifolds.symmetries.linear_forms import Form, memory
from quotient_manifolds.symmetries.linear_moves import FILLS, LOW, MOVES
from quotient_manifolds.symmetries.operations import Operation
from quotient_manifolds.symmetries.products import PRODUCTS
from quotient_manifolds.symmetries.trace import Trace


def _added(flow: Flow, operation: Operation) -> Form | None:
    given = operation.arguments[:2]
    factor = operation.options.get("alpha", 1)
    factors = {"sub": (1, -factor), "sub_": (1, -factor), "rsub": (-factor, 1)}.get(operation.name, (1, factor))
    forms = [flow.form(each, parameters=True) for each in given]
    if operation.outputs[0].is_complex() or all(flow.is_of_parameters(form) for form in forms):
        return stopped(flow, operation)
    return added(flow, operation, forms, factors, operation.outputs[0].shape)


def _multiplied(flow: Flow, operation: Operation) -> Form | None:
    left, right = operation.arguments[:2]
    if operation.outputs[0].is_complex():
        return _turned(flow, operation)
    if isinstance(right, Tensor) and _is_same(left, right):
        return stopped(flow, replace(operation, name="pow"))
    forms = [_factor_form(flow, left, right), _factor_form(flow, right, left)]
    chosen = 0 if forms[1] is None else 1
    if forms[0] is not None and forms[1] is not None:
        lives = [flow.lives(form) for form in forms]
        positive = [any(term.positive for term in form.terms) for form in forms if form is not None]
        chosen = 1 if lives[1] and (not lives[0] or (positive[0] and not positive[1])) else 0
        flow.end(forms[1 - chosen], operation.name)
    return _times(forms[chosen], (right, left)[chosen], operation.outputs[0].shape)


def _factor_form(flow: Flow, value: Any, other: Any) -> Form | None:
    """Return the form of one side of a product; none for parameters that scale something else, as gains do."""
    number = not isinstance(other, Tensor) or (other.numel() == 1 and not flow.owner(other))
    form = flow.form(value, parameters=number)
    if number or not flow.is_of_parameters(form):
        return form
    flow.end(form, "mul")
    return None


def _times(form: Form | None, factor: Any, shape: tuple[int, ...]) -> Form | None:
    if form is None:
        return None
    by = factor.detach().double().cpu() if isinstance(factor, Tensor) else float(factor)
    form = form.expanded(shape)
    return replace(form, terms=tuple(term.times(by) for term in form.terms))


def _is_same(left: Tensor, right: Tensor) -> bool:
    places = [(memory(each), each.storage_offset(), each.shape, each.stride()) for each in (left, right)]
    return places[0] == places[1]


def _turned(flow: Flow, operation: Operation) -> Form | None:
    """Return the form of a product with complex numbers, which are pairs of real ones along a last axis."""
    left, right = operation.arguments[:2]
    if flow.form(left) is None:
        left, right = right, left
    form = flow.form(left)
    if form is None or not left.is_complex() or flow.form(right) is not None:
        return stopped(flow, operation)
    shape = (*operation.outputs[0].shape, 2)
    by = torch.as_tensor(right).cpu().to(torch.complex128).expand(shape[:-1])
    form = form.expanded(shape)
    other = form.changed(lambda numbers: numbers.flip(-1))
    terms = [term.times(by.real[..., None]) for term in form.terms]
    terms += [term.times(torch.stack([-by.imag, by.imag], -1)) for term in other.terms]
    return Form(tuple(terms), form.opaque)


def _divided(flow: Flow, operation: Operation) -> Form | None:
    left, right = operation.arguments[:2]
    flow.end(flow.form(right), operation.name)
    if operation.options.get("rounding_mode") is not None or operation.outputs[0].is_complex():
        return stopped(flow, operation)
    by = 1 / right.double() if isinstance(right, Tensor) else 1 / right
    return _times(_factor_form(flow, left, right), by, operation.outputs[0].shape)


def _negated(flow: Flow, operation: Operation) -> Form | None:
    return _times(flow.form(operation.arguments[0], parameters=True), -1.0, operation.outputs[0].shape)


def _rectified(flow: Flow, operation: Operation) -> Form | None:
    """Pass what lets positive factors through, as relu(a y) = a relu(y) for a > 0."""
    form = flow.form(operation.arguments[0])
    thresholds = operation.arguments[1:] if operation.name.startswith("threshold") else (0, 0)
    if form is None or tuple(thresholds) != (0, 0):
        return stopped(flow, operation)
    return replace(form, terms=tuple(replace(term, positive=True) for term in form.terms))


def _averaged(flow: Flow, operation: Operation) -> Form | None:
    given, *rest = operation.arguments
    form, out = flow.form(given), operation.outputs[0]
    if form is None or form.opaque is not None or not rest or rest[0] is None:
        return stopped(flow, operation)
    axes = sorted(({axis % given.ndim for axis in ([rest[0]] if isinstance(rest[0], int) else rest[0])}), reverse=True)
    terms = []
    for each in form.terms:
        term = each
        for axis in axes:
            if not is_constant_along(term, axis):
                return stopped(flow, operation)
            total = term.factors.mean(axis) if operation.name == "mean" else term.factors.sum(axis)
            path = tokens_mixed(term.path, axis, flow.index)
            term = replace(term, unit=term.unit.amax(axis), path=path, coef=total)
        terms.append(term.changed(lambda numbers: numbers.reshape(out.shape)))
    return Form(tuple(terms))


def _softmaxed(flow: Flow, operation: Operation) -> Form | None:
    """Note of which products of activations a softmax is taken, and whether it sees all their keys alike."""
    given, axis = operation.arguments[:2]
    form = flow.form(given)
    for term in form.terms if form is not None else ():
        if term.source < 0:
            product = flow.products[-1 - term.source]
            over_keys = not is_constant_along(term, axis % given.ndim)
            product.softmax = product.softmax or ("right" if over_keys else "left")
            product.single = given.shape[axis] == 1
            keys = term.unit.movedim(axis, -1).sort(-1).values
            whole = torch.equal(keys, torch.arange(keys.shape[-1]).expand(keys.shape))
            alike = term.coef is None or _is_one_where_seen(term.coef, given, axis)
            product.free &= over_keys and whole and alike
    flow.end(form, operation.name)
    return None


def _is_one_where_seen(coef: Tensor, scores: Tensor, axis: int) -> bool:
    """Return whether scores have one factor along an axis, but where softmax ignores them: a factor of 0 masks."""
    seen = (coef != 0) | (scores.cpu() > LOW / 2)
    return bool(((coef == coef.amax(axis, keepdim=True)) | ~seen).all())


MOST_NUMBERS = 10**7  # of one tensor: what is larger is not followed

_RECTIFIERS = ("relu", "relu_", "leaky_relu", "leaky_relu_", "threshold", "threshold_", "abs", "_prelu_kernel")

RULES: dict[str, Rule] = {
    **MOVES,
    **FILLS,
    **PRODUCTS,
    **dict.fromkeys(("add", "add_", "sub", "sub_", "rsub"), _added),
    **dict.fromkeys(("mul", "mul_"), _multiplied),
    **dict.fromkeys(("div", "div_"), _divided),
    **dict.fromkeys(("neg", "neg_"), _negated),
    **dict.fromkeys(_RECTIFIERS, _rectified),
    **dict.fromkeys(("mean", "sum"), _averaged),
    **dict.fromkeys(("_softmax", "_safe_softmax"), _softmaxed),
}


def follow(trace: Trace) -> Flow:
    """Go through all operations of a trace, and note what meets, and what stands in the way."""
    flow = Flow(trace)
    gone = _last_uses(trace)
    for flow.index, operation in enumerate(trace.operations):
        if not _only_views(operation):
            if operation.name not in MOVES:
                for tensor in operation.inputs:
                    flow.note_use(tensor)
            form = RULES.get(operation.name, stopped)(flow, operation)
            if form is not None and operation.outputs[0].numel() > MOST_NUMBERS:
                flow.end(form, operation.name)
                form = None
            for index, out in enumerate(operation.outputs):
                flow.ledger.write(out, form if index == 0 else None)
        for address in gone.get(flow.index, ()):
            flow.ledger.forget(address)
    flow.index = len(trace.operations)
    for output in trace.outputs:
        flow.end(flow.form(output, parameters=True), "output")
    attention = [product for product in flow.products if product.softmax]
    if attention and all(product.single for product in attention):
        raise ValueError("attention has a single key on these inputs, which tells nothing: give several tokens each.")
    return flow


def _last_uses(trace: Trace) -> dict[int, list[int]]:
    """Return which memory is not used any more after each operation."""
    last: dict[int, int] = {}
    for index, operation in enumerate(trace.operations):
        last |= {memory(tensor): index for tensor in (*operation.inputs, *operation.outputs)}
    kept = {memory(output) for output in trace.outputs}
    found: dict[int, list[int]] = {}
    for address, index in last.items():
        if address not in kept:
            found.setdefault(index, []).append(address)
    return found


def _only_views(operation: Operation) -> bool:
    """Return whether all that it gives lies in the memory of what it takes, unchanged."""
    if operation.call._schema.is_mutable or not operation.outputs:
        return False
    taken = {memory(tensor) for tensor in operation.inputs if tensor.numel()}
    return all(memory(output) in taken for output in operation.outputs if output.numel())
