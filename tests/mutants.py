"""Count how many small faults in the manifolds and in sharpness the tests notice: `python -m tests.mutants`.

Each mutant is a copy of the package with one operator, comparison, constant or sign changed, drawn with a seed. It is
killed when the tests of its module fail or do not end in time. Needs minutes for each mutant.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("manifolds", "sharpness")
SECONDS = 600
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}


def faults(tree: ast.Module) -> Iterator[tuple[int, ast.AST, str, object]]:
    """Yield line, node, field and new value of every fault that can be made in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
            yield node.lineno, node, "op", SWAPS[type(node.op)]()
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            yield node.lineno, node, "ops", [SWAPS[type(node.ops[0])](), *node.ops[1:]]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield node.lineno, node, "op", ast.UAdd()
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value:
            yield node.lineno, node, "value", 2 * node.value  # type: ignore[operator]


def mutants(count: int, seed: int) -> list[tuple[Path, int]]:
    """Draw files and the numbers of the faults in them."""
    files = sorted(path for room in ROOMS for path in (ROOT / "quotient_manifolds" / room).rglob("*.py"))
    places = [(path, n) for path in files for n, _ in enumerate(faults(ast.parse(path.read_text(encoding="utf-8"))))]
    return random.Random(seed).sample(places, count)


def survives(path: Path, number: int) -> tuple[bool, str]:
    """Return whether the tests of a module pass with a fault in it, and where the fault is."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    line, node, field, value = list(faults(tree))[number]
    before = ast.unparse(node)
    setattr(node, field, value)
    where = f"{path.relative_to(ROOT)}:{line}: {before} -> {ast.unparse(node)}"
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        for folder in ("quotient_manifolds", "tests", "notebooks/studies"):
            shutil.copytree(ROOT / folder, copy / folder)
        for file in ("setup.cfg", "pyproject.toml"):
            shutil.copy(ROOT / file, copy)
        (copy / path.relative_to(ROOT)).write_text(ast.unparse(tree), encoding="utf-8")
        room = path.relative_to(ROOT / "quotient_manifolds").parts[0]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", f"tests/{room}"]
        paths = os.pathsep.join((name, str(copy / "notebooks")))
        try:
            done = subprocess.run(
                command,
                cwd=copy,
                env={**os.environ, "PYTHONPATH": paths},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return False, f"{where} (no end)"
        return done.returncode == 0, where


def main() -> None:
    """Print the mutants that survive, and how many were killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    killed = 0
    for done, place in enumerate(mutants(options.count, options.seed), 1):
        alive, where = survives(*place)
        killed += not alive
        print(f"{done}/{options.count} {'SURVIVES' if alive else 'killed'} {where}", flush=True)
    print(f"killed {killed} of {options.count}")


if __name__ == "__main__":
    main()
