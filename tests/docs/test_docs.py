"""Every public class and method of the manifolds says what it computes, and shows it in an example that runs."""

from __future__ import annotations

import inspect

import pytest

from quotient_manifolds import manifolds

METHODS = [
    (f"{cls.__name__}.{name}", member)
    for cls in map(vars(manifolds).get, manifolds.__all__)
    if inspect.isclass(cls) and not issubclass(cls, (tuple, Exception))
    for name, member in vars(cls).items()
    if inspect.isfunction(member) and not name.startswith("_") and name not in ("extra_repr", "register")
]


@pytest.mark.parametrize(("name", "method"), METHODS, ids=[name for name, _ in METHODS])
def test_every_public_method_has_a_statement_and_an_example(name: str, method: object) -> None:
    text = inspect.getdoc(method) or ""
    assert text.split("\n")[0].strip().endswith((".", ":")) or "\n\n" in text, f"{name} begins with a statement"
    assert ">>>" in text, f"{name} has no example"
