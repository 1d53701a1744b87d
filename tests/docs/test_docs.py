"""Every public class and method of the manifolds says what it computes, and shows it in an example that runs."""

from __future__ import annotations

import inspect

import pytest

from quotient_manifolds import manifolds

CLASSES = [
    member for name in manifolds.__all__ if inspect.isclass(member := getattr(manifolds, name)) and member.__dict__
]


def methods() -> list[tuple[str, object]]:
    found = []
    for cls in CLASSES:
        if issubclass(cls, (tuple, Exception)):
            continue
        for name, member in vars(cls).items():
            if not name.startswith("_") and inspect.isfunction(member) and name not in ("extra_repr", "register"):
                found.append((f"{cls.__name__}.{name}", member))
    return found


@pytest.mark.parametrize(("name", "method"), methods(), ids=[name for name, _ in methods()])
def test_every_public_method_has_a_statement_and_an_example(name: str, method: object) -> None:
    text = inspect.getdoc(method) or ""
    assert text.split("\n")[0].strip().endswith((".", ":")) or "\n\n" in text, f"{name} begins with a statement"
    assert ">>>" in text, f"{name} has no example"
