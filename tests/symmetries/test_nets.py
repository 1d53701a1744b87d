"""What is found in small nets is there, nothing that was found before is missing, and each orbit has one place."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries import Symmetries, balance, find_symmetries, random_representative
from tests.symmetries.nets import FOUND, NETS, PLACES, net

CHANGE, PLACE = 1e-8, 1e-6
COUNTS = dict(each.split(": ") for each in " ".join(FOUND.split()).split("; "))
SEVERAL_PLACES = " ".join(PLACES.split()).split("; ")


def shown(name: str, x: Tensor) -> Tensor:
    """What symmetries are found on: those of shorter sequences hold for longer ones, those of some experts for all."""
    x = x[:, :1] if name.startswith("one token") else x
    return x[:, :3] if name.startswith("short") else -x.abs() if name.startswith("idle") else x


@cache
def found_in(name: str, bias: bool) -> tuple[nn.Module, Tensor, Symmetries]:
    model, x = net(name, bias)
    return model, x, find_symmetries(model, shown(name, x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_nothing_is_false_or_lost_and_an_orbit_has_one_place(name: str, bias: bool) -> None:
    model, x, found = found_in(name, bias)
    moved = random_representative(model, found, log_scale=0.5, seed=3)
    assert difference(model, x, moved) < CHANGE
    names = [each.name for each in found.every]
    assert len(set(names)) == len(names)
    sizes = [pair.group_dimension for pair in found.pairs]
    before = COUNTS[name].split()[not bias].partition("/")[0]
    assert sum(sizes) + sum(sum(each.families.values()) for each in found.reparameterizations) >= int(before)
    if name in SEVERAL_PLACES:
        return
    here, there = (balance(params, found) for params in (model, moved))
    assert difference(model, x, here) < CHANGE
    for key, w in here.items():
        torch.testing.assert_close(there[key], w, rtol=0, atol=PLACE * float(w.abs().max()), msg=key)


@torch.no_grad()
def difference(model: nn.Module, x: Tensor, params: dict[str, Tensor]) -> float:
    answer = model(x)
    return float((torch.func.functional_call(model, params, (x,)) - answer).abs().max() / answer.abs().max())
