"""Frames of products G H^T of every rank, against dense SVDs, and from Gram matrices against those from QR."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from quotient_manifolds import linalg
from quotient_manifolds.linalg import pair_frame, product_svd, singular_frame, triangle


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


def test_badly_conditioned_factors_of_a_batch_are_left_to_householder() -> None:
    """What the columns' lengths do to the condition number counts for nothing."""
    good, bad = factor(50, 4, 10.0, 1), factor(50, 4, 1e6, 2)
    assert float(torch.linalg.cond(good.double())) > 1e8
    for x in (bad, torch.zeros(50, 4)):
        R = triangle(torch.stack([good, x]))
        assert torch.equal(R[1], torch.linalg.qr(x.double(), mode="r").R)
        assert torch.equal(R[0], triangle(good))
        torch.testing.assert_close(R[0].mT @ R[0], good.double().mT @ good.double(), rtol=1e-9, atol=0)
    good, bad = factor(50, 4, 10.0, 1), factor(50, 4, 1e6, 2, lengths=1e-5)
    single, double = (singular_frame(good, bad, dtype=dtype) for dtype in (torch.float32, torch.float64))
    np.testing.assert_allclose(single.s, double.s, rtol=1e-7)
    torch.testing.assert_close(single.right, double.right.float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(9, 7, 3), (5, 40, 12), (4, 3, 10), (2, 6, 1)])
def test_the_svd_of_a_product_is_that_of_the_dense_one(shape: tuple[int, int, int]) -> None:
    n, m, h = shape
    lengths = torch.logspace(-5, 5, h, dtype=torch.float64)
    G, H = torch.randn(n, h, dtype=torch.float64) * lengths, torch.randn(m, h, dtype=torch.float64) / lengths
    left, s, right = product_svd(G, H)
    oracle = np.linalg.svd((G @ H.mT).numpy(), compute_uv=False)
    np.testing.assert_allclose(s, oracle[: len(s)], rtol=1e-9, atol=1e-13 * oracle[0])
    torch.testing.assert_close(left * s @ right.mT, G @ H.mT, rtol=0, atol=1e-12 * float(s[0]))


RANKS = [("G = 0", 0, 3), ("H = 0", 3, 0), ("G of rank 2", 2, 3), ("H of rank 1", 3, 1), ("both of rank 2", 2, 2)]


@pytest.mark.parametrize("unbatched", [False, True])
@pytest.mark.parametrize(("name", "rank_G", "rank_H"), RANKS)
def test_a_frame_of_lower_rank(name: str, rank_G: int, rank_H: int, unbatched: bool) -> None:
    """It has the product's singular vectors, the metric of `mix` in what lacks, and no other after a group element."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    G, H, A = draw(2, 7, 3), draw(2, 5, 3), draw(3, 3)
    lead = draw(3, 3) if name.startswith("both") else torch.eye(3, dtype=torch.float64)  # one kernel in both
    G[0] = G[0, :, :rank_G] @ lead[:rank_G]
    H[0] = H[0, :, :rank_H] @ torch.linalg.inv(lead).mT[:rank_H]
    G, H = (G[0], H[0]) if unbatched else (G, H)
    frame, lost = pair_frame(G, H)
    s = frame.s.masked_fill(lost, 0.0)
    torch.testing.assert_close(frame.left * s[..., None, :] @ frame.right.mT, G @ H.mT, rtol=0, atol=1e-12)
    first = 0 if not unbatched else slice(None)
    assert int(lost[first].sum()) == 3 - min(rank_G, rank_H)
    assert bool((frame.s[lost] == 1).all())
    moved, also = pair_frame(G @ torch.linalg.inv(A), H @ A.mT)
    assert torch.equal(lost, also)
    on_G, on_H = draw(*G.shape[:-1], H.shape[-2]), draw(*H.shape[:-1], G.shape[-2])  # gradients of the product
    changes: list[tuple[Tensor, Tensor]] = []  # of the product, by the gradient steps of G and of H
    for one, g, k in ((frame, G, H), (moved, G @ torch.linalg.inv(A), H @ A.mT)):
        z, w = on_G @ k @ one.from_left.mT, on_H @ g @ one.from_right.mT
        changes.append((z @ one.from_left @ k.mT, g @ (w @ one.from_right).mT))
    for mine, its in zip(*changes, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-8, atol=1e-9)


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


def test_rough_triangles_are_near_and_leave_bad_conditions_to_better_ones() -> None:
    good, poor = factor(50, 4, 3.0, 1), factor(50, 4, 1e3, 2)
    R = triangle(torch.stack([good, poor]), rough=True)
    torch.testing.assert_close(R[0].mT @ R[0], good.double().mT @ good.double(), rtol=1e-5, atol=0)
    assert torch.equal(R[1], triangle(poor))


@pytest.mark.parametrize("h", [32, 64])
def test_well_conditioned_factors_of_many_columns_are_factored_once(h: int) -> None:
    G = torch.randn(2, 12 * h, h, generator=torch.Generator().manual_seed(0))
    oracle = torch.linalg.qr(G.double(), mode="r").R
    with patch.object(linalg, "triangle", side_effect=AssertionError):  # what a poor condition would ask for
        R = triangle(G, rough=True)
    torch.testing.assert_close(R.abs(), oracle.abs(), rtol=0, atol=1e-4 * float(oracle.abs().max()))
