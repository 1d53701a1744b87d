"""The symmetries of networks that the small quotients represent, and what is particular to each of these."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from quotient_manifolds.manifolds import (
    FixedRankQuotient,
    QuotientManifold,
    RotaryQuotient,
    ScaleQuotient,
    TranslationQuotient,
)
from quotient_manifolds.symmetries import find_symmetries
from tests.nets.attention import IDS, llama

exact = {"rtol": 1e-9, "atol": 1e-9}


def point(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_llama_does_not_notice_complex_numbers() -> None:
    """One number for every frequency plane, to its queries and keys; not to one side, nor all of GL(2) on a plane."""
    model = llama().double()
    weights = {name: w.detach() for name, w in model.named_parameters()}
    pair = next(pair for pair in find_symmetries(model, IDS).pairs if pair.group.startswith("GL(1, C)"))
    manifold, x = pair.manifold(), pair.read(weights)
    assert isinstance(manifold, RotaryQuotient)
    A = torch.randn(len(x), generator=torch.Generator().manual_seed(0), dtype=torch.complex128)

    def logits(y: Tensor) -> Tensor:
        out = {name: w.clone() for name, w in weights.items()}
        pair.write(out, y)
        return functional_call(model, out, (), IDS).logits

    before, y = logits(x), manifold.action(A, x)
    torch.testing.assert_close(logits(y), before, rtol=1e-9, atol=1e-9)
    one_side = torch.cat([y[:, : manifold.n], x[:, manifold.n :]], dim=1)
    real = FixedRankQuotient(manifold.n, manifold.m)  # all of GL(2) on a plane
    for changed in (one_side, real.action(torch.tensor([[1.0, 0.3], [0.0, 1.0]], dtype=torch.float64), x)):
        assert (logits(changed) - before).norm() > 1e-3 * before.norm()


def test_the_canonical_rotary_point() -> None:
    manifold, x = RotaryQuotient(3, 2), point(4, 5)
    g, k = manifold.split(manifold.balance(x))
    torch.testing.assert_close(g.norm(dim=-1), k.norm(dim=-1))
    peak = g.gather(-1, g.abs().argmax(-1, keepdim=True))
    assert bool((peak.real > 0).all())
    torch.testing.assert_close(peak.imag, torch.zeros_like(peak.imag), rtol=0, atol=1e-12)


def test_coordinates_at_the_canonical_rotary_point_are_those_here() -> None:
    """`from_balanced` takes coordinates of a vector there to those of the same quotient vector here."""
    manifold, x = RotaryQuotient(3, 2), point(4, 5)
    balanced = manifold.balance(x)
    A = manifold.split(balanced)[0][..., 0] / manifold.split(x)[0][..., 0]  # from the balanced point to x
    there, here = manifold.at(balanced), manifold.at(x)
    z = there.project(there.coordinates(point(4, 5, seed=1)))
    torch.testing.assert_close(manifold.action(A, balanced), x, **exact)
    torch.testing.assert_close(here.vector(here.from_balanced(z)), manifold.action(A, there.vector(z)), **exact)


def test_the_relaxed_rotary_metric_stays_invariant_under_phases() -> None:
    manifold, x, eta = RotaryQuotient(3, 2, "mix", eps=0.4), point(5), point(5, seed=1)
    phase = torch.polar(torch.tensor(1.0).double(), torch.tensor(0.7).double())
    there = manifold.at(manifold.action(phase, x))
    torch.testing.assert_close(there.norm(manifold.action(phase, eta)), manifold.at(x).norm(eta))
    double = manifold.at(manifold.action(torch.tensor(2.0), x))
    assert abs(double.norm(manifold.action(torch.tensor(2.0), eta)) - manifold.at(x).norm(eta)) > 1e-3


@pytest.mark.parametrize("length", [0.0, 1e-5, 9e-3, 1.1e-2, 5.0])
def test_circles_are_accurate_to_rounding_and_smooth_at_rest(length: float) -> None:
    x = torch.tensor([2.0, 0.0], dtype=torch.float64)
    y = ScaleQuotient().expmap(x, torch.tensor([0.0, 2.0 * length], dtype=torch.float64))
    expected = torch.tensor([2 * math.cos(length), 2 * math.sin(length)], dtype=torch.float64)
    torch.testing.assert_close(y, expected, rtol=2e-15, atol=0)
    space, z = ScaleQuotient().at(x), torch.tensor([0.0, length], dtype=torch.float64, requires_grad=True)
    for order in ("second", "exact"):
        torch.autograd.gradgradcheck(lambda z, order=order: space.follow(z, order)[0], z)


def normalised(w: Tensor, data: Tensor) -> Tensor:  # three units, one point each
    return F.batch_norm(data @ w.T, None, None, training=True, eps=1e-100)


@pytest.mark.parametrize(
    ("manifold", "shape", "A", "output"),
    [
        (ScaleQuotient(), (3, 4), torch.tensor([0.1, 2.0, 30.0], dtype=torch.float64), normalised),
        (TranslationQuotient(), (4,), torch.tensor(5.0, dtype=torch.float64), lambda b, data: (data + b).softmax(-1)),
    ],
    ids=["weights in front of a normalisation", "biases of a softmax"],
)
def test_gradients_of_an_invariant_loss_are_horizontal(
    manifold: QuotientManifold, shape: tuple[int, ...], A: Tensor, output: Callable[[Tensor, Tensor], Tensor]
) -> None:
    data, x = torch.randn(20, 4, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    target = torch.randn(output(x, data).shape, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        return ((output(x, data) - target) ** 2).mean()

    torch.testing.assert_close(loss(manifold.action(A, x)), loss(x), **exact)
    assert abs(loss(-x) - loss(x)) > 1e-3
    assert manifold.check_vector_on_tangent(x, manifold.at(x).vector(manifold.at(x).covector(torch.func.grad(loss)(x))))
