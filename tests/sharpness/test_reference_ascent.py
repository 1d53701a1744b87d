"""The ascent in thirty lines of the documentation, on geoopt's interface alone, is the oracle of the fast one."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds import AutoPGD, FixedRankQuotient, Quotient, worst_case_sharpness
from quotient_manifolds.symmetries import Symmetries, declare_pair

ROOT = Path(__file__).parents[2]
N, M, H = 5, 4, 2


def written() -> str:
    """Return the source of the function on the page."""
    page = (ROOT / "docs" / "reference_ascent.md").read_text(encoding="utf-8")
    (source,) = (
        each.source for each in doctest.DocTestParser().get_examples(page) if each.source.startswith("def ref")
    )
    return source


@pytest.fixture(scope="module")
def reference_ascent() -> Callable[..., list[float]]:
    names: dict[str, Any] = {}
    exec(f"import torch\nfrom itertools import pairwise\n{written()}", names)
    return names["reference_ascent"]


class Pair(nn.Module):
    """Two heads of one pair, and no other parameter."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.G, self.H = (nn.Parameter(torch.randn(heads, k, H, dtype=torch.float64)) for k in (N, M))

    def forward(self, target: Tensor) -> Tensor:
        return torch.tanh(self.G @ self.H.mT) - target


@pytest.mark.parametrize("radius", [0.05, 0.5])
@pytest.mark.parametrize("metric", ["inv", "mix", 0.5])
def test_the_fast_ascent_has_the_losses_of_the_reference_step_by_step(
    metric: str | float, radius: float, reference_ascent: Callable[..., list[float]]
) -> None:
    torch.manual_seed(0)
    model, target, settings = Pair(heads=2).eval(), torch.randn(2, N, M, dtype=torch.float64), AutoPGD(steps=20)
    pair = declare_pair(model, "pair", "query/key", G=lambda w: w["G"], H=lambda w: w["H"])
    geometry = Quotient(metric, symmetries=Symmetries((pair,)))
    fast = worst_case_sharpness(
        model,
        lambda m, batch: m(batch).square().mean(),
        [target],
        geometry=geometry,
        radius=radius,
        steps=20,
        ascent=AutoPGD,
    )

    def loss(x: Tensor) -> Tensor:
        return (torch.tanh(x[..., :N, :] @ x[..., N:, :].mT) - target).square().mean()

    x = torch.cat([model.G, model.H], dim=-2).detach()
    slow = reference_ascent(FixedRankQuotient(N, M, metric), x, loss, radius, settings.checkpoints)
    assert len(slow) == 21
    assert list(fast.batches[0].losses) == pytest.approx(slow, rel=1e-10)
    assert fast.mean == pytest.approx(max(slow) - slow[0], rel=1e-9)


def test_the_notebook_shows_the_same_function() -> None:
    path = ROOT / "notebooks" / "2_quotient_manifolds_from_scratch.ipynb"
    cells = nbformat.read(path, as_version=4).cells  # type: ignore[no-untyped-call]
    assert any(written().strip() in cell.source for cell in cells if cell.cell_type == "code")
