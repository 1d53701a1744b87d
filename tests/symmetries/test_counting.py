"""Dimensions and conditioning, against ranks of Jacobians and dense singular values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from quotient_manifolds.symmetries import Symmetries, count_symmetries, declare_pair, find_symmetries
from quotient_manifolds.symmetries.counting import singular_values
from quotient_manifolds.symmetries.pair import Group
from tests.models import BY_NAME


def test_the_group_has_as_many_dimensions_as_the_jacobian_has_redundant_ones() -> None:
    """Attention of width 4, 2 heads: outputs on many inputs leave exactly the group's directions undetermined."""
    model = nn.MultiheadAttention(4, 2, batch_first=True).double().eval()
    with torch.no_grad():
        for w in model.parameters():
            w.normal_()
    x = torch.randn(30, 3, 4, dtype=torch.float64)

    def answers(flat: torch.Tensor) -> torch.Tensor:
        params, start = {}, 0
        for name, w in model.named_parameters():
            params[name] = flat[start : start + w.numel()].reshape(w.shape)
            start += w.numel()
        return functional_call(model, params, (x, x, x), {"need_weights": False})[0].flatten()

    flat = torch.cat([w.detach().flatten() for w in model.parameters()])
    jacobian = torch.autograd.functional.jacobian(answers, flat)
    count = count_symmetries(model, find_symmetries(model, (x, x, x)))
    assert count.parameters == len(flat)
    # 2 pairs x 2 heads x 2^2, and 2 biases x 4
    assert count.families == {"query/key": 8, "value/output": 8, "redundant bias": 8}
    assert count.dimension == 24
    assert len(flat) - int(torch.linalg.matrix_rank(jacobian, rtol=1e-9)) == count.dimension
    assert count.share == pytest.approx(24 / 80)


def test_half_of_the_weights_are_redundant_where_the_head_is_as_wide_as_the_model() -> None:
    model, x = nn.MultiheadAttention(6, 1, bias=False).eval(), torch.randn(3, 2, 6)
    assert count_symmetries(model, find_symmetries(model, (x, x, x))).share == pytest.approx(0.5)


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
