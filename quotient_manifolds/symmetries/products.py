"""Follow linear forms through products: with matrices of parameters, with attention weights, and with each other."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from quotient_manifolds.symmetries.linear_flow import (
    Flow,
    Product,
    Rule,
    Side,
    added,
    is_constant_along,
    positions,
    side_of,
    stopped,
    tokens_mixed,
    without_repeats,
)
from quotient_manifolds.symmetries.linear_forms import Form, Term
from quotient_manifolds.symmetries.matrices import Elements, Matrices, matrices_of, units_of
from quotient_manifolds.symmetries.operations import Operation

EXACT = 1e-6
MOST_GROUPS = 64


def multiply(flow: Flow, operation: Operation, left: Matrices, right: Matrices) -> Form | None:
    """Return the form (b, i, j) of sum over k of left (b, i, k) right (b, j, k), and note what meets in it."""
    shape = (left.numbers.shape[0], left.numbers.shape[1], right.numbers.shape[1])
    if left.is_carried and not (right.is_carried and flow.lives(right.form)):
        if right.form is not None:
            flow.end(right.form, operation.name)
        found = _mixed(flow, left, right.numbers, right.numbers.shape[1])
        return found.changed(lambda each: each.mT) if found is not None else None
    if right.is_carried:
        if left.form is not None:
            flow.end(left.form, operation.name)
        return _mixed(flow, right, left.numbers, left.numbers.shape[1])
    sides = [_side(flow, each) for each in _apart(left, right)]
    met = None not in sides
    if met:
        one, other = without_repeats([side for side in sides if side is not None])
        flow.products.append(Product(flow.index, one, other))
    else:
        for each in (left, right):
            flow.end(each.form, operation.name)
    answers = [
        _answer(flow, each, other, shape, turned)
        for each, other, turned in ((right, left, False), (left, right, True))
        if each.name and not (other.name and turned)
    ]
    if met and not left.name and not right.name:
        keys = torch.arange(shape[2]).expand(shape)
        return Form((Term(-len(flow.products), keys, torch.zeros((), dtype=torch.long).expand(shape)),))
    return answers[0] if answers else None


def _apart(left: Matrices, right: Matrices) -> tuple[Matrices, Matrices]:
    """Return the matrices with rows that have other units, as several heads in one matrix have, in products apart."""
    groups = _groups(left)
    if groups is not None:
        return _picked(left, groups), _repeated(right, len(groups))
    groups = _groups(right)
    return (left, right) if groups is None else (_repeated(left, len(groups)), _picked(right, groups))


def _groups(given: Matrices) -> Tensor | None:
    """Return which rows have the same units (groups, rows); None if all have, or if groups differ in size."""
    if given.form is None or all(is_constant_along(term, 1) for term in given.form.terms):
        return None
    units = torch.cat([term.unit for term in given.form.terms], 2)
    distinct, group = torch.unique(units[0], dim=0, return_inverse=True)
    sizes = torch.bincount(group)
    if bool((sizes != sizes[0]).any()) or len(distinct) > MOST_GROUPS:
        return None
    rows = group.argsort(stable=True).view(len(distinct), -1)
    return rows if bool((units[:, rows] == units[:, rows[:, :1]]).all()) else None


def _picked(given: Matrices, groups: Tensor) -> Matrices:
    def pick(numbers: Tensor) -> Tensor:
        return numbers[:, groups].flatten(0, 1)

    form = None if given.form is None else given.form.changed(pick)
    return replace(given, numbers=pick(given.numbers), form=form)


def _repeated(given: Matrices, times: int) -> Matrices:
    def repeat(numbers: Tensor) -> Tensor:
        return numbers.repeat_interleave(times, 0)

    form = None if given.form is None else given.form.changed(repeat)
    across = None
    if given.across is not None:
        every = None if given.across.every is None else repeat(given.across.every)
        across = replace(given.across, first=repeat(given.across.first), every=every)
    return replace(given, numbers=repeat(given.numbers), form=form, across=across)


def _side(flow: Flow, given: Matrices) -> Side | None:
    if given.form is not None:
        return side_of(given.form)
    if given.across is None:
        return None
    found = units_of(flow, given.name, given.across, reads=True)
    if found is None:
        return None
    number, units = found
    shape = (units.shape[0], 1, 1, units.shape[1])
    return Side(
        (number,),
        units[:, None],
        torch.ones(shape, dtype=torch.float64),
        torch.zeros(shape, dtype=torch.long),
        torch.ones(units[:, None].shape, dtype=torch.bool),
        (False,),
        (False,),
        parameter=True,
    )


def _answer(flow: Flow, given: Matrices, read: Matrices, shape: tuple[int, ...], turned: bool) -> Form | None:
    """Return what a matrix of parameters answers with, as units of its own."""
    if given.elements is None:
        return None
    found = units_of(flow, given.name, given.elements)
    if found is None:
        return None
    number, units = found
    numbers = read.numbers
    flow.sources[number].inputs.add((numbers.data_ptr(), numbers.shape[-1]))
    b, i, j = shape
    units = (units[:, :, None] if turned else units[:, None, :]).expand(shape)
    token = torch.arange(b)[:, None, None] * (j if turned else i)
    token = token + (torch.arange(j)[None, None, :] if turned else torch.arange(i)[None, :, None])
    return Form((Term(number, units, token.expand(shape)),))


def _mixed(flow: Flow, carried: Matrices, weights: Tensor | None, tokens: int) -> Form | None:
    """Return the form (b, i, u) of sum over k of weights (b, i, k) carried (b, u, k); no weights: they add up to 1."""
    terms = []
    for term in carried.form.terms if carried.form is not None else ():
        if term.source < 0:
            continue
        if not is_constant_along(term, -1):
            return None
        unit = term.unit.amax(-1)[:, None, :]
        path = tokens_mixed(term.path, -1, flow.index)[:, None, :]
        places = torch.arange(unit.shape[0] * tokens).view(-1, tokens, 1) * 1_000_003
        shape = (unit.shape[0], tokens, unit.shape[2])
        terms.append(
            replace(
                term,
                unit=unit.expand(shape),
                path=(path + places).expand(shape),
                coef=_sums(weights, term),
                mixed=True,
            )
        )
    return Form(tuple(terms)) if terms else None


def _sums(weights: Tensor | None, term: Term) -> Tensor | None:
    """Return sum over k of weights (b, i, k) times the term's factors (b, u, k); None if all are 1."""
    if weights is None:
        return None
    plain = term.coef is None and bool((term.unit >= 0).all())
    factors = torch.ones(len(weights), 1, weights.shape[2], dtype=torch.float64) if plain else term.factors
    sums = weights.double().cpu() @ factors.mT
    if bool(((sums - 1).abs() <= EXACT).all()):
        return None
    return sums.expand(len(weights), weights.shape[1], term.unit.shape[1])


# ---- operations


def _product(flow: Flow, operation: Operation) -> Form | None:
    left, right = operation.arguments[-2:]
    form = multiply(flow, operation, matrices_of(flow, left), matrices_of(flow, right, transposed=True))
    return _flat(form, operation.outputs[0])


def _flat(form: Form | None, out: Tensor) -> Form | None:
    return None if form is None else form.changed(lambda numbers: numbers.reshape(out.shape))


def _sum_and_product(flow: Flow, operation: Operation) -> Form | None:
    form = _product(flow, operation)
    factors = (operation.options.get("beta", 1), operation.options.get("alpha", 1))
    if factors[0] == 0:
        return form
    given = flow.form(operation.arguments[0], parameters=True)
    return added(flow, operation, [given, form], factors, operation.outputs[0].shape)


def _attention(flow: Flow, operation: Operation) -> Form | None:
    """Return the form of softmax attention in one operation."""
    query, keys, values = (_heads(flow, each, operation.arguments[0]) for each in operation.arguments[:3])
    count = len(flow.products)
    multiply(flow, operation, query, keys)
    for product in flow.products[count:]:
        product.softmax, product.single = "right", keys.numbers.shape[1] == 1
    if values.form is None:
        return None
    form = values.form.changed(lambda numbers: numbers.mT)
    whole = all(term.coef is None and bool((term.unit >= 0).all()) for term in form.terms)
    weights = None if whole else _weights(operation, query.numbers, keys.numbers, values.numbers)
    found = None
    if whole or weights is not None:
        found = _mixed(flow, replace(values, form=form), weights, query.numbers.shape[1])
    if found is None:
        flow.end(form, operation.name)
    return _flat(found, operation.outputs[0])


def _weights(operation: Operation, query: Tensor, keys: Tensor, values: Tensor) -> Tensor | None:
    """Return the attention weights (b heads, i, j) of softmax attention in one operation; None if they do not fit."""
    *_, tokens, h = query.shape
    scale = operation.options.get("scale")
    scores = query @ keys.mT * (h**-0.5 if scale is None else scale)
    masks = [each for each in operation.inputs[3:] if each.is_floating_point()]
    shape = (*operation.arguments[0].shape[:-1], keys.shape[1])
    for mask in masks:
        scores = scores + mask.expand(shape).reshape(scores.shape)
    causal = torch.ones(tokens, keys.shape[1], dtype=torch.bool, device=query.device).triu(1)
    for kept in (scores, scores.masked_fill(causal, -torch.inf)):
        weights = kept.softmax(-1)
        out = operation.outputs[0]
        if torch.allclose((weights @ values).reshape(out.shape), out, rtol=1e-4, atol=1e-6):
            return weights
    return None


def _heads(flow: Flow, tensor: Tensor, query: Tensor) -> Matrices:
    """Return (b heads, tokens, h), as many heads as the queries have."""
    shape = (math.prod(query.shape[:-2]), *tensor.shape[-2:])
    group = query.shape[1] // tensor.shape[1] if tensor.ndim == 4 else 1

    def flat(numbers: Tensor) -> Tensor:
        numbers = numbers.repeat_interleave(group, 1) if group > 1 else numbers
        return numbers.expand((*query.shape[:-2], *numbers.shape[-2:])).reshape(shape)

    form = flow.form(tensor, parameters=True)
    if form is None or not form.terms:
        return Matrices(flat(tensor), None)
    if form.opaque is not None:
        flow.end(form, "cat")
        return Matrices(flat(tensor), None)
    return Matrices(flat(tensor), form.changed(flat))


def _looked_up(flow: Flow, operation: Operation) -> Form | None:
    """Return the form of rows of a table: what a linear map makes of words."""
    table, words = operation.arguments[:2]
    name = flow.owner(table)
    if not name:
        form = flow.form(table)
        return None if form is None else form.changed(lambda each: each[words.cpu()])
    found = units_of(flow, name, Elements.of(table.mT[None]))
    if found is None:
        return None
    number, units = found
    shape = operation.outputs[0].shape
    flow.sources[number].inputs.add((words.data_ptr(), words.shape[-1]))
    token = torch.arange(words.numel()).view(*words.shape, 1)
    return Form((Term(number, units[0].expand(shape), token.expand(shape)),))


def _convolved(flow: Flow, operation: Operation) -> Form | None:
    """Return the form of a convolution: a linear map of channels, in groups, wherever it is applied."""
    _, weight, bias = operation.arguments[:3]
    transposed, groups = operation.arguments[6], operation.arguments[8]
    out, name = operation.outputs[0], flow.owner(weight)
    if not name or transposed:
        return stopped(flow, operation)
    elements = positions(weight).view(groups, weight.shape[0] // groups, weight.shape[1], -1)
    _channels_met(flow, operation, elements)
    found = units_of(flow, name, Elements.listed(elements.flatten(0, 1).flatten(1)[None]))
    if found is None:
        return None
    number, units = found
    given = operation.arguments[0]
    flow.sources[number].inputs.add((given.data_ptr(), given.shape[-1]))
    along = (1, -1, *[1] * (out.ndim - 2))
    token = torch.arange(out[:, :1].numel()).view(out[:, :1].shape)
    group = torch.arange(out.shape[1]).view(along) * groups // out.shape[1]  # each reads channels of its own
    token = token + group * out.numel()
    form = Form((Term(number, units[0].view(along).expand(out.shape), token.expand(out.shape)),))
    if bias is None:
        return form
    shift = flow.form(bias, parameters=True)
    shift = None if shift is None else shift.changed(lambda numbers: numbers.view(along))
    return added(flow, operation, [form, shift], (1, 1), out.shape)


def _channels_met(flow: Flow, operation: Operation, elements: Tensor) -> None:
    """Note which channels meet which numbers (groups, out, in, kernel) of the kernel."""
    given, name = operation.arguments[0], flow.owner(operation.arguments[1])
    form = flow.form(given)
    groups, _, width, _ = elements.shape
    if form is None:
        return

    def by_groups(numbers: Tensor) -> Tensor:
        batch = 1 if given.ndim < operation.arguments[1].ndim else given.shape[0]
        return numbers.reshape(batch, groups, width, -1).permute(1, 0, 3, 2).flatten(1, 2)

    numbers = by_groups(given)
    read = None if form.opaque is not None else _side(flow, Matrices(numbers, form.changed(by_groups)))
    across = Elements.listed(elements.permute(0, 2, 1, 3).flatten(2))
    kernel = _side(flow, Matrices(numbers, None, name, across=across))
    if read is None or kernel is None:
        flow.end(form, operation.name)
        return
    one, other = without_repeats([read, kernel])
    flow.products.append(Product(flow.index, one, other))


PRODUCTS: dict[str, Rule] = {
    "mm": _product,
    "bmm": _product,
    "addmm": _sum_and_product,
    "baddbmm": _sum_and_product,
    "convolution": _convolved,
    "embedding": _looked_up,
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
        ),
        _attention,
    ),
}
