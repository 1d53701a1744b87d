"""Dimensions, and conditioning against dense singular values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries import Symmetries, count_symmetries, declare_pair, find_symmetries
from quotient_manifolds.symmetries.counting import singular_values
from quotient_manifolds.symmetries.pair import Group
from tests.nets.attention import BY_NAME


def test_the_dimensions_of_all_symmetries_are_counted() -> None:
    """Attention of width 4, 2 heads: 2 pairs x 2 heads x 2^2, and 2 biases x 4."""
    model, x = nn.MultiheadAttention(4, 2, batch_first=True).eval(), torch.randn(2, 3, 4)
    count = count_symmetries(model, find_symmetries(model, (x, x, x)))
    assert count.families == {"query/key": 8, "value/output": 8, "redundant bias": 8}
    assert (count.parameters, count.dimension, count.share) == (80, 24, 24 / 80)


def test_other_groups_count_their_own_dimensions() -> None:
    model = nn.Module()
    model.G, model.H = nn.Parameter(torch.randn(10, 2)), nn.Parameter(torch.randn(15, 2))
    groups: dict[Group, tuple[int, Callable[[Tensor], Tensor]]] = {
        "GL(h)": (20, lambda w: w.view(5, -1, 2)),
        "GL(1, C)": (10, lambda w: w.view(5, -1, 2)),
        "GL+(1)": (2, lambda w: w.T[:, :, None]),
    }
    for acts, (dimension, cut) in groups.items():
        pair = declare_pair(model, "p", "own", G=lambda w, c=cut: c(w["G"]), H=lambda w, c=cut: c(w["H"]), acts=acts)
        assert count_symmetries(model, Symmetries((pair,))).dimension == dimension


def test_conditioning_is_that_of_the_dense_products() -> None:
    model = BY_NAME["BERT"].build()
    found = BY_NAME["BERT"].found(model)
    params = {name: w.detach().double() for name, w in model.named_parameters()}
    for pair, each in zip(found.pairs, count_symmetries(model, found).conditioning, strict=True):
        x = pair.read(params)
        s = torch.linalg.svdvals(x[:, : pair.n] @ x[:, pair.n :].mT)[:, : pair.h]
        torch.testing.assert_close(singular_values(pair, params), s, rtol=1e-9, atol=1e-12)
        assert each.pair == pair.name
        assert each.largest == pytest.approx(float(s.max()))
        assert each.smallest == pytest.approx(float(s.min()))
        assert each.ratio == pytest.approx(float((s[:, 0] / s[:, -1]).max()))


def test_a_deficient_pair_has_an_infinite_ratio_that_json_can_hold() -> None:
    model = BY_NAME["BERT"].build()
    with torch.no_grad():
        layer = model.encoder.layer[0].attention.self.query
        layer.weight[1] = 2 * layer.weight[0]
        layer.bias[1] = 2 * layer.bias[0]
    count = count_symmetries(model, BY_NAME["BERT"].found(model))
    assert math.isinf(count.conditioning[0].ratio)
    assert count.conditioning[0].smallest == 0
    assert json.loads(json.dumps(count.to_dict(), allow_nan=False))["conditioning"][0]["ratio"] is None
