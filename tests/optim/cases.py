"""Small models with pairs of every group, what they are trained on, and moves along their orbits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import quotient_manifolds as qm
from quotient_manifolds.symmetries.representatives import group_element
from tests.handwritten_models import NanoGPT
from tests.models import llama

Case = tuple[nn.Module, Any, Tensor]


class LowRank(nn.Module):
    """A frozen layer with a trained update B A of rank r beside it."""

    def __init__(self, n: int, m: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(m, n).requires_grad_(False)
        self.B, self.A = nn.Linear(rank, n, bias=False), nn.Linear(m, rank, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.B(self.A(x))


def low_rank(rank: int = 4) -> Case:
    model = nn.Sequential(LowRank(14, 12, rank), nn.Tanh(), LowRank(12, 14, rank), nn.Tanh(), nn.Linear(12, 3))
    return model.eval(), torch.randn(32, 12), torch.randint(3, (32,))


def at_zero(name: str) -> Case:
    """Low-rank updates where B, or A, is 0, as adapters start."""
    model, inputs, targets = low_rank()
    for layer in (model[0], model[2]):
        nn.init.zeros_(getattr(layer, name).weight)
    return model, inputs, targets


def encoder() -> Case:
    """Attention with biases and neurons of a ReLU: some parameters belong to pairs in part, some to several."""
    layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=12, batch_first=True, dropout=0.0)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 3)).eval(), torch.randn(16, 3, 8), torch.randint(3, (16,))


class Words(nn.Module):
    """The next word by a transformer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Tensor:
        output = self.model(words)
        return (output if isinstance(output, Tensor) else output.logits)[:, -1]


def gpt() -> Case:
    return Words(NanoGPT()).eval(), torch.randint(11, (16, 6)), torch.randint(11, (16,))


def rotary() -> Case:
    """Rotary planes, with grouped queries, and gated neurons."""
    model = Words(llama(vocab_size=17, num_hidden_layers=1))
    return model.eval(), torch.randint(17, (8, 5)), torch.randint(17, (8,))


CASES: dict[str, Callable[[], Case]] = {
    "low rank": low_rank,
    "rank one": lambda: low_rank(1),
    "B = 0": lambda: at_zero("B"),
    "A = 0": lambda: at_zero("A"),
    "encoder": encoder,
    "GPT": gpt,
    "Llama": rotary,
}


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
