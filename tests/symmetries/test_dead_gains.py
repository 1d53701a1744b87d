"""A norm's gain may be a number like 1e-33, as in pretrained models, where a channel died."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quotient_manifolds.symmetries import propose_symmetries, verify_symmetries


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dead", [1.0, 1e-9, 5e-33, 0.0])
def test_a_channel_without_gain_makes_no_other_one_constant_and_is_not_rotated(dead: float, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 2)).eval()
    norm = model[1]
    with torch.no_grad():
        norm.weight.copy_(torch.rand(8) + 0.5)
        norm.weight[:2] = torch.tensor([dead, 1.2 * dead])
        norm.bias.copy_(torch.randn(8))
    inputs = torch.randn(12, 6)
    found = propose_symmetries(model, inputs)
    assert found.families["constant input direction"] == 5  # a number for each row of the weight that follows
    assert ("hidden rotation" in found.families) == (dead >= 1e-9)
    refused = [each.name for each in found.refused if "gain" in each.reason]
    assert refused == ["0.weight hidden rotation"] * (dead < 1e-9)
    assert verify_symmetries(model, inputs, found).failed == {}
