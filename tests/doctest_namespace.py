"""The names that the examples in docstrings take for granted; a pytest plugin (setup.cfg)."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _example(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> None:
    """A manifold, a point and its horizontal space, for docstrings; the pages of the documentation say all they use."""
    doctest_namespace.clear()
    if isinstance(request.node, pytest.DoctestItem) and request.node.path.suffix == ".py":
        import torch

        from quotient_manifolds.manifolds import DiagonalQuotient

        manifold, x = DiagonalQuotient("inv"), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
        doctest_namespace.update(
            torch=torch, DiagonalQuotient=DiagonalQuotient, manifold=manifold, x=x, space=manifold.at(x)
        )
