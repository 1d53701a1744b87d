"""What a manifold remembers: never anything stale, nothing that shares memory."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from unittest.mock import patch

import geoopt
import numpy as np
import pytest
import torch
from geoopt.optim import RiemannianAdam, RiemannianSGD
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quotient_manifolds.manifolds import FixedRankQuotient, quotient
from quotient_manifolds.manifolds import fixed_rank_space as fixed_rank
from tests.cases import Case
from tests.manifolds.test_arguments import EVERY

every_case = pytest.mark.parametrize("case", EVERY, ids=str)


def scaled_in_place(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.mul_(1.1)


def written_by_data(x: Tensor) -> Tensor:
    x.data[..., 0] *= 1.1
    return x


def written_by_numpy(x: Tensor) -> Tensor:
    x.detach().numpy()[...] *= 1.1
    return x


def set_to_another(x: Tensor) -> Tensor:
    x.data = 0.9 * x.data.clone()
    return x


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": scaled_in_place,
    ".data": written_by_data,
    "numpy": written_by_numpy,
    "another storage": set_to_another,
    "a new tensor": lambda x: 1.1 * x.detach(),
    "a copy": lambda x: x.detach().clone(),
    "single precision": lambda x: x.detach().float(),
    "double precision": lambda x: x.detach().double(),
    "a parameter": lambda x: torch.nn.Parameter(x.detach().clone()),
    "nothing": lambda x: x,
}
METHODS = ("proju", "egrad2rgrad", "retr", "norm")


@every_case
@settings(max_examples=10)
@given(data=st.data())
def test_nothing_stale_is_used(case: Case, data: st.DataObject) -> None:
    """One manifold through all changes, against a new copy for every call."""
    manifold = copy.deepcopy(case.manifold)
    x, u = case.point(1), 0.01 * case.vector(2)
    for _ in range(6):
        x = CHANGES[data.draw(st.sampled_from(sorted(CHANGES)))](x)
        name = data.draw(st.sampled_from(METHODS))
        with torch.set_grad_enabled(data.draw(st.booleans())):
            found = getattr(manifold, name)(x, u.to(x.dtype))
            expected = getattr(copy.deepcopy(case.manifold), name)(x, u.to(x.dtype))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert found.requires_grad == expected.requires_grad
        found.detach().mul_(torch.nan)  # what was returned is the caller's


@every_case
def test_results_with_a_memory_are_differentiable_as_without(case: Case) -> None:
    manifold, x, u = case.manifold, case.point(1).requires_grad_(), 0.01 * case.vector(2)
    with torch.no_grad():
        manifold.retr(x, u)
    gradients = [torch.autograd.grad(manifold.inner(x, u).sum() + 0 * x.sum(), x)[0] for _ in range(2)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
    v = u.clone().requires_grad_()
    torch.autograd.grad(manifold.retr(x.detach(), v).sum(), v)
    with torch.inference_mode():
        manifold.retr(x.detach().clone(), u)
    torch.autograd.grad(manifold.retr(x.detach(), v).sum(), v)
    torch.func.grad(lambda p: manifold.inner(p, u))(x.detach())
    torch.func.jvp(lambda p: manifold.inner(p, u), (x.detach(),), (u,))


OPTIMIZERS: dict[str, tuple[Callable[[list[Tensor]], torch.optim.Optimizer], int]] = {
    "sgd": (lambda p: RiemannianSGD(p, lr=1e-3), 1),
    "momentum": (lambda p: RiemannianSGD(p, lr=1e-3, momentum=0.9), 1),
    "adam": (lambda p: RiemannianAdam(p, lr=1e-3), 1),
}


def train(optimizer: Callable[[list[Tensor]], torch.optim.Optimizer], steps: int) -> tuple[Tensor, int]:
    """The end of a short run, and how often a point was factored."""
    torch.manual_seed(0)
    manifold = FixedRankQuotient(5, 4)
    parameter = geoopt.ManifoldParameter(manifold.random(9, 2, dtype=torch.float64), manifold=manifold)
    step = optimizer([parameter])
    with patch.object(fixed_rank, "singular_frame", wraps=fixed_rank.singular_frame) as factored:
        for _ in range(steps):
            parameter.grad = torch.ones_like(parameter)
            step.step()
    return parameter.detach(), factored.call_count


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_factors_one_new_point(name: str) -> None:
    optimizer, each = OPTIMIZERS[name]
    end, factored = train(optimizer, 5)
    assert factored <= 5 * each + 1
    with patch.object(quotient, "lasts", lambda x: False):
        plain, without = train(optimizer, 5)
    assert without >= 2 * 5
    assert torch.equal(end, plain)


def test_threads_may_share_a_manifold() -> None:
    manifold = FixedRankQuotient(5, 4)
    points = [manifold.random(9, 2, dtype=torch.float64).as_subclass(Tensor) for _ in range(4)]
    u = torch.ones(9, 2, dtype=torch.float64)
    expected = [FixedRankQuotient(5, 4).proju(x, u) for x in points]
    wrong = []

    def work(k: int) -> None:
        for i in range(60):
            x, want = points[(i + k) % 4], expected[(i + k) % 4]
            if not torch.equal(manifold.proju(x, u), want):
                wrong.append((k, i))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_copies_and_pickles_take_no_memory_along() -> None:
    manifold = FixedRankQuotient(5, 4)
    small = len(pickle.dumps(manifold))
    manifold.proju(manifold.random(9, 2), torch.ones(9, 2))
    assert len(pickle.dumps(manifold)) == small
    assert copy.deepcopy(manifold) == manifold == pickle.loads(pickle.dumps(manifold))


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: RiemannianSGD(p, lr=10.0),
        lambda p: RiemannianSGD(p, lr=10.0, momentum=0.9),
        lambda p: RiemannianSGD(p, lr=10.0, stabilize=1),
    ],
    ids=["plain", "momentum", "stabilize"],
)
@pytest.mark.parametrize("metric", ["inv", 0.5])
def test_steps_that_are_too_long_are_named(optimizer: Callable[[list[Tensor]], RiemannianSGD], metric: float) -> None:
    torch.manual_seed(0)
    manifold = FixedRankQuotient(6, 5, metric)
    p = geoopt.ManifoldParameter(manifold.random(11, 2, dtype=torch.float64), manifold=manifold)
    target, step = torch.randn(6, 5, dtype=torch.float64), optimizer([p])

    def run() -> None:
        for _ in range(30):
            step.zero_grad()
            G, H = manifold.split(p)
            (G @ H.mT - target).square().sum().backward()
            step.step()

    with pytest.raises(ValueError, match=r"smaller learning rate \(lr\)|steps that were too long"):
        run()


def test_a_relaxed_metric_has_lengths_at_zero() -> None:
    x = torch.randn(11, 2)
    x[6:] = 0
    relaxed = FixedRankQuotient(6, 5, eps=0.1)
    assert torch.equal(relaxed.projx(x), x)
    assert np.isfinite(float(relaxed.norm(x, torch.ones(11, 2))))
