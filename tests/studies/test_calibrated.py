"""GPTQ and Wanda, by what their formulas say of simple inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.orbit import RoundingError
from studies.calibrated import gptq, moments, wanda


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
    W, X = weight_and_inputs()
    W, H = W[:, :2], (X @ X.mT)[:2, :2]
    first, second = gptq(W, H, RoundingError(4)).mT
    step = W.abs().amax(1) / 7
    shift = (W[:, 0] - first) * H[0, 1] / (H[1, 1] + 0.01 * H.diagonal().mean())
    assert torch.allclose(second, ((W[:, 1] + shift) / step).round().clamp(-7, 7) * step)
    assert not torch.allclose(second, (W[:, 1] / step).round().clamp(-7, 7) * step)


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
