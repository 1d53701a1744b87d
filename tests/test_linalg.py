"""Frames from Gram matrices, in single precision, against those from Householder's factors and NumPy's SVD."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from quotient_manifolds import linalg
from quotient_manifolds.linalg import gram_factor, singular_frame


def factor(n: int, h: int, condition: float, seed: int, *batch: int, lengths: float = 1e5) -> Tensor:
    """Singular values from 1 to 1 / condition, in random directions; then columns of very different lengths."""
    generator = torch.Generator().manual_seed(seed)
    draws = (torch.randn(*batch, k, h, dtype=torch.float64, generator=generator) for k in (n, h))
    left, right = (torch.linalg.qr(draw).Q for draw in draws)
    scales = torch.logspace(0, -float(np.log10(condition)), h, dtype=torch.float64)
    end = float(np.log10(lengths))
    return (left * scales @ right.mT * torch.logspace(-end, end, h, dtype=torch.float64)).float()


@pytest.mark.parametrize("condition", [1.0, 30.0, 1e3])
@pytest.mark.parametrize(("batch", "n", "m", "h"), [((), 40, 7, 5), ((3,), 2100, 33, 4), ((2, 5), 70, 900, 16)])
def test_grams_give_the_frame_of_householder(condition: float, batch: tuple[int, ...], n: int, m: int, h: int) -> None:
    G, H = factor(n, h, condition, 1, *batch), factor(m, h, condition, 2, *batch, lengths=1e-5) / 3
    assert gram_factor(G) is not None
    single, double = singular_frame(G, H, dtype=torch.float32), singular_frame(G, H)
    assert single.left.dtype == single.right.dtype == torch.float32
    assert single.s.dtype == single.to_left.dtype == torch.float64
    oracle = np.linalg.svd((G.double() @ H.double().mT).numpy(), compute_uv=False)[..., :h]
    spread = float((double.s[..., 0] / double.s[..., -1]).max())
    np.testing.assert_allclose(single.s, double.s, rtol=1e-7)
    np.testing.assert_allclose(single.s, oracle, rtol=max(1e-7, 1e-13 * spread))
    eye = torch.eye(h, dtype=torch.float64).expand(*batch, h, h)
    for basis, there, back, x in (
        (single.left, single.to_left, single.from_left, G),
        (single.right, single.to_right, single.from_right, H),
    ):
        torch.testing.assert_close(basis.double().mT @ basis.double(), eye, rtol=0, atol=3e-7)
        torch.testing.assert_close(back @ there, eye, rtol=0, atol=1e-6)
        gap = (x.double() - basis.double() @ back).norm(dim=-2) / x.double().norm(dim=-2)
        assert float(gap.max()) < 1e-6


def test_badly_conditioned_factors_are_left_to_householder() -> None:
    """One of a batch suffices; what the columns' lengths do to the condition number counts for nothing."""
    good, bad = factor(50, 4, 10.0, 1), factor(50, 4, 1e6, 2)
    zero, infinite = torch.zeros(50, 4), torch.full((50, 4), torch.inf)
    assert gram_factor(good) is not None
    assert float(torch.linalg.cond(good.double())) > 1e8
    for x in (bad, zero, infinite):
        assert gram_factor(torch.stack([good, x])) is None
    for G, H in ((bad, good), (good, bad)):
        frames = singular_frame(G, H, dtype=torch.float32), singular_frame(G, H)
        for one, two in zip(*frames, strict=True):
            assert torch.equal(one, two)


def test_pieces_of_a_batch_are_put_together_again() -> None:
    G, H = factor(30, 3, 5.0, 1, 2, 4), factor(20, 3, 5.0, 2, 2, 4)
    whole = singular_frame(G, H, dtype=torch.float32)
    with patch.object(linalg, "_CACHED", 1):
        parts = singular_frame(G, H, dtype=torch.float32)
    for one, two in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, two)
    assert singular_frame(G[:0], H[:0], dtype=torch.float32).left.shape == (0, 4, 30, 3)
    leaf = G.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(singular_frame(leaf, H, dtype=torch.float32).s.log().sum(), leaf)
    assert bool(gradient.isfinite().all())
