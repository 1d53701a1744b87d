"""Models in training, their losses, and moves along their orbits."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import quotient_manifolds as qm
from quotient_manifolds.symmetries.representatives import group_element
from tests.nets.trained import CASES


def made(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any, Tensor, qm.Symmetries]:
    """The model with random weights, its inputs and targets, and its symmetries."""
    model, *others = _made(name, dtype)
    return copy.deepcopy(model), *others


@cache
def _made(name: str, dtype: torch.dtype) -> tuple[nn.Module, Any, Tensor, qm.Symmetries]:
    torch.manual_seed(0)
    model, inputs, targets = CASES[name]()
    model = model.to(dtype)
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    return model, inputs, targets, qm.find_symmetries(model, inputs)


def moved(model: nn.Module, symmetries: qm.Symmetries, condition: float = 1e4, seed: int = 1) -> nn.Module:
    """A copy of the model whose pairs are moved by group elements of the condition."""
    generator = torch.Generator().manual_seed(seed)
    twin = copy.deepcopy(model)
    params = {name: p.detach() for name, p in twin.named_parameters()}
    for pair in symmetries.pairs:
        if all(twin.get_parameter(name).requires_grad for name in pair.names):
            pair.write(params, pair.act(group_element(pair, condition, generator), pair.read(params)))
    return twin


def train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any, targets: Tensor, steps: int) -> list[float]:
    """Losses before every step."""
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss.detach()

    for _ in range(steps):
        losses.append(float(optimizer.step(closure)))
    return losses


def backward(model: nn.Module, inputs: Any, targets: Tensor) -> Tensor:
    """The loss, whose gradients are left in the model."""
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    return loss.detach()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name].nan_to_num(), b[name].nan_to_num()) for name in a)


def apart(a: nn.Module, b: nn.Module, inputs: Any) -> float:
    """Relative distance of what two models return."""
    with torch.no_grad():
        f, g = a(inputs).double(), b(inputs).double()
    return float((f - g).norm() / f.norm())
