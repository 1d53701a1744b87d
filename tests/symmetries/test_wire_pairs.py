"""Pairs and translations of a walk by wires, beside those of the finder that they are to replace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from torch import nn

from quotient_manifolds.replica import private_batch, replica
from quotient_manifolds.symmetries import SymmetricPair
from quotient_manifolds.symmetries.outputs import answer, doubled, first_examples
from quotient_manifolds.symmetries.pair import Factor
from quotient_manifolds.symmetries.strided_view import StridedView
from quotient_manifolds.symmetries.trace import Trace
from quotient_manifolds.symmetries.traced_pairs import find_pairs
from quotient_manifolds.symmetries.translations import Translation
from quotient_manifolds.symmetries.wires.blocks import Block, find_blocks
from quotient_manifolds.symmetries.wires.constants import Constants
from quotient_manifolds.symmetries.wires.pairs import pairs_of
from quotient_manifolds.symmetries.wires.record import record
from quotient_manifolds.symmetries.wires.relations import Component
from quotient_manifolds.symmetries.wires.walk import Walk
from studies import fibres
from tests.handwritten_models import handwritten
from tests.models import BY_NAME

COMPLEX = {"query/key rotary GL(1, C)^4"}, set[str]()
DIFFERENT: dict[str, tuple[set[str], set[str]]] = {
    "hand ComplexRotary": COMPLEX,
    "small rotary positions as complex numbers": COMPLEX,
    "small roformer": (  # the angles are a parameter
        {"encoder.layer.0.attention query/key rotary GL(1, C)^4"},
        {"encoder.layer.0.attention query/key GL(1)^2"},
    ),
    "small convbert": (  # a channel of its own is no neuron without a product
        {"encoder.layer.0.attention.self.key_conv_attn_layer gated neuron GL(1)^8"},
        {
            "encoder.layer.0.attention query/key GL(1)^4",  # the keys' kernels are read beside the scores
            "encoder.layer.0.attention value/output GL(4)^1",
            "encoder.layer.0.attention.self.key_conv_attn_layer bottleneck in/out GL(1)^8",
            "encoder.layer.0.attention value/output bias",
            "encoder.layer.0.attention key bias",
        },
    ),
    "small openai-gpt": ({"h.0.attn key bias"}, set()),  # masked scores are -10000, not nothing
}
"""What only the finder has, and what only the walk; complex numbers are not walked yet."""


def entries(view: StridedView) -> np.ndarray:
    numbers = np.array([view.offset])
    for size, stride in (part for axis in view.axes for part in axis):
        numbers = (numbers[:, None] + np.arange(size) * stride).reshape(-1)
    return numbers.reshape(view.shape)


def heads(factor: Factor) -> list[list[frozenset[tuple[str, int]]]]:
    """The numbers of every column of every head."""
    views = [(view.name, entries(view)) for view in factor.views]
    shape = views[0][1].shape
    return [
        [frozenset((name, int(n)) for name, its in views for n in its[head, :, column]) for column in range(shape[2])]
        for head in range(shape[0])
    ]


def known(pair: SymmetricPair) -> tuple[object, ...]:
    """What a pair is, whatever the order of its views, heads and columns."""
    columns = (frozenset(zip(*both, strict=True)) for both in zip(heads(pair.G), heads(pair.H), strict=True))
    return pair.name, pair.kind, pair.group, frozenset(columns)


def shifted(shift: Translation) -> tuple[object, ...]:
    """What a translation is: each number of the bias with the column that carries it on, and where that is made up."""
    output = None if shift.output is None else (shift.output.name, tuple(entries(shift.output).flat))
    bias = entries(shift.bias).reshape(len(entries(shift.bias)), -1).tolist()
    columns: list[Any] = heads(shift.weight) if shift.weight else [[None] * len(each) for each in bias]
    moved = frozenset(pair for both in zip(bias, columns, strict=True) for pair in zip(*both, strict=True))
    return shift.name, shift.kind, shift.pair, shift.bias.name, moved, output


def walked(model: nn.Module, batch: Any) -> Walk:
    return Walk(record(replica(model, {}, doubled), private_batch(batch, doubled), answer))


def model_of(name: str) -> tuple[nn.Module, Any]:
    """A model, and its first examples."""
    if name in BY_NAME:
        model, batch = BY_NAME[name].build(), BY_NAME[name].inputs()
    elif name.startswith("hand "):
        model, batch = handwritten()[name.removeprefix("hand ")]
    else:
        model, batch = fibres.small_model(name.removeprefix("small "))
    return model.eval(), (first_examples(batch) or [batch])[0]


NAMES = (*BY_NAME, *(f"hand {name}" for name in handwritten()), *(f"small {name}" for name in fibres.names()))


@pytest.mark.parametrize("name", NAMES)
def test_a_walk_has_the_pairs_and_translations_of_the_finder(name: str) -> None:
    model, batch = model_of(name)
    walk = walked(model, batch)
    old, new = find_pairs(Trace(model, batch)), pairs_of(walk, Constants(walk))
    assert len({each.name for each in new.pairs}) == len(new.pairs)
    one, other = (
        {**{known(p): f"{p.name} {p.group}" for p in m.pairs}, **{shifted(t): t.name for t in m.translations}}
        for m in (old, new)
    )
    less, more = {one[key] for key in one.keys() - other.keys()}, {other[key] for key in other.keys() - one.keys()}
    assert (less, more) == DIFFERENT.get(name, (set(), set()))
    everything = dimension(find_blocks(walk), walk.scales.components())
    left = dimension(new.taken.left_of_blocks(find_blocks(walk)), new.taken.left_of_scales(walk.scales.components()))
    assert left + sum(pair.group_dimension for pair in new.pairs) == everything


def dimension(blocks: Iterable[Block], components: Iterable[Component]) -> int:
    return sum(each.dimension for each in blocks) + sum(each.basis.shape[1] for each in components)
