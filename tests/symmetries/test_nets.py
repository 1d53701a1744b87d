"""What is found in small nets is there, nothing that was found before is missing, and each orbit has one place."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quotient_manifolds.symmetries import Symmetries, balance, find_symmetries, random_representative
from tests.symmetries.nets import FOUND, GIVEN, NETS, PLACES, TOKENS, Body, Net, generic, net

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


@pytest.mark.parametrize("name", ["pos", "positions first"])
def test_rows_of_weights_may_be_of_sizes_far_apart(name: str) -> None:
    """What rounding leaves of large rows is not taken for what small ones say."""
    model, x = net(name, True)
    with torch.no_grad():
        for w in model.parameters():
            if w.ndim == 2:
                w *= torch.logspace(-4, 3, len(w), dtype=w.dtype)[:, None]
    found = find_symmetries(model, x[:2])
    assert any("redundant bias" in each.name for each in found.reparameterizations)
    assert difference(model, x, random_representative(model, found, seed=3)) < CHANGE


AFTER_A_GAIN: dict[str, tuple[Body, int]] = {
    "of channels of a mean": (lambda s, x: s.b(s.p_8 * s.o(x)) + s.v(s.norm(s.o(x)).tanh()), 161),
    "of turned channels": (lambda s, x: s.b(s.p_8 * F.rms_norm(s.o(x), (8,))) + s.v(s.o(x)), 160),
    "of channels that read turned ones": (
        lambda s, x: s.b(F.rms_norm(s.o(x), (8,))) + s.v((s.p_8 * s.c(s.o(x))).tanh()),
        188,
    ),
}
"""Nets with a gain, and dimensions where some of it is 0."""


@pytest.mark.parametrize("name", AFTER_A_GAIN)
def test_a_gain_of_zero_takes_away_what_mixes_its_own_channels_alone(name: str) -> None:
    body, dimensions = AFTER_A_GAIN[name]
    torch.manual_seed(0)
    x = torch.randn(24, TOKENS, GIVEN)
    model, x = generic(Net(body, True, True, False), x[:2]), x.double()
    with torch.no_grad():
        model.p_8[[1, 4]] = 0.0
    found = find_symmetries(model, x[:2])
    assert difference(model, x, random_representative(model, found, seed=3)) < CHANGE
    assert sum(found.families.values()) == dimensions


@pytest.mark.parametrize("answer", ["nothing", "alone"])
def test_where_readers_answer_nothing_to_a_mean_or_nothing_else_balancing_keeps_the_function(answer: str) -> None:
    """Rounding is no answer: weights that read a stream may be centred, or see nothing but its mean."""
    model, x = net("norm and head", False)
    with torch.no_grad():
        mean = model.c.weight.mean(1, keepdim=True)
        model.c.weight.copy_(model.c.weight - mean if answer == "nothing" else mean.expand(8, 8))
    found = find_symmetries(model, x[:2])
    moved = random_representative(model, found, log_scale=0.5, seed=3)
    for params in (model, moved):
        assert difference(model, x, balance(params, found)) < CHANGE


def of_two_uses(s: Any, x: Tensor) -> Tensor:
    (x * s.p_8) @ s.h_8_8**2  # which scales follow, though nothing reads it
    return s.b(((x * s.g_1) @ F.normalize(s.h_8_8, dim=1)).tanh())


def test_where_no_length_shows_a_scale_balancing_keeps_the_function() -> None:
    torch.manual_seed(0)
    x = torch.randn(24, TOKENS, GIVEN)
    model, x = generic(Net(of_two_uses, True, True, False), x[:2]), x.double()
    found = find_symmetries(model, x[:2])
    assert difference(model, x, balance(model, found)) < CHANGE


def of_scores(s: Any, x: Tensor) -> Tensor:
    y = s.o_2_8(s.q_8_2(x))
    z = s.c(y)
    s.group(z.mT)  # which sees all of its channels, though nothing reads it
    y = ((s.q(z) @ s.k(y).mT * s.g_1).softmax(-1) @ s.v(y)).mT
    return s.o_2_8(s.q_8_2(s.deep(y).mT))


def test_where_readers_and_writers_meet_in_rounding_alone_balancing_keeps_the_function() -> None:
    torch.manual_seed(0)
    x = torch.randn(24, TOKENS, GIVEN)
    model, x = generic(Net(of_scores, True, True, False), x[:2]), x.double()
    with torch.no_grad():
        for w in model.parameters():
            if w.ndim == 2:
                w[-1] = w[0]
    found = find_symmetries(model, x[:2])
    moved = random_representative(model, found, log_scale=0.5, seed=3)
    for params in (model, moved):
        assert difference(model, x, balance(params, found)) < CHANGE
