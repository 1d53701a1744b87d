"""The truncated sum of products of low rank, against the SVD of the dense sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quotient_manifolds.merge.low_rank import truncated_sum

Terms = list[tuple[float, Tensor, Tensor]]
SIZES = [(9, 7, [2, 3], 2), (5, 40, [3, 1, 2], 4), (6, 4, [4, 4, 4], 3), (6, 8, [1], 1), (3, 3, [5, 5], 3)]


def random_terms(n: int, m: int, ranks: list[int], seed: int = 0) -> Terms:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return [(float(draw(1)), draw(n, r), draw(r, m)) for r in ranks]


def dense(terms: Terms) -> Tensor:
    return torch.stack([c * B.double() @ A.double() for c, B, A in terms]).sum(0)


def refactored(terms: Terms, condition: float) -> Terms:
    """The same products by other factors: each has a Z of that condition number."""
    moved = []
    for place, (c, B, A) in enumerate(terms):
        generator = torch.Generator().manual_seed(100 + place)
        Q, _ = torch.linalg.qr(torch.randn(B.shape[1], B.shape[1], generator=generator, dtype=torch.float64))
        size = torch.logspace(0, -1, B.shape[1], base=condition, dtype=torch.float64)[:, None]
        moved.append((c, B @ Q.T / size.T, size * (Q @ A)))
    return moved


@pytest.mark.parametrize(("n", "m", "ranks", "rank"), SIZES)
def test_no_matrix_of_the_rank_is_closer(n: int, m: int, ranks: list[int], rank: int) -> None:
    terms = random_terms(n, m, ranks)
    found, mean = truncated_sum(terms, rank), dense(terms)
    U, s, Vh = torch.linalg.svd(mean, full_matrices=False)
    best = U[:, :rank] * s[:rank] @ Vh[:rank]
    torch.testing.assert_close(found.B @ found.A, best, rtol=0, atol=1e-10 * float(s[0]))
    assert found.norm == pytest.approx(float(mean.norm()), rel=1e-12)
    assert found.lost == pytest.approx(float((mean - found.B @ found.A).norm()), abs=1e-10 * float(s[0]))
    balanced = torch.diag(s[:rank])
    torch.testing.assert_close(found.B.T @ found.B, balanced, rtol=0, atol=1e-10 * float(s[0]))
    torch.testing.assert_close(found.A @ found.A.T, balanced, rtol=0, atol=1e-10 * float(s[0]))


@pytest.mark.parametrize("condition", [1e4, 1e-4])
def test_factors_depend_on_the_products_alone(condition: float) -> None:
    terms = random_terms(30, 20, [3, 4, 2])
    first, second = truncated_sum(terms, 4), truncated_sum(refactored(terms, condition), 4)
    for mine, its in zip(first, second, strict=True):
        torch.testing.assert_close(torch.as_tensor(mine), torch.as_tensor(its), rtol=1e-9, atol=1e-9)


def test_terms_of_very_different_factors_do_not_disturb_each_other() -> None:
    (c, B, A), (d, C, D) = random_terms(30, 20, [3, 4])
    plain = truncated_sum([(c, B, A), (d, C, D)], 7)
    skewed = truncated_sum([(c, B * 1e8, A / 1e8), (d, C / 1e8, D * 1e8)], 7)
    torch.testing.assert_close(skewed.B @ skewed.A, plain.B @ plain.A, rtol=1e-11, atol=1e-11)


def test_a_sum_of_zero_has_factors_of_zero() -> None:
    ((_, B, A),) = random_terms(6, 5, [2])
    found = truncated_sum([(1.0, B, A), (-1.0, B, A)], 2)
    assert max(found.norm, float((found.B @ found.A).norm())) < 1e-12
    empty = truncated_sum([(1.0, torch.zeros(6, 2), A)], 2)
    assert not empty.B.any()
    assert not empty.A.any()


def test_no_dense_matrix_is_made() -> None:
    """200,000 x 200,000 numbers would be 320 GB."""
    terms = random_terms(200_000, 200_000, [2, 2])
    found = truncated_sum(terms, 4)
    assert found.lost == 0
    rows = slice(0, 50)
    some = torch.stack([c * B[rows] @ A[:, rows] for c, B, A in terms]).sum(0)
    torch.testing.assert_close(found.B[rows] @ found.A[:, rows], some, rtol=1e-9, atol=1e-9)


def test_overflow_is_said() -> None:
    huge = torch.full((5, 4), 1e200, dtype=torch.float64)
    with pytest.raises(ValueError, match="larger than float64 can hold"):
        truncated_sum([(1.0, huge, huge.T)], 1)
