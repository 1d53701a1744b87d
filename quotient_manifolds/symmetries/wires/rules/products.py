"""Rules of products, entry by entry: by numbers, by parameters (gains) and by other activations."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.wires.codes import hashed, named
from quotient_manifolds.symmetries.wires.linear_algebra import Array
from quotient_manifolds.symmetries.wires.nodes import FIXED, ZERO
from quotient_manifolds.symmetries.wires.record import Operation
from quotient_manifolds.symmetries.wires.rules.functions import pointwise
from quotient_manifolds.symmetries.wires.walk import Walk, rule


@rule("mul", "div")
def mul(walk: Walk, operation: Operation) -> None:
    a, b = operation.args[:2]
    power = -1.0 if operation.name == "div" else 1.0
    if operation.name == "div" and not isinstance(b, Tensor):
        scaled(walk, operation, a, 1 / float(b))
    elif not isinstance(b, Tensor) or not isinstance(a, Tensor):
        tensor, number = (a, b) if isinstance(a, Tensor) else (b, a)
        scaled(walk, operation, tensor, float(number)) if power > 0 else product(walk, operation, None, b, power)
    elif a is b and power > 0:
        square(walk, operation, a)
    elif walk.still(b) and id(a) in walk.labels and walk.moving(a) and not walk.still(a):
        walk.as_numbers(b, lambda: number_times(walk, operation, a, b, power))
    elif walk.still(a) and id(b) in walk.labels and walk.moving(b) and not walk.still(b) and power > 0:
        walk.as_numbers(a, lambda: number_times(walk, operation, b, a, power))
    elif power > 0 and any(id(each) in walk.entries and id(each) not in walk.labels for each in (a, b)):
        gain(walk, operation, *((a, b) if id(b) in walk.entries and id(b) not in walk.labels else (b, a)))
    elif walk.moving(a) and not walk.moving(b):
        number_times(walk, operation, a, b, power)
    elif walk.moving(b) and not walk.moving(a) and power > 0:
        number_times(walk, operation, b, a, power)
    else:
        product(walk, operation, a, b, power)


def scaled(walk: Walk, operation: Operation, tensor: Tensor, factor: float) -> None:
    """A number that is known."""
    if factor == 0:
        walk.put(operation.out, torch.zeros((), dtype=torch.long).expand(operation.out.shape))
        return
    label, names, nodes = walk.combined(walk.label(tensor))
    walk.put(operation.out, label)
    a = names[:, 0]
    walk.same(a, nodes)
    walk.follow(nodes, a, factors=[factor])
    origin = walk.about("origin")
    origin[nodes] = np.where(origin[a] < 0, a, origin[a])
    walk.about("size")[nodes] = walk.about("size")[a] * factor
    walk.passed("sum", nodes, names, factor)
    walk.keep_group(tensor, operation.out)
    walk.keep_level(operation.out, walk.level((tensor, factor)))
    if ("single", id(tensor)) in walk.notes:
        walk.notes["single", id(operation.out)] = walk.notes["single", id(tensor)]


@rule("neg")
def neg(walk: Walk, operation: Operation) -> None:
    scaled(walk, operation, operation.args[0], -1.0)


def number_times(walk: Walk, operation: Operation, tensor: Tensor, number: Tensor, power: float) -> None:
    """Numbers that no symmetry changes: a known one for a channel is a weight, others tell channels apart."""
    shape = operation.out.shape
    label, names, nodes = walk.combined(walk.label(tensor).expand(shape))
    zero = walk.label(number).expand(shape) == ZERO
    some = bool(zero.any()) and not bool(zero.all())  # a state of zeros is none at later tokens
    walk.put(operation.out, torch.where(zero, ZERO, label) if some else label)
    a = names[:, 0]
    known, codes, values = walk.column_codes(walk.label(tensor).expand(shape), number)
    at = np.searchsorted(known, a)
    code, value = codes[at], values[at]
    exact = np.isfinite(value) & (value != 0)
    weight = np.ones(len(a))
    weight[exact] = value[exact] ** power
    walk.same(a, nodes, weight)
    walk.follow(nodes[exact], a[exact])
    other, b = nodes[~exact], a[~exact]
    walk.follow(other, b, key=hashed(code[~exact], named(("column", power))))
    walk.about("gated")[other] = walk.live(number)
    walk.about("turned")[other] = np.where(walk.about("origin")[b] < 0, b, walk.about("origin")[b])
    walk.about("turn")[other] = walk.about("size")[b]
    walk.about("angle")[other] = hashed(code[~exact], int(power))
    walk.passed("sum", nodes[exact], names[exact], weight[exact])
    walk.passed("number", other, b, keys=code[~exact])


def product(walk: Walk, operation: Operation, a: Tensor | None, b: Tensor, power: float) -> None:
    """Two activations, entry by entry: log-scales add. One number for several channels lets these mix."""
    shape = operation.out.shape
    first = torch.full((), FIXED).expand(shape) if a is None else walk.label(a).expand(shape)
    second = walk.label(b).expand(shape)
    label, names, nodes = walk.combined(first, second)
    walk.put(operation.out, label)
    walk.equal((nodes, 1.0), (names[:, 0], -1.0), (names[:, 1], -power))
    walk.fix(nodes[((names <= FIXED) | walk.dead[names]).all(1)], seen=False)
    one, other = names[:, 0], names[:, 1]
    several = [_partners(each, beside) for each, beside in ((one, other), (other, one))]
    turned = (power > 0) & (one > FIXED) & (several[0] > several[1])
    one, other = np.where(turned, other, one), np.where(turned, one, other)
    alone, shared = np.where(turned, several[1], several[0]), np.where(turned, several[0], several[1])
    number = (one > FIXED) & (other > FIXED) & (shared > 1) & (alone == 1)
    kept, by, out = one[number], other[number], nodes[number]
    walk.same(kept, out, scale=False)
    going = ~walk.dead[kept]
    known, codes, _ = walk.column_codes(label, b)
    if a is not None and turned[number].any():
        codes = np.where(np.isin(known, nodes[turned]), walk.column_codes(label, a)[1], codes)
    which = codes[np.searchsorted(known, out)]  # one channel may hold several numbers, of heads that a weight shares
    walk.follow(out[going], kept[going], key=hashed(by, which, named(("times", walk.at)))[going])
    walk.alone(by)
    walk.alone(np.concatenate([one[~number], other[~number], nodes[~number]]))
    walk.about("gated")[nodes] = True
    walk.through(nodes[~number], names[~number])
    walk.through(out, by[:, None])
    walk.passed("number", out, kept, keys=by)


def _partners(names: Array, others: Array) -> Array:
    """Return with how many others each of the names stands together."""
    pairs = np.unique(np.stack([names, others], 1), axis=0)
    found, count = np.unique(pairs[:, 0], return_counts=True)
    return count[np.searchsorted(found, names)]


def gain(walk: Walk, operation: Operation, tensor: Tensor, numbers: Tensor) -> None:
    """A parameter that multiplies: X' = g X g^-1, and diagonal maps are its own."""
    if not walk.moving(tensor):
        number_times(walk, operation, numbers, tensor, 1.0)
        return
    entries = walk.entries[id(numbers)]
    shape = operation.out.shape
    index = entries.index()
    names, inverse = index.unique(return_inverse=True)
    values = entries.read(walk.parameters).reshape(-1)
    value_of = torch.empty(len(names), dtype=torch.float64)
    value_of[inverse.reshape(-1)] = values.cpu()
    unknown = walk.notes.setdefault(("gain", entries.name), {})
    fresh = [i for i in names.tolist() if i not in unknown]
    unknown.update(zip(fresh, walk.new(len(fresh)).tolist(), strict=True))
    ids = np.array([unknown[i] for i in names.tolist()], np.int64)
    walk.scales.name(ids)
    first, second = walk.label(tensor).expand(shape), torch.from_numpy(ids)[inverse].view(entries.shape).expand(shape)
    label, pairs, nodes = walk.combined(first, second)
    walk.put(operation.out, torch.where((first == ZERO) | (label == ZERO), ZERO, label))
    kept = pairs[:, 0] != ZERO
    a, g, nodes = pairs[kept, 0], pairs[kept, 1], nodes[kept]
    order = np.argsort(ids)
    place = order[np.searchsorted(ids[order], g)]
    weight = value_of.numpy()[place]
    walk.equal((nodes, 1.0), (a, -1.0), (g, -1.0))
    walk.alone(nodes[a == FIXED])
    nothing = (a != FIXED) & (weight == 0)
    walk.fix(np.concatenate([a[nothing], nodes[nothing]]))
    kept = (a != FIXED) & (weight != 0)
    walk.same(a[kept], nodes[kept], weight[kept], scale=False)
    going = kept & ~walk.dead[a]
    walk.follow(nodes[going], a[going])
    made = walk.vector(entries, a[None], nodes[None], gain=True)
    made.unknowns, made.index = g[None], names.numpy()[place]
    walk.keep_group(tensor, operation.out)  # where keys of one query have numbers of their own, labels tell them apart


@rule("pow")
def power(walk: Walk, operation: Operation) -> None:
    base, exponent = operation.args[:2]
    if isinstance(base, Tensor) and not isinstance(exponent, Tensor) and exponent == 2:
        square(walk, operation, base)
    else:
        pointwise(walk, operation)


def square(walk: Walk, operation: Operation, tensor: Tensor) -> None:
    """Wait whether the squares are summed over channels: then turning the channels leaves the sum alone."""
    label, names, nodes = walk.combined(walk.label(tensor))
    walk.put(operation.out, label)
    walk.notes["pending", id(operation.out)] = ("square", (nodes, names[:, 0]))
    walk.equal((nodes, 1.0), (names[:, 0], -2.0))
    walk.through(nodes, names)
