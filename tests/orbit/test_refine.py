"""An alignment is refined on the loss along the path, over as many batches as there are."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.orbit import align, loss_along_path


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double().eval()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def test_several_batches_lower_the_loss_along_the_path() -> None:
    a, b, x = network(0), network(1), torch.randn(12, 4).double()
    y = a(x).argmax(-1)
    batches = [*zip(x.split(4), y.split(4), strict=True)]
    plain = align(b, a, (x,))
    found = align(b, a, (x,), loss=loss, batches=batches, steps=20)
    assert found.path[-1] < found.path[0]
    middle = [loss_along_path(a, each.model, loss, batches, points=3).losses[1] for each in (plain, found)]
    assert middle[1] < middle[0]
    assert found.change < 1e-12
