"""What is found in small nets is there, nothing that was found before is missing, and each orbit has one place."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quotient_manifolds.symmetries import balance, find_symmetries, random_representative
from quotient_manifolds.symmetries.canonical import canonical
from tests.nets.net import GIVEN, TOKENS, Body, Net, difference, generic
from tests.nets.parts import attend, tanh
from tests.nets.small import LIMIT, NETS, found_in, net

CHANGE, PLACE = 1e-8, 1e-6
ROUNDING = 1e-12
"""Of the largest number of all parameters: what is 0 at the canonical point."""


def _case(name: str, bias: bool) -> Any:
    reason = NETS[name].reason(bias)
    known = pytest.mark.xfail(strict=reason != LIMIT, reason=reason)  # where steps end is rounding
    return pytest.param(name, bias, marks=[known] if reason else [])


@pytest.mark.parametrize(("name", "bias"), [_case(name, bias) for name in NETS for bias in (True, False)])
def test_nothing_is_false_or_lost_and_an_orbit_has_one_place(name: str, bias: bool) -> None:
    model, x, found = found_in(name, bias)
    moved = random_representative(model, found, log_scale=0.5, seed=3)
    assert difference(model, x, moved) < CHANGE
    for stored in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        again = random_representative(model, stored, log_scale=0.5, seed=3)
        assert all(torch.equal(again[key], w) for key, w in moved.items())
    names = [each.name for each in found.every]
    assert len(set(names)) == len(names)
    sizes = [pair.group_dimension for pair in found.pairs]
    freedoms = sum(sum(each.families.values()) for each in found.reparameterizations)
    assert sum(sizes) + freedoms >= NETS[name].found(bias)
    here, there = (canonical(found.groups, params) for params in (dict(model.named_parameters()), moved))
    assert difference(model, x, here.params) < CHANGE
    if not (here.doubts or there.doubts):
        least = ROUNDING * max(float(w.detach().abs().max()) for w in here.params.values())
        for key, w in here.params.items():
            atol = max(least, PLACE * float(w.detach().abs().max()))
            torch.testing.assert_close(there.params[key], w, rtol=0, atol=atol, msg=key)


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
    "of channels of a mean": (lambda s, x: s.b(s.p_8 * s.o(x)) + s.v(s.norm(s.o(x)).tanh()), 160),
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


NARROW: dict[str, tuple[Body, int]] = {
    "answers beside other inputs": (lambda s, x: s.b_10_8(torch.cat([x, s.given[..., :2]], -1)), 3),
    "answers to two tokens": (lambda s, x: s.b_16_8(torch.cat([x, x.roll(1, 1)], -1)).relu(), 3),
    "answers to answers": (lambda s, x: (lambda y: s.b(y) * s.q_8_1(y).sigmoid())(s.c(x)), 3),
    "what a bias reaches beside a pair": (lambda s, x: (lambda y: y * s.q_8_1(y).sigmoid())(s.c(x)), 7),
}
"""Streams of more channels than inputs, of which there are so many, read without a bias."""


@pytest.mark.parametrize("name", NARROW)
def test_what_reads_a_narrow_stream_without_a_bias_keeps_the_function(name: str) -> None:
    body, given = NARROW[name]
    torch.manual_seed(0)
    x = torch.randn(24, TOKENS, given)
    model = Net(body, False, True, False, given)
    model.embed = nn.Linear(given, 8)
    model, x = generic(model, x[:2]), x.double()
    found = find_symmetries(model, x[:2])
    moved = random_representative(model, found, log_scale=0.5, seed=3)
    for params in (moved, balance(model, found), balance(moved, found)):
        assert difference(model, x, params) < CHANGE


AT: Body = lambda s, x: x + s.table(torch.arange(x.shape[1]))  # noqa: E731
LONGER: dict[str, Body] = {
    "averaged": AT,
    "summed": lambda s, x: s.c(AT(s, x).sum(1, keepdim=True)),
    "read": lambda s, x: s.b(tanh(s.a(AT(s, x)))),
    "attended": lambda s, x: attend(s, AT(s, x)),
    "less its mean": lambda s, x: s.c((lambda y: y - y.mean(1, keepdim=True))(AT(s, x))),
    "read alone": lambda s, x: x + s.c(tanh(s.a(s.table(torch.arange(x.shape[1]))))),
}
"""Streams of more channels than inputs, to which rows of a table are added."""


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("name", LONGER)
def test_longer_inputs_ask_for_other_rows_of_a_table(name: str, pooled: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(24, TOKENS, 3)
    model = Net(LONGER[name], True, pooled, False, 3)
    model, x = generic(model, x[:2]), x.double()
    found = find_symmetries(model, x[:2, :3])
    assert difference(model, x, random_representative(model, found, log_scale=0.5, seed=3)) < CHANGE


@pytest.mark.parametrize("seed", [1, 3])
def test_where_a_mean_has_no_place_balancing_keeps_the_function(seed: int) -> None:
    """What pairs measure of its readers, and where these lead it, do not settle."""
    torch.manual_seed(seed)
    x = torch.randn(24, TOKENS, 3)
    model = Net(lambda s, x: F.layer_norm(x + (s.q(x) @ s.k(x).mT).softmax(-1) @ s.v(x), (8,)), True, True, False, 3)
    model, x = generic(model, x[:2]), x.double()
    found = find_symmetries(model, x[:2])
    assert difference(model, x, balance(model, found)) < CHANGE


def test_lengths_that_no_scale_changes_do_not_lead_balancing_away() -> None:
    """A pair measures the depthwise weight by what reads it, which the same scale makes longer as this gets shorter."""
    model, x = net("of one length", True)
    balanced = balance(model, find_symmetries(model, x))
    assert 0.1 < float(balanced["a.weight"].norm()) < 10
