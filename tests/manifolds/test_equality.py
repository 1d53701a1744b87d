"""Equal manifolds compare equal, and modules, sets, copies and parameters of geoopt live with that."""

from __future__ import annotations

import copy
import pickle

import geoopt
import pytest
import torch

from quotient_manifolds.manifolds import (
    DiagonalQuotient,
    FixedRankQuotient,
    Recipe,
    RotaryQuotient,
    ScaleQuotient,
    TranslationQuotient,
)


def rescale(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return a * x


def metric(x: torch.Tensor, eta: torch.Tensor, zeta: torch.Tensor) -> torch.Tensor:
    return (eta * zeta).sum() / (x * x).sum()


MAKERS = [
    lambda: FixedRankQuotient(4, 3),
    lambda: FixedRankQuotient(3, 4),
    lambda: FixedRankQuotient(4, 3, "mix"),
    lambda: FixedRankQuotient(4, 3, 0.5),
    lambda: FixedRankQuotient(4, 3, eps=0.1),
    lambda: RotaryQuotient(4, 3),
    lambda: RotaryQuotient(4, 3, eps=0.1),
    DiagonalQuotient,
    lambda: DiagonalQuotient("mix"),
    ScaleQuotient,
    TranslationQuotient,
    lambda: Recipe(rescale, metric, shape=(2,), identity=torch.ones(())),
    lambda: Recipe(rescale, metric, shape=(3,), identity=torch.ones(())),
    lambda: Recipe(rescale, metric, shape=(2,), identity=torch.ones(()), balance=lambda x: x),
]


def test_manifolds_are_equal_if_their_parameters_are() -> None:
    manifolds = [make() for make in MAKERS]
    assert len(set(manifolds)) == len(MAKERS)
    for i, a in enumerate(manifolds):
        assert [a == b for b in manifolds] == [i == j for j in range(len(MAKERS))]
        assert a != "something else"
    for make in MAKERS[:-1]:
        assert make() == make()
        assert hash(make()) == hash(make())
    assert FixedRankQuotient(4, 3, "inv") == FixedRankQuotient(4, 3, 0)


@pytest.mark.parametrize("make", MAKERS[:-1])
def test_copies_are_equal(make: type) -> None:
    manifold = make()
    assert copy.deepcopy(manifold) == manifold == pickle.loads(pickle.dumps(manifold))


def test_geoopt_takes_an_equal_manifold_for_the_same() -> None:
    x = FixedRankQuotient(4, 3).random(7, 2)
    assert geoopt.ManifoldParameter(x, manifold=FixedRankQuotient(4, 3)).manifold == x.manifold
    with pytest.raises(ValueError, match="do not match"):
        geoopt.ManifoldParameter(x, manifold=FixedRankQuotient(4, 3, "mix"))


def test_modules_with_equal_manifolds_train_move_and_save() -> None:
    """Torch visits equal children of one module once; a manifold has no tensors, so nothing is missed."""

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = FixedRankQuotient(4, 3), FixedRankQuotient(4, 3)
            self.a = geoopt.ManifoldParameter(self.first.random(7, 2), manifold=self.first)
            self.b = geoopt.ManifoldParameter(self.second.random(7, 2), manifold=self.second)

    two = Two().double()
    assert {p.dtype for p in two.parameters()} == {torch.float64}
    assert set(two.state_dict()) == {"a", "b"}
    assert "(second)" in repr(two)
    product = geoopt.ProductManifold((FixedRankQuotient(4, 3), (7, 2)), (FixedRankQuotient(4, 3), (7, 1)))
    assert product.random(21, dtype=torch.float64).shape == (21,)
    optimizer = geoopt.optim.RiemannianAdam(two.parameters(), lr=1e-2)
    sum(p.square().sum() for p in two.parameters()).backward()
    before = [p.detach().clone() for p in two.parameters()]
    optimizer.step()
    assert all(not torch.equal(p, q) for p, q in zip(two.parameters(), before, strict=True))
