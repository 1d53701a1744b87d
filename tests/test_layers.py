"""The house keeps its order: imports only go down, and optional packages stay behind one door each."""

from __future__ import annotations

import ast
import graphlib
from functools import cache
from pathlib import Path

import pytest

import quotient_manifolds

PACKAGE = Path(quotient_manifolds.__file__).parent
NAME = PACKAGE.name

# A room is a module or a folder directly under the package. A room imports from itself and from lower levels only.
FROM_THE_GROUND = (
    "batches derivatives",
    "version linalg replica sharded files messages check statistics",
    "manifolds data_options",
    "symmetries pymanopt",
    "geometry",
    "sharpness",
    "load optim plots",
    "report merge orbit callbacks",
    "compare",
    "demo",
    "cli",
    "__init__ __main__",
)
LEVELS = {room: level for level, rooms in enumerate(FROM_THE_GROUND) for room in rooms.split()}

# Rooms inside a room that use nothing else of the package.
SELF_CONTAINED = ("symmetries.groups",)

# The modules or rooms in which an optional package may be imported.
DOORS: dict[str, str | tuple[str, ...]] = {
    "transformers": ("load.huggingface", "callbacks"),
    "safetensors": "load",
    "sklearn": "demo",
    "joblib": "demo",
    "pandas": ("sharpness.result", "compare", "demo.zoo"),
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


@cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, module) for every import statement in the file, wherever it stands, relative ones resolved."""
    here = dotted(path).split(".") if path.stem == "__init__" else dotted(path).split(".")[:-1]
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*here[: len(here) - node.level + 1], *filter(None, [node.module])])
            source = base if node.level else node.module or ""
            # `from package import module` names a module, not something inside one.
            inside = ((f"{source}.{alias.name}", source) for alias in node.names)
            found += [(node.lineno, module if module in DOTTED else source) for module, source in inside]
    return tuple(found)


def test_every_room_has_a_level() -> None:
    assert {room(module) for module in DOTTED} <= set(LEVELS)


def test_imports_only_go_down() -> None:
    upward = [
        f"{path}:{line} imports {module} (level {LEVELS[room(module)]}) from level {LEVELS[room(mine)]}"
        for mine, path in DOTTED.items()
        for line, module in imports(path)
        if module.split(".")[0] == NAME and room(module) != room(mine) and LEVELS[room(module)] >= LEVELS[room(mine)]
    ]
    assert not upward, "\n".join(upward)


@pytest.mark.parametrize("inner", SELF_CONTAINED)
def test_inner_room_imports_nothing_of_the_package(inner: str) -> None:
    outward = [
        f"{path.relative_to(PACKAGE)}:{line} imports {module}"
        for mine, path in DOTTED.items()
        for line, module in imports(path)
        if f"{mine}.".startswith(f"{NAME}.{inner}.")
        and module.split(".")[0] == NAME
        and not f"{module}.".startswith(f"{NAME}.{inner}.")
    ]
    assert not outward, "\n".join(outward)


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
