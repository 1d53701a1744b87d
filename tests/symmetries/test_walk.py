"""A walk says which parameters write and read each channel; tokens of a replay give the charges of their wires."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quotient_manifolds.symmetries.charges.nodes import Nodes, Tie, distinct_columns
from quotient_manifolds.symmetries.charges.samples import Sample, samples
from quotient_manifolds.symmetries.charges.walk import Walk
from quotient_manifolds.symmetries.outputs import answer
from quotient_manifolds.symmetries.trace.record import record
from tests.symmetries.nets import NETS, Computed, net


def walked(model: nn.Module, x: Tensor) -> tuple[Walk, dict[str, Tensor]]:
    return Walk(record(model, x, answer)), {name: w.detach() for name, w in model.named_parameters()}


def sample(walk: Walk, weights: dict[str, Tensor], x: Tensor, seed: int = 0, **options: bool) -> Sample:
    (made,) = samples(walk, weights, [x], 1, torch.Generator().manual_seed(seed), **options)
    return made


def gradients(model: nn.Module, weights: dict[str, Tensor], x: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """By autograd, of the loss of `sample`."""
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    y = torch.func.functional_call(model, leaves, (x,))
    up = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=y.dtype)
    loss = (up * y).sum() / y.detach().square().mean().sqrt()
    return dict(zip(leaves, torch.autograd.grad(loss, [*leaves.values()], materialize_grads=True), strict=True))


@pytest.mark.parametrize("part", range(4))
def test_products_of_tokens_are_the_gradients_of_autograd(part: int) -> None:
    """dL/dW = sum over tokens of dy x^T, for each weight with one use, whatever the operations around it."""
    compared = 0
    for name in list(NETS)[part::4]:
        model, x = net(name, True)
        walk, weights = walked(model, x[:3])
        found = sample(walk, weights, x[:3], generic=False)
        used = [*(use.entries for use in walk.uses), *(gain.entries for gain in walk.gains), walk.leaves.nonzero()]
        entries = Counter(e for each in (*used, *walk.entries.made.values()) for e in each.flatten().tolist())
        flat = torch.cat([g.reshape(-1) for g in gradients(model, weights, x[:3]).values()])
        for n, use in enumerate(walk.uses):
            alone = use.memory in walk.entries.plain and max(entries[e] for e in use.entries.unique().tolist()) == 1
            if not alone or n not in found.read or use.entries.shape[2] > 1:
                continue
            product = found.written[n].slopes.T @ found.read[n].values
            error = (product - flat[use.entries[..., 0]]).norm()
            assert error <= 1e-9 * (product.norm() + 1e-6 * flat.norm()), name
            compared += 1
    assert compared > 100


def heads(s: Computed, x: Tensor) -> Tensor:
    q, k, v = (each(x).unflatten(-1, (2, 3)).transpose(1, 2) for each in (s.q, s.k, s.v))
    return s.o((q @ k.mT).softmax(-1).matmul(v).transpose(1, 2).flatten(2))


def test_the_charge_of_heads_vanishes_at_other_weights_and_that_of_a_mixture_of_heads_does_not() -> None:
    """C = sum dq q^T - (sum dk k^T)^T is 0 in the block of each head, and nowhere else."""
    torch.manual_seed(0)
    model = Computed(heads, **{name: nn.Linear(6, 6, bias=False) for name in "qkvo"}).double()
    x = torch.randn(4, 5, 6).double()
    walk, weights = walked(model, x)
    channels, use = walk.channels, dict(zip("qkvo", walk.uses, strict=True))
    assert torch.equal(channels.wires[use["q"].out], channels.wires[use["k"].out])
    assert bool((channels.dual[use["q"].out] ^ channels.dual[use["k"].out]).all())
    assert torch.equal(channels.wires[use["v"].out], channels.wires[use["o"].into])
    other = {name: torch.randn_like(w) for name, w in weights.items()}
    found = sample(walk, other, torch.randn_like(x))
    q, k, v = found.written[0], found.written[1], found.written[2]
    o = found.read[3]
    same = torch.block_diag(*[torch.ones(3, 3)] * 2).bool()
    for charge in (q.slopes.T @ q.values - (k.slopes.T @ k.values).T, v.slopes.T @ v.values - o.slopes.T @ o.values):
        assert float(charge[same].abs().max()) < 1e-12
        assert float(charge[~same].abs().min()) > 1e-6


def test_gains_are_other_units_of_one_wire() -> None:
    """u = gain of the norm between writer and reader, and a scale of their weights in these units has no charge."""
    torch.manual_seed(0)
    model = Computed(
        lambda s, x: s.b(s.g * F.rms_norm(s.a(x), (4,), eps=1e-6)),
        a=nn.Linear(3, 4, bias=False),
        b=nn.Linear(4, 2, bias=False),
        g=nn.Parameter(torch.randn(4)),
    ).double()
    x = torch.randn(5, 3).double()
    walk, weights = walked(model, x)
    (gain,) = walk.gains
    reading = walk.entries.read(weights.__getitem__)
    values, slopes = reading.at(gain.memory, gain.places)
    assert torch.equal(values, weights["g"])
    assert torch.equal(slopes, torch.ones(4).double())
    assert gain.power == 1
    units = walk.channels.units(values)
    torch.testing.assert_close(units[walk.uses[1].into] / units[gain.before], weights["g"])


def test_functions_of_parameters_are_parameters_with_slopes() -> None:
    torch.manual_seed(0)
    model = Computed(
        lambda s, x: x @ torch.cat([2 * s.w[:, 1:], s.w[:, :1].exp()], 1).T, w=nn.Parameter(torch.randn(3, 4))
    ).double()
    walk, weights = walked(model, torch.randn(5, 4).double())
    (use,) = walk.uses
    w = weights["w"]
    assert torch.equal(use.entries[..., 0], torch.arange(12).view(3, 4).roll(-1, 1))
    values, slopes = walk.entries.read(weights.__getitem__).at(use.memory, use.places[..., 0])
    torch.testing.assert_close(values, torch.cat([2 * w[:, 1:], w[:, :1].exp()], 1))
    torch.testing.assert_close(slopes, torch.cat([torch.full((3, 3), 2.0).double(), w[:, :1].exp()], 1))


def test_units_follow_joins_in_any_order_and_across_contragredients() -> None:
    """Against the definition, join by join: b = gain a, c = 1 / (3 b), and d the same channel as c."""
    nodes = Nodes()
    a, b, c, d = (nodes.add(2) for _ in range(4))
    nodes.join(c, d)
    nodes.join(a, b, Tie.GAIN, gain=nodes.add_gains(2))
    nodes.join(b, c, dual=True, const=3.0)
    channels = nodes.settled()
    gains = torch.tensor([2.0, 5.0]).double()
    units = channels.units(gains)
    torch.testing.assert_close(units[b], gains * units[a])
    torch.testing.assert_close(units[c] * units[b], torch.full((2,), 3.0).double())
    torch.testing.assert_close(units[d], units[c])
    assert channels.dual[a].tolist() == channels.dual[b].tolist() != channels.dual[c].tolist()
    assert len(channels.wires[torch.cat([a, b, c, d])].unique()) == 2


def test_distinct_columns_are_those_of_unique() -> None:
    matrix = torch.randint(4, (3, 50))
    first, which = distinct_columns(matrix)
    assert torch.equal(matrix[:, first][:, which], matrix)
    assert len(first) == torch.unique(matrix, dim=1).shape[1]
    assert all(which[:place].ne(n).all() for n, place in enumerate(first.tolist()))
