"""The ascent finds the maximum: on small problems, in every geometry, what an exhaustive search of the ball finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient
from quotient_manifolds.manifolds import FixedRankQuotient
from quotient_manifolds.sharpness import AutoPGD, worst_case_sharpness
from quotient_manifolds.sharpness.objective import BatchObjective
from quotient_manifolds.symmetries import Symmetries, declare_pair

Batch = tuple[Tensor, Tensor, Tensor]

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "square": lambda out, target: ((out - target) ** 2).mean(-1),
    "logistic": lambda out, target: F.softplus(-out * target.sign()).mean(-1),
    "wave": lambda out, target: (1 - torch.cos(2 * (out - target))).mean(-1),
    "bounded": lambda out, target: torch.tanh((out - target) ** 2).mean(-1),
}


def output(X: Tensor, c: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """(x' X y) c_0 + c_1 for every sample; X (..., n, m) and c (..., 2) may carry leading dimensions."""
    return torch.einsum("bi,...ij,bj->...b", x, X, y) * c[..., :1] + c[..., 1:]


class Bilinear(nn.Module):
    """One linear attention head, f(x, y) = c_0 x' G H' y + c_1: a pair (G, H) and two parameters in no pair."""

    def __init__(self, G: Tensor, H: Tensor, c: Tensor) -> None:
        super().__init__()
        self.G, self.H, self.c = nn.Parameter(G), nn.Parameter(H), nn.Parameter(c)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return output(self.G @ self.H.mT, self.c, x, y)


class Case(NamedTuple):
    n: int
    m: int
    h: int
    loss: str
    radius: float
    at_minimum: bool
    seed: int
    restarts: int = 7


CASES = [
    Case(1, 1, 1, "square", 0.05, True, 0),
    Case(1, 1, 1, "square", 1.0, False, 1),
    Case(2, 1, 1, "square", 0.3, True, 2),
    Case(2, 2, 1, "logistic", 0.5, False, 3),
    Case(3, 2, 1, "square", 0.1, True, 4),
    Case(2, 2, 2, "square", 0.3, False, 5),
    Case(3, 3, 2, "square", 0.5, True, 6),
    Case(3, 2, 2, "bounded", 0.5, True, 8, restarts=20),
    Case(2, 2, 1, "wave", 0.4, True, 10),
    Case(2, 2, 2, "square", 0.01, False, 13),
    Case(2, 2, 2, "bounded", 2.0, True, 14),
    Case(3, 3, 2, "wave", 0.1, False, 15),
]


def problem(case: Case) -> tuple[Bilinear, Batch, Symmetries]:
    random = torch.Generator().manual_seed(case.seed)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    G, H, c = gaussian(case.n, case.h), gaussian(case.m, case.h), gaussian(2)
    x, y = gaussian(4, case.n), gaussian(4, case.m)
    target = output(G @ H.mT, c, x, y) + (0.01 if case.at_minimum else 1.0) * gaussian(4)

    model = Bilinear(G, H, c).eval()
    pair = declare_pair(model, "head", "query/key", G=lambda w: w["G"][None], H=lambda w: w["H"][None])
    return model, (x, y, target), Symmetries((pair,), ("c",))


def loss_of(case: Case) -> Callable[[nn.Module, Batch], Tensor]:
    return lambda model, batch: LOSSES[case.loss](model(batch[0], batch[1]), batch[2])


def loss_in_coordinates(case: Case, geometry: Geometry) -> tuple[Callable[[Tensor], Tensor], int]:
    """a -> L(gamma(1)) for a (..., d) in any orthonormal basis of the (horizontal) tangent space, and d."""
    model, (x, y, target), _ = problem(case)
    G, H, c = (p.detach() for p in (model.G, model.H, model.c))
    point, n, pair_size = torch.cat([G, H]), case.n, (case.n + case.m) * case.h

    def loss(X: Tensor, moved: Tensor) -> Tensor:
        return LOSSES[case.loss](output(X, moved, x, y), target)

    def scaled(scale: Tensor, c_scale: Tensor) -> Callable[[Tensor], Tensor]:
        def value(a: Tensor) -> Tensor:
            moved = point + scale * a[..., :pair_size].unflatten(-1, point.shape)
            return loss(moved[..., :n, :] @ moved[..., n:, :].mT, c + c_scale * a[..., pair_size:])

        return value

    if isinstance(geometry, Euclidean):
        return scaled(torch.ones_like(point), torch.ones_like(c)), pair_size + 2
    if isinstance(geometry, Adaptive):
        return scaled(point.abs(), c.abs()), pair_size + 2
    assert isinstance(geometry, Quotient)
    metric, order = geometry.metric, geometry.geodesic
    if (metric, order) == ("mix", "exact"):
        # Square pairs move X on a straight line, and |xi|^2 = |dX|^2 / 2, while X stays of full rank.
        assert case.n == case.m == case.h

        def straight(a: Tensor) -> Tensor:
            dX = 2**0.5 * a[..., : case.n**2].unflatten(-1, (case.n, case.n))
            return loss(G @ H.mT + dX, c + c.abs() * a[..., case.n**2 :])

        return straight, case.n**2 + 2
    manifold = FixedRankQuotient(case.n, case.m, metric)
    projector = manifold.at(point).project(torch.eye(pair_size, dtype=point.dtype).unflatten(-1, point.shape))
    U, s, _ = torch.linalg.svd(projector.flatten(-2))
    basis = U[:, s > 0.5]

    def geodesic(a: Tensor) -> Tensor:
        z = (a[..., : basis.shape[1]] @ basis.mT).unflatten(-1, point.shape)
        moved = manifold.at(point.expand(z.shape)).follow(z, order)[0]
        return loss(moved[..., :n, :] @ moved[..., n:, :].mT, c + c.abs() * a[..., basis.shape[1] :])

    return geodesic, basis.shape[1] + 2


def exhaustive_maximum(value: Callable[[Tensor], Tensor], dimension: int, radius: float) -> float:
    """The best of 4000 points in and on the ball, the best 6 polished on the sphere and inside it by scipy."""
    random = torch.Generator().manual_seed(0)
    a = torch.randn(4000, dimension, generator=random, dtype=torch.float64)
    a = radius * a / a.norm(dim=-1, keepdim=True)
    a[2000:] *= torch.rand(2000, 1, generator=random, dtype=torch.float64) ** (1 / dimension)
    values = value(a)

    def negative(p: np.ndarray, onto: Callable[[Tensor], Tensor]) -> tuple[float, np.ndarray]:
        leaf = torch.tensor(p, requires_grad=True)
        result = -value(onto(leaf))
        return float(result.detach()), torch.autograd.grad(result, leaf)[0].numpy()

    def sphere(p: Tensor) -> Tensor:
        return radius * p / p.norm()

    def ball(p: Tensor) -> Tensor:  # all of the open ball, smoothly
        return radius * p / (1 + p.square().sum()).sqrt()

    best = float(values.max())
    for start in a[values.topk(6).indices] / radius:
        for onto in (sphere, ball):
            begin = start if onto is sphere else 0.99 * start / (1 - 0.98 * start.square().sum()).sqrt()
            best = max(best, -minimize(negative, begin.numpy(), args=(onto,), jac=True, method="L-BFGS-B").fun)
    return best


GEOMETRIES: list[Geometry] = [
    Euclidean(),
    Adaptive(),
    *(Quotient(metric, order) for metric in ("inv", "mix") for order in ("first", "second")),
    Quotient("inv", "exact"),
]


def found_and_exhaustive(case: Case, geometry: Geometry, steps: int, restarts: int) -> tuple[float, float]:
    model, batch, symmetries = problem(case)
    if isinstance(geometry, Quotient):
        # c and the pair scale
        geometry = Quotient(geometry.metric, geometry.geodesic, symmetries=symmetries, verify="none")
    result = worst_case_sharpness(model, loss_of(case), [batch], geometry, case.radius, steps=steps, restarts=restarts)
    assert result.batches[0].norm <= case.radius * (1 + 1e-12)
    best = exhaustive_maximum(*loss_in_coordinates(case, geometry), case.radius)
    return result.mean, best - result.batches[0].base_loss


# Every case in two geometries, and every geometry in three cases or four.
PAIRED = [(case, GEOMETRIES[(2 * place + other) % 7]) for place, case in enumerate(CASES) for other in (0, 1)]


@pytest.mark.parametrize(("case", "geometry"), PAIRED, ids=str)
def test_the_ascent_finds_the_maximum(case: Case, geometry: Geometry) -> None:
    found, best = found_and_exhaustive(case, geometry, steps=25, restarts=case.restarts)
    assert 0.99 * best <= found <= best * (1 + 1e-6)


@pytest.mark.parametrize(
    "geometry", [Euclidean("linf"), Adaptive(norm="linf"), Adaptive(0.3, "linf")], ids=lambda g: g.name
)
@pytest.mark.parametrize("power", [1, 2])
def test_the_maximum_over_a_box_is_that_of_its_best_vertex(geometry: Geometry, power: int) -> None:
    """loss = (x.w + b)^power with a weight that is 0: convex, so all 2^5 vertices are searched; linear: a sum."""
    torch.manual_seed(2)
    model = nn.Linear(4, 1).double().eval()
    with torch.no_grad():
        model.weight[0, 1] = 0.0
    x = torch.randn(1, 4, dtype=torch.float64)
    w = torch.cat([model.weight[0], model.bias]).detach()
    c = torch.ones_like(w) if isinstance(geometry, Euclidean) else w.abs() + geometry.eta  # type: ignore[attr-defined]
    features = torch.cat([x[0], torch.ones(1, dtype=torch.float64)])
    radius = 0.2
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 5)
    best = float(((w + radius * c * signs) @ features).pow(power).max() - (w @ features) ** power)
    space = geometry.tangent_space(model)
    objective = BatchObjective(model, lambda m, batch: m(batch).pow(power).sum(), space, x)
    found = AutoPGD(steps=20, restarts=2).maximise(objective, radius, torch.Generator().manual_seed(0), norm=space.norm)
    assert found.loss - found.base == pytest.approx(best, rel=1e-9)
    if power == 1:
        assert best == pytest.approx(radius * float((c * features).abs().sum()), rel=1e-12)
    assert found.norm == pytest.approx(radius, rel=1e-12)


@pytest.mark.parametrize("case", [CASES[1], CASES[5], CASES[9]], ids=str)
def test_the_ascent_finds_the_maximum_on_exact_mix_geodesics(case: Case) -> None:
    found, best = found_and_exhaustive(case, Quotient("mix", "exact"), steps=12, restarts=0)
    assert 0.99 * best <= found <= best * (1 + 1e-6)
