"""Find the symmetric pairs of a model in what it computes, with no names of classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from quotient_manifolds.symmetries.blocks import CLASH, Block, Rows, blocks_of
from quotient_manifolds.symmetries.linear_flow import Flow, positions
from quotient_manifolds.symmetries.linear_rules import follow
from quotient_manifolds.symmetries.pair import (
    ADAPTER,
    BOTTLENECK,
    GATED,
    QUERY_KEY,
    RELU,
    VALUE_OUTPUT,
    Factor,
    Group,
    SymmetricPair,
)
from quotient_manifolds.symmetries.strided_view import StridedView
from quotient_manifolds.symmetries.symmetries import Match, Refused
from quotient_manifolds.symmetries.trace import Trace
from quotient_manifolds.symmetries.translations import Translation, key_bias, value_output_bias

_FIRST = (ADAPTER, QUERY_KEY, VALUE_OUTPUT, RELU, GATED, BOTTLENECK)  # of two pairs with common numbers

_NORMS = frozenset(
    "pow mean var var_mean std linalg_vector_norm rsqrt native_layer_norm native_group_norm _fused_rms_norm".split()  # noqa: SIM905
)
_CLIPS = frozenset(("clamp", "clamp_", "clamp_min", "clamp_max", "hardtanh"))
_ACTIVATIONS = frozenset(
    ("gelu", "silu", "silu_", "tanh", "sigmoid", "elu", "hardswish", "mish", "softplus", "erf", "hardsigmoid", "exp")
)


def find_pairs(trace: Trace) -> Match:
    """Return the pairs of a model, the translations of its biases, and what is refused, from its operations alone.

    Factors G and H are a pair if the model sees them through G H^T only: if units of linear maps, followed through
    whatever is linear in them, meet in products. Which matrices pass from one end to the other follows from the factors
    in between: the same ones for all units of a head let GL(h) pass, a rotation of planes complex numbers, other
    factors for every unit numbers, and a ReLU positive numbers. What stands in the way otherwise leaves no pair.

    The inputs of the trace have to tell: at least two tokens, for a rotation of a single one is none.
    """
    with torch.no_grad():
        flow = follow(trace)
    blocks = blocks_of(flow)
    outputs = _of_values(flow, blocks)
    refused = dict.fromkeys(_refusals(flow, blocks, outputs))
    found = []
    for block in (each for each in blocks if not each.reason):
        pairs = _pairs(flow, block, outputs)
        found += pairs
        if not pairs:
            kind = _kind(flow, block)
            refused[Refused(_name(flow, block, kind), kind, "its numbers stand in no order that a view has")] = None
    _tell_apart(found)
    kept: list[_Found] = []
    owned: dict[str, list[tuple[str, Rows]]] = {}
    for each in sorted(found, key=lambda each: _FIRST.index(each.pair.kind)):
        reason = _obstacle(flow, each, owned)
        if reason:
            refused[Refused(each.pair.name, each.pair.kind, reason)] = None
            continue
        kept.append(each)
        for rows in (*each.block.sides[0], *each.block.sides[1]):
            owned.setdefault(flow.sources[rows.source].name, []).append((each.pair.name, rows))
    kept = [each for each in found if each in kept]
    shifts = [shift for each in kept for shift in _translations(flow, each)]
    return Match(tuple(each.pair for each in kept), tuple(shifts), tuple(refused))


def _tell_apart(found: Sequence[_Found]) -> None:
    """Give each pair a name of its own: by what the paths of its parameters have in common, or by a number."""
    names: set[str] = set()
    for each in found:
        place, kind = each.pair.name.removesuffix(each.pair.kind).rstrip(), each.pair.kind
        if each.block.turns:
            place, kind = each.pair.name.removesuffix(f"{kind} rotary").rstrip(), f"{kind} rotary"
        within = [name.removeprefix(f"{place}.").split(".")[:-1] for name in each.pair.names]
        common = [part for part in within[0] if all(part in others for others in within)]
        free = (f"{place} {label} {kind}".strip() for label in (*common, *range(2, len(found) + 2)))
        name = each.pair.name if each.pair.name not in names else next(name for name in free if name not in names)
        names.add(name)
        each.pair = replace(each.pair, name=name)


@dataclass(eq=False)
class _Found:
    """Hold a pair, what it was made of, and the views of both sides with the rows that they view."""

    pair: SymmetricPair
    block: Block
    views: tuple[list[tuple[Rows, StridedView]], list[tuple[Rows, StridedView]]]


# ---- kinds and names


def _kind(flow: Flow, block: Block) -> str:
    products = [flow.products[each] for each in block.products]
    if any(not product.left.parameter and not product.right.parameter for product in products):
        return QUERY_KEY
    if block.positive:
        return RELU
    if block.alone and block.h == 1:
        return GATED
    if block.mixed:
        return VALUE_OUTPUT
    return ADAPTER if _is_adapter(flow, block) else BOTTLENECK


def _is_adapter(flow: Flow, block: Block) -> bool:
    """Return whether what a bottleneck answers is added to what another linear map makes of the same inputs."""
    inputs = set().union(*(flow.sources[rows.source].inputs for rows in block.sides[0]))
    readers = {index for rows in block.sides[1] for index in flow.sources[rows.source].operations}
    answers = {number for number, source in enumerate(flow.sources) if source.operations & readers}
    if answers & flow.updated:
        return True  # it is added to a matrix of parameters
    return any(one in answers and flow.sources[other].inputs & inputs for one, other in flow.summed)


def _common(names: Sequence[str]) -> str:
    """Return the path of the innermost module that has all the parameters."""
    parts = [name.split(".")[:-1] for name in names]
    return ".".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False)))


def _name(flow: Flow, block: Block, kind: str, outputs: Sequence[str] = ()) -> str:
    """Return the path of the module that has the parameters, and the kind.

    outputs: of modules that have values and their output; queries and keys are named by the one that has them, too.
    """
    path = _common([flow.sources[rows.source].name for side in block.sides for rows in side])
    alone = len(outputs) == 1
    around = [each for each in outputs if (f"{path}.".startswith(f"{each}.") if each else alone)]
    if kind == QUERY_KEY and around:
        path = max(around, key=len)
    return f"{path} {kind}".strip()


def _of_values(flow: Flow, blocks: Sequence[Block]) -> list[str]:
    """Return the modules that have values and their output: attention, as a rule."""
    mixing = [block for block in blocks if block.mixed and _kind(flow, block) in (VALUE_OUTPUT, GATED)]
    return [_name(flow, block, "") for block in mixing]


# ---- what is refused


def _refusals(flow: Flow, blocks: Sequence[Block], outputs: Sequence[str]) -> Iterator[Refused]:
    for block in blocks:
        products = [flow.products[each] for each in block.products]
        scores = [each for each in products if not each.left.parameter and not each.right.parameter]
        if block.reason == 0 and block.alone and block.mixed and not scores:
            yield Refused(
                _name(flow, block, VALUE_OUTPUT),
                VALUE_OUTPUT,
                "the heads' outputs are multiplied elementwise by a gate before the output projection",
            )
        if block.reason == CLASH and any(each.softmax for each in scores):
            why = "queries and keys have weights in common, or meet in two orders"
            yield Refused(_name(flow, block, QUERY_KEY, outputs), QUERY_KEY, why)
        if block.reason <= 0:
            continue
        reason = flow.reasons[block.reason]
        if any(each.softmax for each in scores):
            yield Refused(_name(flow, block, QUERY_KEY, outputs), QUERY_KEY, _why(reason.operation, QUERY_KEY, False))
        elif not scores and block.mixed:
            why = _why(reason.operation, VALUE_OUTPUT, reason.mixed)
            yield Refused(_name(flow, block, VALUE_OUTPUT), VALUE_OUTPUT, why)
        elif not scores and reason.operation in _ACTIVATIONS:
            why = f"{reason.operation} lets no factor pass: only a ReLU is positively homogeneous"
            yield Refused(_name(flow, block, "neurons"), "neurons", why)


def _why(operation: str, kind: str, mixed: bool) -> str:
    if operation in _CLIPS:
        return "the projections are clipped before the product"
    if operation in _NORMS and kind == QUERY_KEY:
        return (
            "queries and keys are normalised between projection and product, which leaves no GL(h) and no rotary "
            "commutant; only a positive factor on each head's projection survives, up to the norm's eps"
        )
    if operation in _NORMS:
        if mixed:
            return "the heads' outputs are normalised before the output projection"
        return "values are normalised between projection and product"
    return f"{operation} stands between projection and product"


# ---- pairs of blocks


def _pairs(flow: Flow, block: Block, outputs: Sequence[str]) -> list[_Found]:
    """Return the pair of several heads, or one for each if no view has them all."""
    together = _pair(flow, block, outputs)
    if together is not None:
        return [together]
    alone = list(block.heads())
    return [found for each in alone if len(alone) > 1 and (found := _pair(flow, each, outputs)) is not None]


def _pair(flow: Flow, block: Block, outputs: Sequence[str]) -> _Found | None:
    views: tuple[list[tuple[Rows, StridedView]], list[tuple[Rows, StridedView]]] = ([], [])
    order: Tensor | None = None  # of heads
    for side in (0, 1):
        for rows in sorted(block.sides[side], key=lambda each: -len(flow.sources[each.source].rows)):
            source = flow.sources[rows.source]
            numel = flow.trace.params[source.name].numel()
            first = source.first[rows.units]  # (heads, g, h)
            first = first.gather(1, first[:, :, :1].argsort(1).expand(first.shape))
            order = first[:, 0, 0].argsort() if order is None else order
            first = first[order]
            whole = StridedView.of(source.name, numel, first, source.rows) is not None
            for group in [first] if whole else first.split(1, 1):
                view = StridedView.of(source.name, numel, group, source.rows)
                if view is None:
                    return None
                views[side].append((rows, view))
    kind = _kind(flow, block)
    G, H = (Factor(tuple(view for _, view in side)) for side in (views[::-1] if kind == ADAPTER else views))
    name = _name(flow, block, kind, outputs) + " rotary" * block.turns
    acts: Group = "GL(1, C)" if block.turns else "GL+(1)" if block.positive else "GL(h)"
    return _Found(SymmetricPair(name, kind, G, H, acts), block, views)


def _obstacle(flow: Flow, found: _Found, owned: dict[str, list[tuple[str, Rows]]]) -> str:
    """Say why a pair may not be moved; "" if it may."""
    pair = found.pair
    if pair.h > min(pair.n, pair.m) and pair.acts == "GL(h)":
        return "the middle is wider than an end, so the factors have no full column rank: no manifold"
    own: dict[str, list[Rows]] = {}
    for rows in (*found.block.sides[0], *found.block.sides[1]):
        own.setdefault(flow.sources[rows.source].name, []).append(rows)
    explained = set().union(*(flow.sources[rows.source].operations for its in own.values() for rows in its))
    for name, its in own.items():
        if any(_overlap(flow, one, other) for index, one in enumerate(its) for other in its[:index]):
            return f"parameter {name!r} plays two parts"
        for other, theirs in owned.get(name, []):
            if any(_overlap(flow, rows, theirs) for rows in its):
                return f"parameter {name!r} plays two parts: it is in {other!r} too"
        for index, tensor in flow.uses.get(name, []):
            if index not in explained:
                touched = positions(tensor).flatten() if flow.owner(tensor) else None
                if touched is None or any(bool(torch.isin(_elements(flow, rows), touched).any()) for rows in its):
                    return f"{flow.trace.operations[index].name} uses parameter {name!r} too"
        single = flow.known_single(name)
        if single is not None:
            dead = torch.cat([flow.sources[single].dead[_elements(flow, rows)] for rows in its])
            if bool(dead.any()):
                return f"{flow.reasons[int(dead.max())].operation} uses parameter {name!r} too"
    return ""


def _elements(flow: Flow, rows: Rows) -> Tensor:
    source = flow.sources[rows.source]
    return (source.first[rows.units.flatten()][:, None] + source.rows).flatten()


def _overlap(flow: Flow, one: Rows, other: Rows) -> bool:
    """Return whether rows of the same parameter have a number in common."""
    if one.source == other.source:
        return bool(torch.isin(one.units.flatten(), other.units.flatten()).any())
    return bool(torch.isin(_elements(flow, one), _elements(flow, other)).any())


# ---- translations


def _translations(flow: Flow, found: _Found) -> Iterator[Translation]:
    pair = found.pair
    if pair.acts != "GL(h)":
        return
    if pair.kind == QUERY_KEY:
        for rows, view in found.views[1]:
            if flow.is_single(rows.source) and rows.steady and _is_ignored(flow, rows):
                yield key_bias(pair, view)
    if pair.kind in (VALUE_OUTPUT, BOTTLENECK) and len(pair.H.views) == 1:
        output = _output_bias(flow, found)
        for rows, view in found.views[0]:
            if flow.is_single(rows.source) and rows.steady and output is not None and view.rows == 1:
                yield value_output_bias(pair, view, output)


def _is_ignored(flow: Flow, rows: Rows) -> bool:
    """Return whether what units add to keys is the same for all scores that a softmax is taken over."""
    for product in flow.products:
        for side in (product.left, product.right):
            for source, its in zip(side.sources, side.units.unbind(1), strict=True):
                concerned = source == rows.source and bool(torch.isin(rows.units.flatten(), its.flatten()).any())
                if concerned and (product.softmax != "right" or not product.free or side is product.left):
                    return False
    return True


def _output_bias(flow: Flow, found: _Found) -> StridedView | None:
    """Return the view (1, d, 1) of what is added to the output of the pair's second map, if that is all it is for."""
    reader = flow.sources[found.views[1][0][0].source]
    for number, bias in flow.biases.items():
        writer = flow.sources[number]
        if writer.name != reader.name or not writer.operations & reader.operations:
            continue
        order = writer.first.argsort()
        elements = reader.first.min() + reader.rows
        place = torch.searchsorted(writer.first[order], elements).clamp(max=len(order) - 1)
        units = order[place]
        if not torch.equal(writer.first[units], elements):
            continue
        name = flow.sources[bias.source].name
        if any(index not in bias.operations for index, _ in flow.uses.get(name, [])):
            continue
        numbers = flow.sources[bias.source].first[bias.units[units]]
        return StridedView.of(name, flow.trace.params[name].numel(), numbers[:1].view(1, 1, 1), numbers - numbers[0])
    return None
