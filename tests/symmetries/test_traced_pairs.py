"""Pairs found in the computation: the same as the tables of classes know, by the numbers of parameters they own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries import SymmetricPair, Symmetries, find_symmetries, prove_symmetries
from quotient_manifolds.symmetries.lora import ADAPTER
from quotient_manifolds.symmetries.strided_view import StridedView
from quotient_manifolds.symmetries.symmetries import Match
from quotient_manifolds.symmetries.trace import Trace
from quotient_manifolds.symmetries.traced_pairs import find_pairs

ATTENTION = ("query/key", "value/output", ADAPTER)
Owned = tuple[str, str, tuple[tuple[str, bytes], ...]]


def owned(pairs: Iterable[SymmetricPair], params: Mapping[str, Tensor]) -> Counter[Owned]:
    """Kind, group and the numbers of parameters of each pair of attention."""

    def of(pair: SymmetricPair) -> Owned:
        masks = Symmetries((pair,)).coverage(params)
        return (
            pair.kind,
            pair.group,
            tuple((name, mask.numpy().tobytes()) for name, mask in masks.items() if mask.any()),
        )

    return Counter(of(pair) for pair in pairs if pair.kind in ATTENTION)


def all_proved(model: nn.Module, inputs: object, found: Match) -> bool:
    symmetries = Symmetries(found.pairs, translations=found.translations)
    return prove_symmetries(model, inputs, symmetries, conditions=(10.0,)).all_proved


@pytest.mark.parametrize(
    "name",
    # packed, grouped, rotated by halves and by neighbours, partly rotated, latent, tables of positions, normalised,
    # gated, clipped, cross-attention, adapters of nothing
    ["gpt2", "phi3", "cohere", "gptj", "deepseek_v3", "sam_vision_model", "qwen3", "afmoe", "mpt/clipped", "t5gemma"],
)
def test_the_computation_tells_what_the_tables_know(name: str) -> None:
    pytest.importorskip("transformers")
    from quotient_manifolds.load import example_inputs
    from tests.small_models import build

    model = build(name)
    inputs = example_inputs(model)
    params = {each: value.detach() for each, value in model.named_parameters()}
    table, found = find_symmetries(model), find_pairs(Trace(model, inputs))
    assert owned(found.pairs, params) == owned(table.pairs, params)
    assert {shift.moved for shift in found.translations} >= {shift.moved for shift in table.translations}
    assert {refusal.kind for refusal in found.refused} >= {refusal.kind for refusal in table.refused}
    assert all_proved(model, inputs, found) or not found.pairs


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


def test_numbers_in_no_regular_order_have_no_strided_view() -> None:
    assert StridedView.of("w", 60, torch.tensor([[[0, 1, 5]]]), torch.arange(1)) is None
