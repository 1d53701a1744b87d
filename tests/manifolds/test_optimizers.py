"""Every optimizer of geoopt on our manifolds: whether its run depends on the representative it starts from.

A run is invariant if it consults the point only through the metric: Riemannian gradients, second-order geodesics,
transports and inner products all move with the group. What is Euclidean in an optimizer breaks that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import geoopt
import pytest
import torch
from geoopt.optim import RiemannianAdam, RiemannianLineSearch, RiemannianSGD
from torch import Tensor

from tests.cases import Case, diagonal, fixed_rank

CASES = [*(fixed_rank(4, 3, 2, metric) for metric in ("inv", "mix", 0.5)), *(diagonal(3, m) for m in ("inv", "mix"))]


@dataclass(frozen=True)
class Row:
    name: str
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
    invariant: bool
    why: str


DECAY = "it adds the point to the Euclidean gradient: the penalty tr G^T G + tr H^T H is not constant on the orbit"
BUFFER = "the momentum buffer starts as the Euclidean gradient, which is no tangent vector and moves as a covector"

TABLE = [
    Row("RiemannianSGD", partial(RiemannianSGD, lr=1e-2), True, "gradient and second-order geodesic are equivariant"),
    Row(
        "RiemannianSGD(stabilize)",
        partial(RiemannianSGD, lr=1e-2, stabilize=2),
        True,
        "projx is the identity on points",
    ),
    Row("RiemannianSGD(momentum)", partial(RiemannianSGD, lr=1e-2, momentum=0.9), False, BUFFER),
    Row(
        "RiemannianSGD(momentum, dampening)",
        partial(RiemannianSGD, lr=1e-2, momentum=0.9, dampening=0.5),
        False,
        BUFFER,
    ),
    Row(
        "RiemannianSGD(nesterov)",
        partial(RiemannianSGD, lr=1e-2, momentum=0.9, nesterov=True),
        False,
        BUFFER,
    ),
    Row("RiemannianSGD(weight_decay)", partial(RiemannianSGD, lr=1e-2, weight_decay=0.1), False, DECAY),
    Row("RiemannianAdam", partial(RiemannianAdam, lr=1e-2), True, "second moments are those of the metric"),
    Row("RiemannianAdam(amsgrad)", partial(RiemannianAdam, lr=1e-2, amsgrad=True), True, "maxima of invariants"),
    Row("RiemannianAdam(stabilize)", partial(RiemannianAdam, lr=1e-2, stabilize=2), True, "as RiemannianAdam"),
    Row("RiemannianAdam(weight_decay)", partial(RiemannianAdam, lr=1e-2, weight_decay=0.1), False, DECAY),
    Row("RiemannianLineSearch(armijo)", RiemannianLineSearch, True, "slopes are inner products in the metric"),
    Row(
        "RiemannianLineSearch(wolfe)",
        partial(RiemannianLineSearch, line_search_method="wolfe"),
        True,
        "as with armijo, and the transport is equivariant",
    ),
    Row(
        "RiemannianLineSearch(wolfe, Fletcher-Reeves)",
        partial(RiemannianLineSearch, line_search_method="wolfe", cg_method="fr"),
        True,
        "the factor of the last direction is a ratio of norms in the metric",
    ),
    Row(
        "RiemannianLineSearch(armijo, Polak-Ribiere)",
        partial(RiemannianLineSearch, cg_method="pr"),
        True,
        "the factor of the last direction is a ratio of inner products in the metric",
    ),
]


def markdown() -> str:
    """The table as documentation."""
    lines = ["| optimizer of geoopt | same along the orbit | why |", "|---|---|---|"]
    return "\n".join(lines + [f"| {row.name} | {'yes' if row.invariant else 'no'} | {row.why} |" for row in TABLE])


def run(case: Case, start: Tensor, row: Row, steps: int = 8, *, empty_buffer: bool = False) -> tuple[Tensor, Tensor]:
    """Fit the product to a fixed target from `start`: what the last point represents, and the losses.

    The target has the signs of the start: no geodesic of the diagonal quotient crosses zero.
    """
    target = 1.5 * case.product(case.point(1))
    parameter = geoopt.ManifoldParameter(start.clone(), manifold=case.manifold)
    optimizer = row.optimizer([parameter])
    if empty_buffer:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    losses = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = ((case.product(parameter) - target) ** 2).mean()
        loss.backward()
        return float(loss.detach())

    for _ in range(steps):
        losses.append(closure())
        optimizer.step(closure)
    return case.product(parameter.detach()), torch.tensor([*losses, closure()], dtype=torch.float64)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_table(case: Case, row: Row) -> None:
    x = case.point(1)
    A = 3 * case.group(torch.Generator().manual_seed(2), 10.0)
    end, losses = run(case, x, row)
    moved_end, moved_losses = run(case, case.manifold.action(A, x), row)
    difference = float((end - moved_end).norm() / end.norm())
    if row.invariant:
        assert losses[-1] < losses[0]
        assert difference < 1e-8
        torch.testing.assert_close(moved_losses, losses, rtol=1e-6, atol=1e-10)
    else:
        assert difference > 1e-3


@pytest.mark.parametrize("row", [row for row in TABLE if row.why == BUFFER], ids=lambda row: row.name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_momentum_from_an_empty_buffer_is_invariant(case: Case, row: Row) -> None:
    """The reason given in the table is the whole one: a buffer that starts as a tangent vector, 0, keeps the run."""
    x = case.point(1)
    A = 3 * case.group(torch.Generator().manual_seed(2), 10.0)
    end, _ = run(case, x, row, empty_buffer=True)
    moved_end, _ = run(case, case.manifold.action(A, x), row, empty_buffer=True)
    assert float((end - moved_end).norm() / end.norm()) < 1e-8


@pytest.mark.parametrize("condition", [1.0, 100.0, 1e4])
@pytest.mark.parametrize("metric", ["inv", "mix", 0.5])
def test_float32_is_accurate_enough(metric: str | float, condition: float) -> None:
    """Gradient, step and transport in float32 against float64, from the same entries: the rounding of those, no more.

    A change of basis of that condition number makes rounding of entries as many times as large in the product.
    """
    case, generator = fixed_rank(150, 120, 6, metric), torch.Generator().manual_seed(1)
    manifold = case.manifold
    x = manifold.action(case.group(generator, condition), case.point(2, 3)).float()
    slope = manifold.at(x.double()).covector(case.vector(3, 3))  # of the size of the point, in its basis
    slope = (slope / slope.abs().amax((-2, -1), keepdim=True)).float()

    def step(x: Tensor, slope: Tensor) -> list[Tensor]:
        gradient = manifold.egrad2rgrad(x, slope)
        xi = -0.2 * gradient / manifold.norm(x, gradient, keepdim=True)
        y, moved = manifold.retr_transp(x, xi, xi)
        return [case.product(y.double()), *(manifold.norm(*pair) for pair in ((x, gradient), (y, moved)))]

    for single, double in zip(step(x, slope), step(x.double(), slope.double()), strict=True):
        error = torch.linalg.vector_norm(single.double() - double) / torch.linalg.vector_norm(double)
        assert float(error) < 1e-6 + 1e-7 * condition
