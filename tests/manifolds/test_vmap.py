"""Under `torch.func.vmap` every method gives what a loop gives, and what cannot run there says how batches work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quotient_manifolds.manifolds import QuotientManifold
from tests.manifolds.test_arguments import EVERY, Case

every_case = pytest.mark.parametrize("case", EVERY, ids=str)

Method = Callable[[QuotientManifold, Tensor, Tensor], Tensor]

WORKS: dict[str, Method] = {
    "inner": lambda m, x, u: m.inner(x, u),
    "norm": lambda m, x, u: m.norm(x, u, keepdim=True),
    "proju": lambda m, x, u: m.proju(x, u),
    "egrad2rgrad": lambda m, x, u: m.egrad2rgrad(x, u),
    "retr": lambda m, x, u: m.retr(x, u),
    "retr_transp": lambda m, x, u: m.retr_transp(x, u, u)[1],
    "geodesic": lambda m, x, u: m.geodesic(x, u, 0.5, "first"),
    "projx": lambda m, x, u: m.projx(x),
}
SEARCHES: dict[str, Method] = {
    "expmap": lambda m, x, u: m.expmap(x, u),
    "logmap": lambda m, x, u: m.logmap(x, x + u),
    "dist": lambda m, x, u: m.dist(x, x + u),
}


def batch(case: Case) -> tuple[Tensor, Tensor]:
    return case.point(1, 3), 0.01 * case.vector(2, 3)


def loop(case: Case, method: Method, x: Tensor, u: Tensor) -> Tensor:
    return torch.stack([method(case.manifold, *pair) for pair in zip(x, u, strict=True)])


@every_case
@pytest.mark.parametrize("name", WORKS)
def test_vmap_gives_what_a_loop_gives(case: Case, name: str) -> None:
    x, u = batch(case)
    method = WORKS[name]
    expected = loop(case, method, x, u)
    torch.testing.assert_close(
        torch.func.vmap(lambda x, u: method(case.manifold, x, u))(x, u), expected, rtol=1e-8, atol=1e-10
    )
    with torch.no_grad():
        mapped = torch.func.vmap(lambda u: method(case.manifold, x[0], u))(u)
    torch.testing.assert_close(mapped, loop(case, method, x[:1].expand_as(x), u), rtol=1e-8, atol=1e-10)


@every_case
@pytest.mark.parametrize("name", SEARCHES)
def test_what_searches_by_values_gives_the_same_or_says_how_batches_work(case: Case, name: str) -> None:
    x, u = batch(case)
    method = SEARCHES[name]
    try:
        mapped = torch.func.vmap(lambda x, u: method(case.manifold, x, u))(x, u)
    except (ValueError, NotImplementedError) as error:
        sentence = str(error)
        assert "batch" in sentence or "no logarithm" in sentence or "eps = 0" in sentence
        return
    torch.testing.assert_close(mapped, loop(case, method, x, u), rtol=1e-8, atol=1e-10)


@every_case
def test_gradients_of_each_of_many(case: Case) -> None:
    """vmap over grad, the usual reason to call it."""
    x, u = batch(case)

    def f(x: Tensor, u: Tensor) -> Tensor:
        return case.manifold.inner(x, u) + case.manifold.retr(x, u).square().sum()

    mapped = torch.func.vmap(torch.func.grad(f, argnums=(0, 1)))(x, u)
    looped = zip(*(torch.func.grad(f, argnums=(0, 1))(*pair) for pair in zip(x, u, strict=True)), strict=True)
    for a, b in zip(mapped, looped, strict=True):
        torch.testing.assert_close(a, torch.stack(b), rtol=1e-6, atol=1e-8)
