"""A LayerNorm that is written out counts as one, however it is written, and what is none does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries import fibre_dimension, find_freedoms
from quotient_manifolds.symmetries.trace import Trace

from .test_canonical import D, doubled, generic

Norm = Callable[[Tensor], Tensor]


def by_mean_of_squares(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / ((x - mean).pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def by_variance(x: Tensor) -> Tensor:
    return torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5) * (x - x.mean(-1, keepdim=True))


def by_both_at_once(x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, -1, keepdim=True)
    return (x - mean).float().double() * (variance + 1e-5) ** -0.5


def by_deviation(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)


def by_squares(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (torch.sum(centred * centred, -1, keepdim=True) / D + 1e-5).sqrt()


def with_its_mean(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / (x - mean).std(-1, keepdim=True) + mean


def by_a_length_of_another(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / x.tanh().std(-1, keepdim=True)


def changed_in_place(x: Tensor) -> Tensor:
    x = x + torch.linspace(0, 1, D)
    mean = x.mean(-1, keepdim=True)
    x *= 2
    return (x - mean) / (x - mean).std(-1, keepdim=True)


def of_the_tokens(x: Tensor) -> Tensor:
    return (x - x.mean(-2, keepdim=True)) / x.std(-2, keepdim=True)


class Block(nn.Module):
    """A stream that one norm reads, with a gain and a bias, and a second without."""

    def __init__(self, norm: Norm | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D, elementwise_affine=False) if norm is None else norm
        self.gain, self.bias = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(D))
        self.first, self.inner, self.last = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.norm(x + self.inner(self.gain * self.norm(x) + self.bias).tanh()))


def families(norm: Norm | None) -> dict[str, int]:
    found: dict[str, int] = {}
    x = torch.randn(2, 4, D, generator=torch.Generator().manual_seed(0)).double()
    for freedom in find_freedoms(Trace(generic(lambda: Block(norm)), x))[0]:
        for family, size in freedom.families.items():
            found[family] = found.get(family, 0) + size
    return found


@pytest.mark.parametrize("norm", [by_mean_of_squares, by_variance, by_both_at_once, by_deviation, by_squares])
def test_what_is_free_around_a_norm_is_free_around_one_that_is_written_out(norm: Norm) -> None:
    found = families(norm)
    assert {"gain of a norm", "bias of a norm", "direction no reader of a norm sees"} <= found.keys()
    assert found == families(None)


def test_nothing_is_missing_around_norms_that_are_written_out() -> None:
    draw = torch.Generator().manual_seed(0)
    batches = [doubled(torch.randn(2, 4, D, generator=draw)) for _ in range(60)]
    found = fibre_dimension(generic(lambda: Block(by_mean_of_squares)), batches)
    assert (found.dimension, found.doubts) == (sum(families(by_mean_of_squares).values()), ())


@pytest.mark.parametrize("norm", [with_its_mean, by_a_length_of_another, changed_in_place, of_the_tokens])
def test_what_is_no_norm_of_channels_leaves_the_means_of_a_stream_alone(norm: Norm) -> None:
    assert "mean that no norm reads" not in families(norm)
