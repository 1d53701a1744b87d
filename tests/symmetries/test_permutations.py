"""Units that may change places: neurons, heads, experts and channels, and those that must not."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from quotient_manifolds.symmetries import find_permutations
from quotient_manifolds.symmetries.double_precision import DoublePrecision
from quotient_manifolds.symmetries.groups import Permutation
from quotient_manifolds.symmetries.outputs import floating


class Net(nn.Module):
    """Compute a function of its modules and the inputs."""

    def __init__(self, function: Callable[[Net, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)
        self.register_buffer("numbers", 1 + torch.arange(8.0) / 4)
        self.register_buffer("pairs", torch.tensor([1.0, 2.0]).repeat_interleave(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _attention(net: Net, x: Tensor) -> Tensor:
    """Two queries for each of two keys and values, heads of 3 channels, a causal mask."""
    q, k, v = (f(x).view(*x.shape[:2], -1, 3).transpose(1, 2) for f in (net.q, net.k, net.v))
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    hidden = torch.ones(x.shape[1], x.shape[1]).triu(1) > 0
    weights = (q @ k.mT / 3**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    return x + net.o((weights @ v).transpose(1, 2).flatten(2))


def _mixture(net: Net, x: Tensor) -> Tensor:
    outputs = torch.stack([expert(x) for expert in net.experts], -1)
    return (outputs @ net.router(x).softmax(-1)[..., None])[..., 0]


def _expert() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5))


def _two(function: Callable[[Net, Tensor], Tensor], **modules: nn.Module) -> Net:
    """Return a net with eight units between two linear maps."""
    return Net(lambda net, x: net.b(function(net, net.a(x))), a=nn.Linear(5, 8), b=nn.Linear(8, 3), **modules)


def _idle(net: Net, x: Tensor) -> Tensor:
    """Add something to tokens of which these inputs have none."""
    some = torch.nonzero(x[0, :, 0] > 99)[:, 0]
    return net.b(net.a(x).tanh().index_add(1, some, net.c(net.a(x))[:, some].sin()))


def _words(x: Tensor) -> Tensor:
    return (7 * x[..., 0]).long() % 6


def _tied_twice(net: Net, x: Tensor) -> Tensor:
    read = net.t(_words(x)).sin() + net.t(_words(-x)).tanh()
    found: Tensor = net.b(read) + F.linear(read, net.t.weight)
    return found


def _parts(net: Net, x: Tensor) -> Tensor:
    """Use the first six units and the last six, of eight, in two ways."""
    first, last = net.a(x)[..., :6].tanh(), F.linear(x, net.a.weight[2:]).sin()
    found: Tensor = F.linear(first, net.b.weight[:, :6]) + F.linear(last, net.b.weight[:, 2:])
    return found


def _half_of_integers(x: Tensor) -> Tensor:
    made = torch.zeros(x.shape, dtype=torch.long)
    made.copy_(9 * x)
    return torch.cat([9 * x[..., :4], made[..., 4:].to(x)], -1)


class First(nn.Module):
    """A token that is a parameter before the others, of which it is added to each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.token = nn.Linear(5, 8), nn.Linear(8, 3), nn.Parameter(torch.randn(1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(len(x), 1, 8), self.a(x)], 1)
        found: Tensor = self.b((tokens + tokens[:, :1]).tanh())
        return found


class Stacked(nn.Module):
    """Three experts in one parameter, and a weight on the left."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 5, 4)), nn.Parameter(torch.randn(3, 4, 5))
        self.router, self.last = nn.Linear(5, 3), nn.Parameter(torch.randn(2, 5))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        outputs = torch.bmm(torch.bmm(rows.expand(3, *rows.shape), self.up).tanh(), self.down)
        found: Tensor = self.last @ (outputs * self.router(rows).softmax(-1).T[..., None]).sum(0).mT.sin()
        return found


QUERIES = {"q": nn.Linear(5, 12), "k": nn.Linear(5, 6), "v": nn.Linear(5, 6), "o": nn.Linear(12, 5)}
POST_NORM = nn.TransformerEncoder(
    nn.TransformerEncoderLayer(6, 3, 7, 0.0, batch_first=True), 2, enable_nested_tensor=False
)
CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "neurons": (nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3)), (8,)),
    "gated neurons": (
        Net(lambda net, x: net.o(F.silu(net.g(x)) * net.u(x)), g=nn.Linear(5, 8), u=nn.Linear(5, 8), o=nn.Linear(8, 3)),
        (8,),
    ),
    "grouped queries": (
        Net(_attention, **QUERIES),
        (2, 2, 2, 3, 3, 3, 3),
    ),
    "norms after sums": (
        nn.Sequential(nn.Linear(5, 6), POST_NORM, nn.Linear(6, 3)),
        (6, 3, 3, 7, 7, *[2] * 12),
    ),
    "experts": (
        Net(_mixture, experts=nn.ModuleList(_expert() for _ in range(3)), router=nn.Linear(5, 3)),
        (3, 4, 4, 4),
    ),
    "convolutions": (
        nn.Sequential(nn.Conv1d(4, 6, 3), nn.ReLU(), nn.Conv1d(6, 2, 2), nn.AdaptiveAvgPool1d(1)),
        (6,),
    ),
    "groups": (
        nn.Sequential(nn.Conv1d(4, 6, 3), nn.GroupNorm(3, 6), nn.GELU(), nn.Conv1d(6, 2, 2)),
        (3, 2, 2, 2),
    ),
    "padding": (
        Net(lambda net, x: net.b(F.pad(net.a(x).tanh(), (1, 1))), a=nn.Conv1d(4, 6, 3), b=nn.Conv1d(6, 2, 2)),
        (6,),
    ),
    "pooling": (
        Net(
            lambda net, x: net.b(F.avg_pool2d(F.max_pool2d(net.a(x[:, None]).tanh(), 2, 1), 2, 1)).flatten(1),
            a=nn.Conv2d(1, 6, 2),
            b=nn.Conv2d(6, 2, 1),
        ),
        (6,),
    ),
    "stacked experts": (
        Stacked(),
        (3, 5, 4, 4, 4),
    ),
    "tokens at places": (
        _two(lambda net, x: x.tanh()[:, torch.tensor([0, 2])]),
        (8,),
    ),
    "tokens that inputs choose": (
        Net(
            lambda net, x: net.b(net.a(x).tanh()[torch.arange(3), x[..., 0].argmax(1)]),
            a=nn.Linear(5, 8),
            b=nn.Linear(8, 3),
        ),
        (8,),
    ),
    "a first token": (First(), (8,)),
    "a recurrent state": (
        Net(lambda net, x: net.b(net.a(x)[0]), a=nn.LSTM(5, 8, batch_first=True), b=nn.Linear(8, 3)),
        (8,),
    ),
    "positions": (
        Net(
            lambda net, x: net.b(torch.tanh(net.a(x) + net.p(torch.arange(x.shape[1])))),
            a=nn.Linear(5, 8),
            b=nn.Linear(8, 3),
            p=nn.Embedding(4, 8),
        ),
        (8,),
    ),
    "a table read twice, and as a weight": (
        Net(_tied_twice, t=nn.Embedding(6, 8), b=nn.Linear(8, 6)),
        (8,),
    ),
    "selected tokens": (_two(lambda net, x: x.tanh().index_select(1, torch.tensor([0, 2]))), (8,)),
    "a unit put beside": (
        Net(lambda net, x: net.b(F.pad(net.a(x).tanh(), (1, 0))), a=nn.Linear(5, 8), b=nn.Linear(9, 3)),
        (8,),
    ),
    "a transposed convolution": (
        Net(lambda net, x: net.b(net.a(x).tanh()), a=nn.ConvTranspose1d(4, 6, 2), b=nn.Conv1d(6, 2, 2)),
        (6,),
    ),
    "the largest of windows, resized": (
        _two(lambda net, x: F.interpolate(F.max_pool1d(x.mT.tanh(), 2), size=7, mode="linear").mT),
        (8,),
    ),
    "products of all units": (
        Net(lambda net, x: net.a(x).sin() @ net.a(x).sin().mT, a=nn.Linear(5, 8)),
        (8,),
    ),
    "two functions": (
        _two(lambda net, x: torch.cat([x[..., :4].tanh(), x[..., 4:].sin()], -1)),
        (4, 4),
    ),
    "tokens of half of the units moved": (
        _two(lambda net, x: torch.cat([x[..., :4].roll(1, 1), x[..., 4:]], -1).tanh()),
        (4, 4),
    ),
    "one of them read as a number": (
        _two(lambda net, x: torch.tanh(x * float(x[0, 0, 0].detach()))),
        (7,),
    ),
    "half of them cut to integers": (
        _two(lambda net, x: torch.cat([x[..., :4].sin(), (9 * x[..., 4:].sin()).int()], -1)),
        (4, 4),
    ),
    "half of them assigned to integers": (
        _two(lambda net, x: _half_of_integers(x.sin())),
        (4, 4),
    ),
    "the largest of tokens": (_two(lambda net, x: x.tanh().max(1).values), (8,)),
    "constants of two kinds": (
        _two(lambda net, x: torch.tanh(net.pairs * x)),
        (8,),
    ),
}
"""Nets, and how many units each permutation has: heads, their channels, neurons and experts."""
DIFFER: dict[str, nn.Module] = {
    "a weight and minus it": Net(
        lambda net, x: net.b(torch.cat([net.a(x), F.linear(x, -net.a.weight)], -1).tanh()),
        a=nn.Linear(5, 1, bias=False),
        b=nn.Linear(2, 3),
    ),
    "a constant for each unit": _two(lambda net, x: torch.tanh(x) * net.numbers),
    "a constant for each unit within": _two(lambda net, x: torch.tanh(net.numbers + x)),
    "sums along units": _two(lambda net, x: torch.tanh(x).cumsum(-1)),
    "neighbours": _two(lambda net, x: torch.tanh(x + x.roll(1, -1))),
    "statistics": _two(lambda net, x: net.n(x.mT).mT.tanh(), n=nn.BatchNorm1d(8)),
    "tied": Net(lambda net, x: F.linear(net.a(x).tanh(), net.a.weight), a=nn.Linear(5, 5)),
    "weights of tokens": Net(lambda net, x: net.b(net.a(x).mT.softmax(-1)), a=nn.Linear(5, 8), b=nn.Linear(4, 3)),
    "an empty part put beside": _two(
        lambda net, x: x.tanh() + F.pad(net.w.weight[1:], (0, 0, 1, 0)), w=nn.Linear(8, 1, bias=False)
    ),
    "rows of one weight": Net(
        lambda net, x: net.b(F.linear(x, net.w.weight.expand(8, 5)).tanh()), w=nn.Linear(5, 1), b=nn.Linear(8, 3)
    ),
    "halves of one map, pooled": Net(
        lambda net, x: net.b(F.max_pool1d(net.a(x[..., :4].unflatten(-1, (2, 2))).flatten(-2).abs().mT, 2).mT),
        a=nn.Linear(2, 4),
        b=nn.Linear(8, 3),
    ),
    "overlapping parts": Net(_parts, a=nn.Linear(5, 8), b=nn.Linear(8, 3)),
    "products of pairs of units": Net(lambda net, x: net.a(x).sin().mT @ net.a(x).sin(), a=nn.Linear(5, 8)),
    "a norm of each unit": _two(lambda net, x: F.instance_norm(x.mT).mT.tanh() + x.roll(1, -1)),
    "idle": Net(_idle, a=nn.Linear(5, 8), b=nn.Linear(8, 3), c=nn.Linear(8, 8)),
    "a linear map": nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3)),
}
"""Nets of which units have a constant or a neighbour of their own, or are one."""
STILL: dict[str, tuple[int, ...]] = {
    "a constant for each unit": (8,),
    "a constant for each unit within": (8,),
    "statistics": (8,),
    "an empty part put beside": (8,),
    "rows of one weight": (8,),
    "halves of one map, pooled": (4,),
    "overlapping parts": (2, 4, 2),
    "a linear map": (8,),
}
"""How many may change places all the same: with constants in buffers, or where others differ."""


def _prepared(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = model.double().eval()
    for w in model.parameters():
        w.data += 0.1 * torch.randn(w.shape, generator=generator, dtype=w.dtype)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean += torch.randn(module.running_mean.shape, generator=generator)
    return model


def _inputs() -> Tensor:
    return torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _found(model: nn.Module) -> tuple[Permutation, ...]:
    return find_permutations(model, _inputs())


def fresh(name: str) -> nn.Module:
    """Return a net of the table with weights of its own, whatever other tests have made of it."""
    model, draw = copy.deepcopy(CASES[name][0]).double(), torch.Generator().manual_seed(3)
    for w in model.parameters():
        w.data = 0.4 * torch.randn(w.shape, generator=draw, dtype=torch.float64)
    return _prepared(model)


def state(model: nn.Module) -> dict[str, Tensor]:
    """Generic parameters, and the buffers: variances must stay positive."""
    generator = torch.Generator().manual_seed(5)
    drawn = {
        name: w.detach() + 0.3 * torch.randn(w.shape, generator=generator, dtype=torch.float64).to(w)
        for name, w in model.named_parameters()
    }
    return drawn | {name: w.detach().clone() for name, w in model.named_buffers()}


def change(model: nn.Module, before: dict[str, Tensor], after: dict[str, Tensor], batch: Any) -> float:
    """By how much outputs differ, relative: the model itself is called."""
    outputs = []
    for params in (before, after):
        args, kwargs = ((), batch) if isinstance(batch, dict) else ((batch,), {})
        with torch.no_grad(), DoublePrecision():  # norms cast to float32
            outputs.append(floating(torch.func.functional_call(model, params, args, kwargs)))
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*outputs, strict=True))


def check_true(model: nn.Module, batch: Any, made: tuple[Permutation, ...]) -> None:
    model, before = model.double(), state(model.double())
    for each in made:
        for order in (torch.arange(each.units).roll(1), torch.arange(each.units).flip(0)):
            after = each.act(before, order)
            assert any(not torch.equal(after[name], before[name]) for name in each.names)
            assert change(model, before, after, batch) < 1e-9


@pytest.mark.parametrize("name", CASES)
def test_units_in_any_order_compute_the_same(name: str) -> None:
    """All units are found, and no order of them changes what the model computes; that of one part alone does."""
    model = fresh(name)
    found = _found(model)
    assert Counter(each.units for each in found) == Counter(CASES[name][1])
    check_true(model, _inputs(), found)
    before = state(model)
    for each in found:
        order = torch.arange(each.units).roll(1)
        parts = (Permutation((part,)).act(before, order) for part in each.parts)  # no output depends on a key's bias
        assert max(change(model, before, part, _inputs()) for part in parts) > 1e-6


@pytest.mark.parametrize("name", DIFFER)
def test_what_is_found_where_units_differ_moves_their_constants(name: str) -> None:
    """Units that differ by constants in buffers change places with these, others do not at all."""
    model, expected = _prepared(DIFFER[name]), STILL.get(name, ())
    found = _found(model)
    assert Counter(each.units for each in found) == Counter(expected)
    check_true(model, _inputs(), found)


def test_an_assignment_undoes_an_order() -> None:
    """Rows of numbers tell where each unit went."""
    model = fresh("experts")
    before = {key: w.detach() for key, w in model.named_parameters()}
    for each in _found(model):
        moved = each.act(before, torch.arange(each.units).roll(1))
        distances = torch.cdist(each.numbers(before), each.numbers(moved))
        moved = each.act(moved, torch.as_tensor(linear_sum_assignment(distances.numpy())[1]))
        assert all(torch.equal(moved[key], w) for key, w in before.items())


def test_an_expert_that_did_not_run_holds_the_others() -> None:
    """Experts and their neurons are left out if one of them did not run."""
    model = fresh("experts")
    model.function = lambda net, x: net.experts[0](x) + net.experts[1](x)
    assert not _found(model)


def test_an_order_has_each_unit_once() -> None:
    """An order that drops a unit is refused."""
    model = fresh("neurons")
    (neurons,) = _found(model)
    with pytest.raises(ValueError, match="order must be a permutation of 0 to 7"):
        neurons.act(state(model), torch.zeros(8, dtype=torch.int64))
