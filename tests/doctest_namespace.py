"""The names that the examples in docstrings take for granted; a pytest plugin (setup.cfg)."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _example(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> None:
    """Give docstrings a manifold, a point and its horizontal space; the pages of the documentation say all they use.

    The manifold is that of the module, as its class's docstring says, and elsewhere a `DiagonalQuotient`.
    """
    doctest_namespace.clear()
    if isinstance(request.node, pytest.DoctestItem) and request.node.path.suffix == ".py":
        import torch

        import quotient_manifolds as qm
        import quotient_manifolds.manifolds as m

        def squared(x: Any, eta: Any, zeta: Any) -> Any:
            return (eta * zeta).sum() / (x * x).sum()

        rays = m.Recipe(
            lambda a, x: a * x, squared, identity=torch.ones(()), shape=(2,), balance=lambda x: x / x.norm()
        )
        own: dict[str, tuple[m.QuotientManifold, list[Any]]] = {
            "fixed_rank": (m.FixedRankQuotient(2, 1), [[3.0], [4.0], [5.0]]),
            "rotary": (m.RotaryQuotient(1, 1), [[3.0, 4.0], [5.0, 0.0]]),
            "recipe": (rays, [3.0, 4.0]),
        }
        module = "rotary" if ".Rotary" in request.node.name else request.node.path.stem
        manifold, entries = own.get(module, (m.DiagonalQuotient("inv"), [[1.0, 2.0], [4.0, 8.0]]))
        x = torch.tensor(entries)
        orbit = ("Sparsity", "descend_orbit")
        doctest_namespace.update({name: getattr(m, name) for name in m.__all__ if name.endswith("Quotient")})
        doctest_namespace.update(
            {name: getattr(qm, name) for name in ("find_symmetries", "QuotientAdam", "QuotientSGD", *orbit)}
        )
        doctest_namespace.update(torch=torch, manifold=manifold, x=x, space=manifold.at(x), rays=rays)
