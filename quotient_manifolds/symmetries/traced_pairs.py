"""Find the symmetric pairs of a model in what it computes, with no names of classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from quotient_manifolds.symmetries.blocks import Block, Rows, blocks_of
from quotient_manifolds.symmetries.linear_flow import Flow, positions
from quotient_manifolds.symmetries.linear_rules import follow
from quotient_manifolds.symmetries.lora import ADAPTER
from quotient_manifolds.symmetries.pair import Factor, Group, SymmetricPair
from quotient_manifolds.symmetries.strided_view import StridedView
from quotient_manifolds.symmetries.symmetries import Match, Refused
from quotient_manifolds.symmetries.trace import Trace
from quotient_manifolds.symmetries.translations import Translation
from quotient_manifolds.symmetries.two_layers import BOTTLENECK, GATED, RELU

QUERY_KEY, VALUE_OUTPUT = "query/key", "value/output"
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
    refused = dict.fromkeys(_refusals(flow, blocks))
    whole = [block for block in blocks if not block.reason]
    found = []
    for heads in _alike(whole):
        pairs = _pairs(flow, heads)
        found += pairs
        if not pairs:
            kind = _kind(flow, heads[0])
            refused[Refused(_name(flow, heads, kind), kind, "its numbers stand in no order that a view has")] = None
    names: dict[str, int] = {}
    for each in found:
        names[each.pair.name] = names.get(each.pair.name, 0) + 1
        if names[each.pair.name] > 1:
            each.pair = replace(each.pair, name=f"{each.pair.name} {names[each.pair.name]}")
    kept: list[_Found] = []
    owned: dict[str, list[tuple[str, Tensor]]] = {}
    for each in sorted(found, key=lambda each: _FIRST.index(each.pair.kind)):
        reason = _obstacle(flow, each, owned)
        if reason:
            refused[Refused(each.pair.name, each.pair.kind, reason)] = None
            continue
        kept.append(each)
        for name, elements in each.elements:
            owned.setdefault(name, []).append((each.pair.name, elements))
    kept = [each for each in found if each in kept]
    shifts = [shift for each in kept for shift in _translations(flow, each)]
    return Match(tuple(each.pair for each in kept), tuple(shifts), tuple(refused))


@dataclass(eq=False)
class _Found:
    """Hold a pair, the rows that its factors are made of by source, and the numbers of parameters."""

    pair: SymmetricPair
    block: Block
    views: tuple[list[tuple[int, Tensor, bool, StridedView]], list[tuple[int, Tensor, bool, StridedView]]]
    elements: list[tuple[str, Tensor]]


# ---- kinds and names


def _kind(flow: Flow, block: Block) -> str:
    products = [flow.products[each] for each in block.products]
    if any(not product.left.parameter and not product.right.parameter for product in products):
        return QUERY_KEY
    if block.positive:
        return RELU
    if block.alone and len(block.sides[0][0].units) == 1:
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


def _name(flow: Flow, blocks: Sequence[Block], kind: str) -> str:
    names = [flow.sources[rows.source].name for block in blocks for side in block.sides for rows in side]
    return f"{_common(names)} {kind}".strip()


# ---- what is refused


def _refusals(flow: Flow, blocks: Sequence[Block]) -> Iterator[Refused]:
    for block in blocks:
        if not block.sides[0] or not block.sides[1]:
            continue
        products = [flow.products[each] for each in block.products]
        scores = [each for each in products if not each.left.parameter and not each.right.parameter]
        if block.reason == 0 and block.alone and block.mixed and not scores:
            yield Refused(
                _name(flow, [block], VALUE_OUTPUT),
                VALUE_OUTPUT,
                "the heads' outputs are multiplied elementwise by a gate before the output projection",
            )
        if block.reason <= 0:
            continue
        reason = flow.reasons[block.reason]
        if any(each.softmax for each in scores):
            yield Refused(_name(flow, [block], QUERY_KEY), QUERY_KEY, _why(reason.operation, QUERY_KEY, False))
        elif not scores and block.mixed:
            why = _why(reason.operation, VALUE_OUTPUT, reason.mixed)
            yield Refused(_name(flow, [block], VALUE_OUTPUT), VALUE_OUTPUT, why)
        elif not scores and reason.operation in _ACTIVATIONS:
            why = f"{reason.operation} lets no factor pass: only a ReLU is positively homogeneous"
            yield Refused(_name(flow, [block], RELU), RELU, why)


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


def _alike(blocks: Sequence[Block]) -> list[list[Block]]:
    """Return blocks that are made of the same sources in the same way together: they are heads of one pair."""
    found: dict[object, list[Block]] = {}
    for block in blocks:
        sides = tuple(tuple(rows.source for rows in side) for side in block.sides)
        flags = (block.turns, block.positive, block.mixed, block.alone, block.products)
        found.setdefault((sides, len(block.sides[0][0].units), flags), []).append(block)
    return list(found.values())


def _pairs(flow: Flow, heads: Sequence[Block]) -> list[_Found]:
    """Return the pair of several heads, or one for each if no view has them all."""
    together = _pair(flow, heads)
    if together is not None:
        return [together]
    return [found for each in heads if len(heads) > 1 for found in _pairs(flow, [each])]


def _pair(flow: Flow, heads: Sequence[Block]) -> _Found | None:
    views: tuple[list[tuple[int, Tensor, bool, StridedView]], list[tuple[int, Tensor, bool, StridedView]]] = ([], [])
    elements = []
    order: Tensor | None = None  # of heads
    for side in (0, 1):
        sources = dict.fromkeys(rows.source for rows in heads[0].sides[side])
        for number in sorted(sources, key=lambda each: -len(flow.sources[each].rows)):
            source = flow.sources[number]
            own = [_of_source(block, side, number) for block in heads]
            units = torch.stack([torch.stack([rows.units for rows in each]) for each in own])
            first = source.first[units]  # (heads, g, h)
            order = first[:, 0, 0].argsort() if order is None else order
            steady = all(rows.steady for each in own for rows in each)
            numel = flow.trace.params[source.name].numel()
            first = first[order]
            whole = StridedView.of(source.name, numel, first, source.rows) is not None
            for group in [first] if whole else first.split(1, 1):
                view = StridedView.of(source.name, numel, group, source.rows)
                if view is None:
                    return None
                views[side].append((number, units[order], steady, view))
            elements.append((source.name, (first[..., None] + source.rows).flatten()))
    G, H = (Factor(tuple(view for *_, view in side)) for side in views)
    block = heads[0]
    kind = _kind(flow, block)
    name = _name(flow, heads, kind) + " rotary" * block.turns
    acts: Group = "GL(1, C)" if block.turns else "GL+(1)" if block.positive else "GL(h)"
    return _Found(SymmetricPair(name, kind, G, H, acts), block, views, elements)


def _of_source(block: Block, side: int, number: int) -> list[Rows]:
    return sorted((rows for rows in block.sides[side] if rows.source == number), key=lambda rows: int(rows.units[0]))


def _obstacle(flow: Flow, found: _Found, owned: dict[str, list[tuple[str, Tensor]]]) -> str:
    """Say why a pair may not be moved; "" if it may."""
    pair = found.pair
    if pair.h > min(pair.n, pair.m) and pair.acts == "GL(h)":
        return "the middle is wider than an end, so the factors have no full column rank: no manifold"
    sources = [flow.sources[number] for side in found.views for number, *_ in side]
    explained = set().union(*(source.operations for source in sources))
    own: dict[str, list[Tensor]] = {}
    for name, elements in found.elements:
        own.setdefault(name, []).append(elements)
    for name, parts in own.items():
        elements = torch.cat(parts)
        if len(parts) > 1 and len(torch.unique(elements)) < len(elements):
            return f"parameter {name!r} plays two parts"
        for other, its in owned.get(name, []):
            if bool(torch.isin(elements, its).any()):
                return f"parameter {name!r} plays two parts: it is in {other!r} too"
        for index, tensor in flow.uses.get(name, []):
            if index in explained:
                continue
            touched = positions(tensor) if flow.owner(tensor) else elements
            if bool(torch.isin(elements, touched.flatten()).any()):
                return f"{flow.trace.operations[index].name} uses parameter {name!r} too"
        single = flow.sources[flow.single(name)]
        if bool((single.dead[elements] != 0).any()):
            return f"{flow.reasons[int(single.dead[elements].max())].operation} uses parameter {name!r} too"
    return ""


# ---- translations


def _translations(flow: Flow, found: _Found) -> Iterator[Translation]:
    pair = found.pair
    if pair.acts != "GL(h)":
        return
    if pair.kind == QUERY_KEY:
        for number, units, steady, view in found.views[1]:
            if flow.is_single(number) and steady and _is_ignored(flow, number, units):
                yield Translation(pair.name.replace(QUERY_KEY, "key bias"), "key bias", pair.name, pair.H, view)
    if pair.kind in (VALUE_OUTPUT, BOTTLENECK) and len(pair.H.views) == 1:
        output = _output_bias(flow, found)
        for number, _, steady, view in found.views[0]:
            if flow.is_single(number) and steady and output is not None and view.rows == 1:
                name = pair.name.replace(pair.kind, f"{pair.kind} bias")
                yield Translation(name, "value/output bias", pair.name, pair.G, view, pair.H, output)


def _is_ignored(flow: Flow, number: int, units: Tensor) -> bool:
    """Return whether what units add to keys is the same for all scores that a softmax is taken over."""
    wanted = set(units.flatten().tolist())
    for product in flow.products:
        for side in (product.left, product.right):
            for source, its in zip(side.sources, side.units.unbind(1), strict=True):
                concerned = source == number and wanted & set(its.flatten().tolist())
                if concerned and (product.softmax != "right" or not product.free or side is product.left):
                    return False
    return True


def _output_bias(flow: Flow, found: _Found) -> StridedView | None:
    """Return the view (1, d, 1) of what is added to the output of the pair's second map, if that is all it is for."""
    reader = flow.sources[found.views[1][0][0]]
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
