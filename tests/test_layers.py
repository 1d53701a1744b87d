"""The house keeps its order: imports only go down, and optional packages stay behind one door each."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import quotient_manifolds

PACKAGE = Path(quotient_manifolds.__file__).parent
NAME = PACKAGE.name

# A room is a module or a folder directly under the package. A room imports from itself and from lower levels only.
LEVELS = {
    "version": 0,
    "linalg": 0,
    "replica": 0,
    "sharded": 0,
    "files": 0,
    "messages": 0,
    "frames": 0,
    "statistics": 0,
    "manifolds": 1,
    "symmetries": 2,
    "pymanopt": 2,
    "geometry": 3,
    "sharpness": 4,
    "load": 5,
    "optim": 5,
    "plots": 5,
    "report": 6,
    "merge": 6,
    "callbacks": 6,
    "compare": 7,
    "demo": 8,
    "cli": 9,
    "__init__": 10,
    "__main__": 10,
}

# The modules or rooms in which an optional package may be imported.
DOORS: dict[str, str | tuple[str, ...]] = {
    "transformers": ("load.huggingface", "callbacks"),
    "safetensors": "load",
    "sklearn": "demo",
    "joblib": "demo",
    "pandas": ("frames", "compare"),
    "ruamel": "compare.spec_file",
    "dask": "compare.run",
    "distributed": "compare.run",
    "filelock": "compare.store",
    "matplotlib": "plots",
    "jinja2": "report",
    "click": "cli",
    "rich": "cli",
    "pymanopt": "pymanopt",
    "peft": "load.adapters",
}

MODULES = sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join([NAME, *(parts[:-1] if parts[-1] == "__init__" else parts)])


DOTTED = {dotted(path): path for path in MODULES}


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) for every import statement in the file, wherever it stands, relative ones resolved."""
    here = dotted(path).split(".") if path.stem == "__init__" else dotted(path).split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*here[: len(here) - node.level + 1], *filter(None, [node.module])])
            source = base if node.level else node.module or ""
            for alias in node.names:  # `from package import module` names a module, not something inside one
                yield node.lineno, f"{source}.{alias.name}" if f"{source}.{alias.name}" in DOTTED else source


def test_every_room_has_a_level() -> None:
    assert {room(module) for module in DOTTED} <= set(LEVELS)


@pytest.mark.parametrize("path", MODULES, ids=[str(path.relative_to(PACKAGE)) for path in MODULES])
def test_imports_only_go_down(path: Path) -> None:
    mine = room(dotted(path))
    upward = [
        f"{path.name}:{line} imports {module} (level {LEVELS[room(module)]}) from level {LEVELS[mine]}"
        for line, module in imports(path)
        if module.split(".")[0] == NAME and room(module) != mine and LEVELS[room(module)] >= LEVELS[mine]
    ]
    assert not upward, "\n".join(upward)


def test_no_import_cycle_between_modules() -> None:
    graph = {
        dotted(path): {module for _, module in imports(path) if module in DOTTED and module != dotted(path)}
        for path in MODULES
    }
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle


@pytest.mark.parametrize("package", DOORS)
def test_optional_package_has_one_door(package: str) -> None:
    doors = DOORS[package]
    allowed = tuple(f"{NAME}.{door}." for door in ((doors,) if isinstance(doors, str) else doors))
    elsewhere = [
        f"{path.relative_to(PACKAGE)}:{line} imports {module}"
        for path in MODULES
        for line, module in imports(path)
        if module.split(".")[0] == package and not f"{dotted(path)}.".startswith(allowed)
    ]
    assert not elsewhere, "\n".join(elsewhere)


def test_importing_the_package_loads_no_optional_package() -> None:
    modules = [
        module
        for module in DOTTED
        if not module.startswith((f"{NAME}.cli.", f"{NAME}.compare", f"{NAME}.callbacks", f"{NAME}.__main__"))
    ]
    code = (
        f"import sys, importlib\nfor name in {modules}: importlib.import_module(name)\n"
        f"print(*sorted(set(sys.modules) & set({list(DOORS)})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_public_names_exist_and_are_sorted() -> None:
    assert len(set(quotient_manifolds.__all__)) == len(quotient_manifolds.__all__)
    assert [name for name in quotient_manifolds.__all__ if not hasattr(quotient_manifolds, name)] == []
