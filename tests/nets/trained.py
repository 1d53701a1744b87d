"""Small classifiers with pairs of every group, and what they are trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.nets.attention import llama
from tests.nets.handwritten import NanoGPT

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
