"""The first step of ascent in each geometry, and weights that are what they were afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import quotient_manifolds as qm
from tests.optim.cases import apart, backward, made, moved, same, train, weights

GEOMETRIES: dict[str, Any] = {
    "euclidean": lambda found: qm.Euclidean(),
    "euclidean linf": lambda found: qm.Euclidean("linf"),
    "adaptive": lambda found: qm.Adaptive(0.01),
    "inv": lambda found: qm.Quotient("inv", symmetries=found),
    "mix": lambda found: qm.Quotient("mix", symmetries=found),
    "mix exact": lambda found: qm.Quotient("mix", geodesic="exact", symmetries=found),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_loss_rises_most_along_the_first_step(name: str) -> None:
    """At a small radius the rise is radius |grad|, the norm of the gradient by its own measure in the geometry."""
    model, inputs, targets, found = made("low rank")
    geometry, radius = GEOMETRIES[name](found), 1e-5
    sam = qm.SAM(torch.optim.SGD(model.parameters(), lr=0.0), model, geometry=geometry, radius=radius)
    before = weights(model)
    low = backward(model, inputs, targets)
    with sam.perturbed(), torch.no_grad():
        high = nn.functional.cross_entropy(model(inputs), targets)
        assert not same(weights(model), before)
    norm = qm.gradient_norm(model, qm.cross_entropy, [(inputs, targets)], geometry=geometry).mean
    assert float(high - low) == pytest.approx(radius * norm, rel=1e-2)
    assert same(weights(model), before)


def test_euclidean_is_sam_as_it_is_written() -> None:
    model, inputs, targets, _ = made("encoder")
    twin = copy.deepcopy(model)
    sam = qm.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model, radius=0.05)
    train(model, sam, inputs, targets, 1)
    backward(twin, inputs, targets)
    params = list(twin.parameters())
    start = [p.detach().clone() for p in params]
    grads = [p.grad.clone() for p in params if p.grad is not None]
    size = torch.stack([g.norm() for g in grads]).norm()
    with torch.no_grad():
        for p, g in zip(params, grads, strict=True):
            p += 0.05 * g / size
    backward(twin, inputs, targets)
    for p, w, ours in zip(params, start, model.parameters(), strict=True):
        assert p.grad is not None
        assert torch.allclose(ours, w - 0.1 * p.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["inv", "mix"])
def test_a_run_on_the_quotient_does_not_see_the_representative(name: str) -> None:
    model, inputs, targets, found = made("encoder")
    twin = moved(model, found, condition=100.0)
    for each in (model, twin):
        below = qm.QuotientAdam(each.named_parameters(), found, lr=0.01)
        sam = qm.SAM(below, each, geometry=GEOMETRIES[name](found), radius=0.05)
        train(each, sam, inputs, targets, 5)
    assert apart(model, twin, inputs) < 1e-8


def test_weights_come_back_whatever_happens() -> None:
    model, inputs, targets, found = made("encoder")
    sam = qm.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model, geometry=GEOMETRIES["mix"](found), radius=0.1)
    before = weights(model)
    backward(model, inputs, targets)
    with pytest.raises(KeyboardInterrupt), sam.perturbed():
        raise KeyboardInterrupt
    assert same(weights(model), before)
    model[2].weight.grad.fill_(float("inf"))  # as a scaled loss may have them
    with sam.perturbed():
        assert same(weights(model), before)


def test_gradients_of_tables_may_be_sparse() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    optimizer = qm.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model, radius=0.01, geometry="euclidean")
    before = model[0].weight.detach().clone()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.tensor([1, 2])).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert (model[0].weight != before).any(1).tolist() == [False, True, True, False, False]


def test_its_state_is_that_of_the_optimizer_below() -> None:
    model, inputs, targets, found = made("low rank")

    def make(each: nn.Module) -> qm.SAM:
        return qm.SAM(qm.QuotientAdam(each.named_parameters(), found, lr=0.01), each, radius=0.01)

    twin, optimizer = copy.deepcopy(model), make(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, inputs, targets, 1)
    schedule.step()
    assert optimizer.base.param_groups[0]["lr"] == 0.005
    other = make(twin)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.param_groups[0]["lr"] == 0.005
    twin.load_state_dict(model.state_dict())
    for each, step in ((model, optimizer), (twin, other)):
        train(each, step, inputs, targets, 1)
    assert apart(model, twin, inputs) == 0
