"""What the walk by wires finds in small networks is all that there is, by the rank of a Jacobian, and nothing false."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries import find_symmetries
from quotient_manifolds.symmetries.tangents import tangents
from tests.nets.blocks import BLOCKS, build, truth

FALSE, RANK = 1e-9, 1e-7  # generators are differences, right to about 1e-10

MEAN = "equal constants on a stream, which norms subtract and the head takes back"
EXCEPTIONS: dict[str, tuple[int, str]] = {
    "post-norm": (177, "the gain between two norms in series"),
    "full convolution": (75, f"constants by position through zeros beside the tokens; {MEAN}"),
    "norm per head": (114, f"a gain and a bias that heads share; {MEAN}"),
    "two streams": (118, f"two ways from the inputs to the head make up for each other; {MEAN}"),
    "multi-latent attention": (173, f"what values of heads wider than their latent never reach; {MEAN}"),
    **{
        name: (found, MEAN)
        for name, found in {
            "classifier with a mean pool": 187,
            "tied table and head": 163,
            "fewer classes than channels": 209,
            "LoRA beside its base": 207,
            "GLU": 191,
            "bilinear": 197,
            "maxout": 197,
            "leaky by where": 185,
            "ReLU": 185,
            "squared ReLU": 185,
            "mixture of experts": 173,
            "depthwise convolution": 46,
            "linear attention": 139,
            "output gate": 155,
            "capped scores": 171,
            "temperature of scores": 181,
            "temperature of keys": 172,
            "norms of queries and keys": 143,
            "grouped queries": 131,
            "class token with positions": 349,
        }.items()
    },
}
"""How many are found where it is fewer than there are, and why."""


def proposed(model: nn.Module, x: Tensor) -> tuple[list[str], Tensor]:
    """Return names and directions (n, parameters), each of length 1, of what is found on few examples."""
    found = tangents(find_symmetries(model, x[:3]), dict(model.named_parameters()))
    directions = torch.cat([*found.values()])
    names = [name for name, several in found.items() for _ in several]
    return names, directions / directions.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("name", BLOCKS)
def test_everything_is_found_and_nothing_is_false(name: str) -> None:
    model, x = build(name)
    real = truth(model, x)
    assert real.gap > 1e3
    labels, directions = proposed(model, x)
    changes = (directions @ real.jacobian.T).norm(dim=1) / torch.linalg.matrix_norm(real.jacobian, 2)
    assert [label for label, change in zip(labels, changes.tolist(), strict=True) if change > FALSE] == []
    found = int(torch.linalg.matrix_rank(directions, rtol=RANK))
    expected, _ = EXCEPTIONS.get(name, (real.dimension, ""))
    assert (found, real.dimension) == (expected, real.dimension)
    assert (expected < real.dimension) == (name in EXCEPTIONS)
