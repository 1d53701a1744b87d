"""Permutations that charges' walk proposes in blocks and models, against these themselves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries.charges.answers import Answers
from quotient_manifolds.symmetries.charges.permutations import permutations
from quotient_manifolds.symmetries.charges.walk import Walk
from quotient_manifolds.symmetries.groups import Permutation
from quotient_manifolds.symmetries.outputs import answer
from quotient_manifolds.symmetries.trace.record import record
from tests.nets import blocks, model_types
from tests.symmetries.test_permutations import DIFFER, Net, _inputs, _prepared, change, check_true, fresh, state


def found(model: nn.Module, batch: Any) -> tuple[Permutation, ...]:
    answers = Answers(model, batch, None, torch.Generator().manual_seed(0))
    return permutations(
        Walk(record(model, batch, answer), keep=True), lambda before, after: answers.change(before, after)[0]
    )


HEADS = (2, 4, 4, 4, 4, 6, 8)
"""Of a block of attention and two layers: heads, their channels of queries and values, neurons, and the stream."""
OTHERS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("LoRA beside its base", "bilinear", "maxout"), (2, *HEADS)),
    "mixture of experts": (2, 3, 3, 3, 3, 4, 4, 4, 4, 8),
    "depthwise convolution": (6, 8),
    "full convolution": (6, 8, 8),
    "multi-latent attention": (3, 3, *HEADS),
    "norm per head": (2, 4, 6, 8),
    "norms of queries and keys": (2, 4, 4, 4, 6, 8),
    "grouped queries": (2, 4, 4, 6, 8),
    "class token with positions": (2, *HEADS[:-1], *HEADS[1:]),
    "two streams": (6, 6, 8, 8),
    "BatchNorm": (6, 8),
}
MODELS = {
    **{name: {4: 1, 24: 1, 8: 8} for name in ("vit", "bert", "gpt2")},
    **{name: {24: 1, 2: 3, 4: 1, 8: 2} for name in ("llama", "qwen3")},
    "t5": {4: 3, 24: 2, 8: 24},
    "mixtral": {24: 2, 2: 3, 4: 1, 8: 2},
}
"""How many units permutations have, and how many permutations have as many."""


@pytest.mark.parametrize("name", blocks.BLOCKS)
def test_units_of_blocks(name: str) -> None:
    model, x = blocks.build(name)
    made = found(model, x[:4])
    assert Counter(each.units for each in made) == Counter(OTHERS.get(name, HEADS))
    check_true(model, x[4:9], made)


@pytest.mark.parametrize("name", MODELS)
def test_heads_neurons_and_groups_of_models(name: str) -> None:
    """Grouped queries change places within their group, and groups as a whole."""
    model = model_types.build(name)
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(3, 60, (2, 6), generator=generator)
    batch: dict[str, Tensor] = {"input_ids": words}
    if name == "vit":
        batch = {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64)}
    if name == "t5":
        batch["decoder_input_ids"] = words[:, 1:]
    model = model.double()
    made = found(model, batch)
    assert Counter(each.units for each in made) == MODELS[name]
    check_true(model, batch, made)
    if name in ("llama", "mixtral", "qwen3"):
        queries = [each for each in made if any("q_proj" in n for n in each.names) and each.units == 2]
        keys = [any("k_proj" in n for n in each.names) for each in queries]
        assert sorted(keys) == [False, False, True]


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 2), nn.BatchNorm2d(5), nn.ReLU(),
        nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(5, 3),
    )  # fmt: skip


@pytest.mark.parametrize("trained", [False, True])
def test_statistics_of_batch_norm_change_places(trained: bool) -> None:
    """Also fresh ones, 0 and 1, which are the same for all channels; without them outputs change."""
    torch.manual_seed(0)
    model = _convolutions().double()
    if trained:
        model(3 * torch.randn(9, 2, 6, 6, dtype=torch.float64) + 1)
    model.eval()
    x = torch.randn(3, 2, 6, 6, dtype=torch.float64)
    made = found(model, x)
    assert sorted(each.units for each in made) == [5, 6]
    before = state(model)
    for name in before:
        if "running" in name:
            before[name] = torch.rand(before[name].shape, dtype=torch.float64) + 0.5
    for each in made:
        assert sum("running" in name for name in each.names) == 2
        after = each.act(before, torch.arange(each.units).roll(1))
        assert change(model, before, after, x) < 1e-12
        without = after | {name: w for name, w in before.items() if "running" in name}
        assert change(model, before, without, x) > 1e-6


def test_what_is_refused_is_told_with_its_number() -> None:
    """Running sums along units are no function of each alone: the exchange is tried, and dropped."""
    model = _prepared(DIFFER["sums along units"])
    refused: list[Any] = []
    answers = Answers(model, _inputs(), None, torch.Generator().manual_seed(0))
    walk = Walk(record(model, _inputs(), answer), keep=True)
    assert not permutations(walk, lambda before, after: answers.change(before, after)[0], refused=refused)
    assert refused
    assert all(each.change > 1e-6 for each in refused)


def test_experts_that_are_a_list_and_an_order_is_undone() -> None:
    model = fresh("experts")
    before, order = state(model), torch.tensor([2, 0, 1])
    (experts,) = (each for each in found(model, _inputs()) if each.units == 3)
    after = experts.act(before, order)
    torch.testing.assert_close(experts.numbers(after), experts.numbers(before)[order], rtol=0, atol=0)
    assert all(torch.equal(w, before[name]) for name, w in experts.act(after, order.argsort()).items())


def test_constants_of_positions_stay() -> None:
    """A table of positions is added to channels, but not one number to each."""
    net = Net(
        lambda net, x: net.b(torch.tanh(net.a(x) + net.table[: x.shape[1]])),
        a=nn.Linear(5, 8),
        b=nn.Linear(8, 3),
    )
    net.register_buffer("table", torch.randn(9, 8, generator=torch.Generator().manual_seed(2)))
    assert not found(_prepared(net), _inputs())
