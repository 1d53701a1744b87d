"""Pairs found in the computation, of models that nobody has listed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries import (
    Symmetries,
    fibre_dimension,
    find_symmetries,
    verify_symmetries,
)
from quotient_manifolds.symmetries.strided_view import StridedView
from tests.handwritten_models import (
    Adapted,
    ComplexRotary,
    Einsum,
    HeadByHead,
    PartlyRotated,
    PixelAttention,
    Temperature,
    handwritten,
)
from tests.models import orbit_dimension
from tests.symmetries.breadth import counts, redundant
from tests.symmetries.nets import GIVEN, NETS, TOKENS, Body, Computed, Net, attend, generic, linear


def all_hold(model: nn.Module, inputs: object, found: Symmetries) -> bool:
    return verify_symmetries(model, inputs, replace(found, reparameterizations=())).all_hold


@pytest.mark.parametrize("heads", [1, 3])
def test_a_strided_view_writes_what_it_reads(heads: int) -> None:
    stored = torch.arange(60.0).view(12, 5)  # (heads, 4, 5), of which every other output
    first = (torch.arange(heads) * 20)[:, None, None] + torch.tensor([[0, 10]])
    view = StridedView.of("w", 60, first, torch.arange(5))
    assert view is not None
    assert view.shape == (heads, 5, 2)
    params = {"w": stored.clone()}
    read = view.read(params).clone()  # it shares memory
    assert torch.equal(read, stored.view(3, 4, 5)[:heads, ::2].mT)
    view.write(params, -read)
    assert torch.equal(view.read(params), -read)
    assert int((params["w"] != stored).sum()) == heads * 10 - 1  # number 0 is its own negative
    apart = {"w": stored.T.contiguous().T.clone()}  # the same numbers, elsewhere in memory
    view.write(apart, -read)
    assert torch.equal(apart["w"], params["w"])


def test_a_strided_view_reads_numbers_that_lie_apart_in_memory() -> None:
    view = StridedView.of("w", 42, torch.arange(7)[None, None] * 6, torch.arange(6))
    assert view is not None
    stored = torch.arange(84.0).view(7, 12)[:, ::2]  # a row of it, flat, is a view with a step of 2
    assert torch.equal(view.read({"w": stored}), stored.T[None])
    one = torch.ones(()).expand(7, 6)  # as gradients are that are 0 everywhere
    assert torch.equal(view.read({"w": one}), torch.ones(1, 6, 7))
    wide = torch.zeros(7, 12)
    view.write({"w": wide[:, ::2]}, stored.T[None])
    assert torch.equal(wide[:, ::2], stored)
    assert not wide[:, 1::2].any()


def test_numbers_in_no_regular_order_have_no_strided_view() -> None:
    assert StridedView.of("w", 60, torch.tensor([[[0, 1, 5]]]), torch.arange(1)) is None


# --- models that people write themselves ------------------------------------------------------------------------------

HANDWRITTEN = {
    "NanoGPT": ("2 x query/key GL(4)^3; 2 x value/output GL(4)^3", "2 x key bias; 2 x value/output bias"),
    "RearrangedViT": ("query/key GL(4)^2; value/output GL(4)^2", ""),
    "CrossAttention": ("query/key GL(4)^3; value/output GL(4)^3; gated neuron GL(1)^24", ""),
    "PermutedQKV": ("query/key GL(4)^2; value/output GL(4)^2", "key bias; value/output bias"),
    "Einsum": ("query/key GL(3)^2; value/output GL(3)^2", ""),
    "ComplexRotary": ("query/key GL(1, C)^4; value/output GL(4)^2; gated neuron GL(1)^10", ""),
    "PartlyRotated": (
        "query/key GL(1, C)^4; query/key GL(2)^2; value/output GL(6)^2",
        "key bias; value/output bias",
    ),
    "Temperature": ("query/key GL(4)^2; value/output GL(4)^2", "key bias; value/output bias"),
    "HeadByHead": ("2 x query/key GL(3)^1; 2 x value/output GL(3)^1", ""),
    "PixelAttention": (
        "query/key GL(6)^1; value/output GL(6)^1; relu neuron GL+(1)^5",
        "key bias; value/output bias",
    ),
    "Adapted": ("lora B/A GL(2)^1; bottleneck in/out GL(3)^1", "value/output bias"),
    "Normalised": ("gated neuron GL(1)^8", ""),
    "Seq2Seq": (
        "2 x query/key GL(4)^2; 2 x value/output GL(4)^2; relu neuron GL+(1)^12",
        "2 x key bias; 2 x value/output bias",
    ),
}


@pytest.mark.parametrize("name", HANDWRITTEN)
def test_a_model_of_ones_own_is_understood(name: str) -> None:
    model, inputs = handwritten()[name]
    found = find_symmetries(model, inputs)
    pairs, biases = HANDWRITTEN[name]
    assert Counter(f"{pair.kind} {pair.group}" for pair in found.pairs) == counts(pairs)
    assert redundant(model, found, reached=False) == counts(biases)
    assert len({pair.name for pair in found.pairs}) == len(found.pairs)
    assert all_hold(model, inputs, found)


@pytest.mark.parametrize(
    ("model", "sizes", "missing"),
    [
        (Einsum(5, 2, 2), (6, 5), 0),
        (HeadByHead(5, 2, 2), (6, 5), 0),
        (PartlyRotated(8, 1), (6, 8), 0),
        (ComplexRotary(6, 4, 2, 2, 5), (6, 6), 0),
        (Temperature(4, 2, 5), (5, 4), 0),
        (Adapted(4, 2), (6, 4), 20),  # the first layer itself can be what its update of rank 2 is
        (PixelAttention(4), (4, 3, 3), 0),
    ],
    ids=lambda each: type(each).__name__,
)
def test_no_dimension_is_missing(model: nn.Module, sizes: tuple[int, ...], missing: int) -> None:
    torch.manual_seed(0)
    model = model.eval()
    for w in model.parameters():
        w.data += 0.3 * torch.randn_like(w)
    found = orbit_dimension(find_symmetries(model, torch.randn(2, *sizes)), dict(model.named_parameters()))
    torch.manual_seed(1)  # whatever was drawn before
    count = 6 * sum(w.numel() for w in model.parameters()) // torch.Size(sizes).numel() + 8
    certificate = fibre_dimension(model, [torch.randn(1, *sizes) for _ in range(count)])
    assert not certificate.doubts
    assert found + missing == certificate.dimension


# --- what makes two pairs of one, and none ----------------------------------------------------------------------------

FACTORS = torch.tensor([2.0, 2.0, 2.0, 5.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("between", "groups"),
    [
        (lambda x: -3 * x, ["GL(4)^1"]),
        (lambda x: x * FACTORS, ["GL(1)^4"]),  # and what mixes them is free beside it
        (lambda x: x * torch.arange(1, 6, dtype=x.dtype)[:, None], ["GL(4)^1"]),  # a factor for each token
        (lambda x: torch.cat([x[..., :2].roll(1, 1), x[..., 2:]], -1), ["GL(2)^2"]),  # of the token before
        (lambda x: x[..., [1, 0, 3, 2]].flip(-1).roll(2, -1), ["GL(4)^1"]),  # the order it was in
        (lambda x: x.flip(-1), []),  # two orders that no view can have
        (lambda x: x.relu(), ["GL+(1)^4"]),
        (lambda x: x + 1, []),
        (lambda x: x.tanh(), []),
        (lambda x: x * x.mean(), []),
        (lambda x: x.cumsum(-1), []),
    ],
)
def test_what_comes_between_says_which_group_is_left(between: Callable[[Tensor], Tensor], groups: list[str]) -> None:
    """Scores of two linear maps with something in between."""
    model = Computed(lambda s, x: between(s.q(x)) @ s.k(x).mT, **linear("qk", 6, 4, bias=False)).eval()
    inputs = torch.randn(2, 5, 6, dtype=torch.float64)
    found = find_symmetries(model, inputs)
    assert sorted(pair.group for pair in found.pairs) == sorted(groups)
    assert all_hold(model, inputs, found) or not groups


def test_channels_of_their_own_inputs_are_not_mixed() -> None:
    """A depthwise kernel is read by one channel, and answers for it alone; it can stand in one pair."""
    layers = (nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 3, 1))
    model = nn.Sequential(*layers).double().eval()
    inputs = torch.randn(2, 2, 7, 7, dtype=torch.float64)
    found = find_symmetries(model, inputs)
    assert [(pair.group, pair.names) for pair in found.pairs] == [
        ("GL+(1)^4", ("0.weight", "0.bias", "2.weight")),
    ]
    assert any("is shared with" in refusal.reason for refusal in found.refused)
    assert all_hold(model, inputs, found)
    (pair,) = find_symmetries(model[2:].eval(), model[:2](inputs)).pairs
    assert (pair.group, pair.names) == ("GL(1)^4", ("2.weight", "2.bias", "3.weight"))


PAIRS, BIASES = ["query/key", "value/output"], ["key bias", "value/output bias"]


@pytest.mark.parametrize(
    ("body", "pairs", "biases"),
    [
        (attend, PAIRS, BIASES),
        (NETS["attn with a sink"], PAIRS, []),
        (NETS["sigmoid attn"], PAIRS, []),
        (NETS["two attentions less"], PAIRS, []),  # the weights of all keys add up to 1/2
        (lambda s, x: s.o((s.q(x) @ s.k(x).mT).softmax(-1) @ s.v(x) + s.v(x)), PAIRS, BIASES),
        (lambda s, x: s.o(2 * ((s.q(x) @ s.k(x).mT).softmax(-1) @ s.v(x))), PAIRS, BIASES),
        (NETS["shared qk"], PAIRS[1:], BIASES[1:]),
    ],
    ids=["softmax", "sink", "sigmoid", "difference", "skip", "twice", "shared"],
)
def test_biases_are_redundant_where_weights_of_all_keys_add_up_to_one_number(
    body: Body, pairs: list[str], biases: list[str]
) -> None:
    inputs = torch.randn(2, TOKENS, GIVEN)
    model, inputs = generic(Net(body, bias=True, pooled=False, words=False), inputs), inputs.double()
    found = find_symmetries(model, inputs)
    assert [pair.kind for pair in found.pairs] == pairs
    assert redundant(model, found) == Counter(biases)
    assert all_hold(model, inputs, found)


@pytest.mark.parametrize(
    ("second", "found"),
    [
        (lambda s, x, h, y: x, 1),
        (lambda s, x, h, y: h.sin(), 0),
        (lambda s, x, h, y: s.out.weight.T.sin(), 0),
        (lambda s, x, h, y: s.into.bias.sin(), 0),
        (lambda s, x, h, y: y @ s.into.weight.T, 0),
        (lambda s, x, h, y: s.out(s.into(y)), 1),
    ],
    ids=["nothing", "units", "weight", "bias", "transposed", "twice"],
)
def test_numbers_that_are_used_elsewhere_are_left_alone(second: Callable[..., Tensor], found: int) -> None:
    """A bottleneck of which something is used a second time."""

    def twice(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = s.into(x)
        return (y := s.out(h)), second(s, x, h, y)

    model = Computed(twice, into=nn.Linear(6, 3), out=nn.Linear(3, 6)).double().eval()
    inputs = torch.randn(2, 5, 6, dtype=torch.float64)
    match = find_symmetries(model, inputs)
    assert len(match.pairs) == found
    assert all_hold(model, inputs, match) or not found
