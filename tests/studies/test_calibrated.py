"""GPTQ and Wanda, by what their formulas say of simple inputs; and what the study of rounding compares them with."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from quotient_manifolds.orbit import RoundingError
from quotient_manifolds.symmetries import find_symmetries
from studies.calibrated import gptq, moments, wanda
from studies.common import load
from studies.networks import data, trained
from studies.rounding import LANGUAGE_MODELS, _rotated, _scaled, less


def weight_and_inputs() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    mixing = torch.randn(32, 32, generator=draw, dtype=torch.float64)
    return torch.randn(24, 32, generator=draw, dtype=torch.float64), mixing @ torch.randn(
        32, 500, generator=draw, dtype=torch.float64
    )


def orthonormal() -> Tensor:
    return torch.linalg.qr(torch.randn(40, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q.mT


@pytest.mark.parametrize(
    "rounding",
    [RoundingError(4), RoundingError(3), RoundingError(3, 8, clip=True), RoundingError(4, 5)],
    ids=["4 bits", "3 bits", "3 bits, groups of 8, clipped", "4 bits, groups that do not divide"],
)
def test_gptq_has_less_error_of_outputs_than_rounding_to_nearest(rounding: RoundingError) -> None:
    W, X = weight_and_inputs()
    nearest = rounding.round({"W": W}, ["W"])["W"]
    errors = [float(((W - Q) @ X).square().sum()) for Q in (gptq(W, X @ X.mT, rounding), nearest)]
    assert errors[0] < 0.6 * errors[1]
    same = gptq(W, torch.eye(32, dtype=W.dtype), rounding)  # nothing to make up for
    assert torch.allclose(same, nearest, atol=1e-12)


def test_gptq_makes_up_for_an_error_by_least_squares() -> None:
    W, H = weight_and_inputs()[0][:, :3], torch.eye(3, dtype=torch.float64)
    H[0, 1] = H[1, 0] = 0.9
    first, second, _ = gptq(W, H, RoundingError(4)).mT
    step = W.abs().amax(1) / 7
    shift = (W[:, 0] - first) * 0.9 / (1 + 0.01)  # H and 1 % of its diagonal
    assert torch.allclose(second, ((W[:, 1] + shift) / step).round().clamp(-7, 7) * step)
    assert not torch.allclose(second, (W[:, 1] / step).round() * step)


def test_wanda_on_orthonormal_inputs_prunes_each_row_by_magnitude() -> None:
    W, X = weight_and_inputs()
    pruned = wanda(W, orthonormal() @ orthonormal().mT, 0.5)
    for row, left in zip(W, pruned, strict=True):
        kept = row.abs() > row.abs().sort().values[15]
        assert torch.equal(left, torch.where(kept, row, 0.0))
    louder = X * torch.linspace(1, 9, 32, dtype=X.dtype)[:, None]
    errors = [float(((W - each) @ louder).square().sum()) for each in (wanda(W, louder @ louder.mT, 0.5), pruned)]
    assert errors[0] < errors[1]


def test_moments_are_of_the_inputs_of_every_layer_and_of_tokens_that_count() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    x, own = torch.randn(2, 5, 3, dtype=torch.float64), dict(model.named_parameters())
    found = moments(model, {**own, "0.bias": own["0.bias"] + 1}, ["0.weight", "2.weight"], (x,))
    inner = (model[0](x) + 1).relu().flatten(0, 1)
    assert torch.allclose(found["0.weight"], x.flatten(0, 1).mT @ x.flatten(0, 1))
    assert torch.allclose(found["2.weight"], inner.mT @ inner)
    mask = torch.tensor([[True, True, False, False, False], [True] * 5])
    masked = moments(model, own, ["0.weight"], (x,), mask=mask)
    assert torch.allclose(masked["0.weight"], x[mask].mT @ x[mask])
    assert not model[0]._forward_hooks


# ---- the studies of rounding and alignment


def test_the_page_says_of_language_models_what_the_record_holds() -> None:
    rows = pd.DataFrame(load("alignment")["rows"]).query("kind == 'language model'")
    assert (rows["mean"] < rows[["a", "b"]].min(axis=1)).all()
    assert "worse than both" in (Path(__file__).parents[2] / "docs/orbit.md").read_text(encoding="utf-8")
    seeds = {row["seed"] for row in load("rounding")["rows"] if row["subject"] == "language model"}
    assert seeds == {*range(LANGUAGE_MODELS)}


def test_baselines_keep_the_function_and_are_rotations_and_scales_alone() -> None:
    model, x = trained("RMSNorm, digits", 0, 1), data("RMSNorm, digits")[1][0][:4]
    symmetries, own = find_symmetries(model, (x,)), {name: w.detach() for name, w in model.named_parameters()}
    objective = RoundingError(4)
    rotated, scaled = _rotated(symmetries, own, objective, 0), _scaled(symmetries, own, model, objective, 5)
    for params in (rotated, scaled):
        assert torch.allclose(functional_call(model, params, (x,)), model(x), atol=1e-5)
        assert (params["blocks.0.q.weight"] - own["blocks.0.q.weight"]).norm() > 0.005
    folded = own["blocks.0.q.weight"] * own["blocks.0.first.weight"]
    heads = [each["blocks.0.q.weight"].unflatten(0, (4, 16)).norm(dim=(1, 2)) for each in (own, rotated)]
    assert torch.allclose(folded.unflatten(0, (4, 16)).norm(dim=(1, 2)), heads[1], rtol=1e-5)
    ratio = scaled["blocks.0.q.weight"] / folded
    assert torch.allclose(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-4)  # a scale for each row


def test_the_interval_is_over_models_where_there_are_several() -> None:
    draw = np.random.default_rng(1)
    stored = 1 + 0.01 * draw.random((5, 16))
    low = stored * np.array([[0.2], [0.4], [0.5], [0.6], [0.8]])
    value, *ends = (float(each) for each in re.findall(r"\d+", less(stored, low)))
    assert value == 50
    assert ends[0] < 40
    assert ends[1] > 60
    assert less(stored[:1], low[:1]) == "80 % [80, 80]"
