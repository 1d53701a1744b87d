"""The package as one name: imported without a warning, at no cost, and seen by type checkers and `help`."""

from __future__ import annotations

import ast
import importlib
import inspect
import operator
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import quotient_manifolds
from tests.test_layers import DOORS, DOTTED

IMPORTS = """
import importlib, sys, warnings
import quotient_manifolds as qm
print("torch" in sys.modules)
for name in {modules}: importlib.import_module(name)
print(*sorted(set(sys.modules) & set({optional})))
for name in qm.__all__: getattr(qm, name)
try: warnings.warn("`torch.jit.script` is deprecated", DeprecationWarning)
except DeprecationWarning: print("seen", qm.pymanopt.as_pymanopt.__name__, qm.manifolds.Recipe.__name__)
"""


def test_the_import_loads_no_torch_its_modules_no_optional_package_and_its_names_give_no_warning() -> None:
    """Of geoopt's import one warning is kept quiet; it and every other stays an error elsewhere."""
    late = tuple(f"quotient_manifolds.{room}" for room in ("cli.", "compare", "callbacks", "__main__"))
    code = IMPORTS.format(modules=[name for name in DOTTED if not name.startswith(late)], optional=[*DOORS])
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False", "", "seen as_pymanopt Recipe"]


FINDS = """
import sys, torch
import quotient_manifolds as qm
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
x = torch.randn(5, 3)
found = qm.find_symmetries(model, x), qm.find_symmetries(model, (x, torch.ones(5).long()), evaluate=qm.cross_entropy)
print([len(each.pairs) for each in found], "torch._dynamo" in sys.modules)
"""


def test_finding_loads_no_compiler() -> None:
    """torch's takes seconds to import, and many operations of Python load it in passing."""
    done = subprocess.run([sys.executable, "-c", FINDS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[1, 1] False"


WITHOUT_DOCSTRINGS = """
import importlib
import quotient_manifolds as qm, torch
for name in {modules}: importlib.import_module(name)
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
model = torch.nn.Sequential(layer, torch.nn.Flatten(), torch.nn.Linear(40, 3)).eval()
batches = [(torch.randn(4, 5, 8), torch.tensor([0, 1, 2, 0]))]
for geometry in "adaptive", "inv", "mix":
    print(qm.worst_case_sharpness(model, qm.cross_entropy, batches, geometry, 0.1, steps=9).mean)
    print(qm.gradient_norm(model, qm.cross_entropy, batches, geometry).mean)
"""


def test_the_package_measures_where_python_drops_docstrings() -> None:
    """`python -OO` computes what `python` does; the callback needs transformers, which does not import there."""
    late = tuple(f"quotient_manifolds.{room}" for room in ("callbacks", "__main__"))
    code = WITHOUT_DOCSTRINGS.format(modules=[name for name in DOTTED if not name.startswith(late)])
    done = [
        subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=False)
        for flags in ([], ["-OO"])
    ]
    assert [(each.returncode, each.stderr[-2000:]) for each in done] == [(0, "")] * 2
    assert done[0].stdout == done[1].stdout != ""


def declared() -> dict[str, str]:
    """Public names and the modules that the type checker is told they come from."""
    tree = ast.parse(Path(quotient_manifolds.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module != "quotient_manifolds"
        for alias in node.names
    }


def test_names_at_run_time_are_those_a_type_checker_is_told() -> None:
    names = declared()
    assert set(names) | {"__version__"} == set(quotient_manifolds.__all__)
    for name, module in names.items():
        assert getattr(quotient_manifolds, name) is getattr(importlib.import_module(module), name), name


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        quotient_manifolds.no_such_name  # noqa: B018
    assert {name for name, _ in inspect.getmembers(quotient_manifolds)} >= set(quotient_manifolds.__all__)


MOVED = {
    "GEODESICS": "manifolds",
    "ConvergenceWarning": "sharpness",
    "Scope": "symmetries",
    "TangentSpace": "geometry",
}


def test_the_package_has_at_most_44_names_of_its_own_and_says_where_others_are() -> None:
    assert len(quotient_manifolds.__all__) <= 44 + 1  # and the version
    for name, room in MOVED.items():
        with pytest.raises(AttributeError, match=re.escape(f"use {room}.{name}")):
            getattr(quotient_manifolds, name)
        assert operator.attrgetter(f"{room}.{name}")(quotient_manifolds) is not None


def test_editable_install_is_a_path_that_type_checkers_follow(tmp_path: Path) -> None:
    """The import hook that setuptools makes otherwise hides the package from mypy and from editors."""
    pytest.importorskip("setuptools", minversion="77")
    here, project, site = Path(quotient_manifolds.__file__).parents[1], tmp_path / "project", tmp_path / "site"
    for folder in (site, project / "quotient_manifolds", project / "tests"):
        folder.mkdir(parents=True)
    package = [f"quotient_manifolds/{name}.py" for name in ("__init__", "version")]
    for name in ("pyproject.toml", "README.md", "LICENSE", *package):
        shutil.copy(here / name, project / name)
    build = f"from setuptools.build_meta import build_editable; build_editable({str(site)!r})"
    made = subprocess.run([sys.executable, "-c", build], cwd=project, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    with zipfile.ZipFile(next(site.glob("*.whl"))) as wheel:
        files = {name: wheel.read(name).decode() for name in wheel.namelist() if "dist-info" not in name}
    assert [Path(text.strip()) for text in files.values()] == [project], files


def test_what_is_drawn_at_random_has_a_dtype_of_its_own() -> None:
    """By torch's default dtype one seed would give two draws."""
    without = []
    for path in Path(quotient_manifolds.__file__).parent.rglob("*.py"):
        for function in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)):
            nodes = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            calls = {node: node.func.attr for node in nodes if isinstance(node.func, ast.Attribute)}
            drawn = {"rand", "randn", "normal"} | ({"empty"} if {"normal_", "uniform_"} & {*calls.values()} else set())
            bare = [each for each in calls if "dtype" not in {keyword.arg for keyword in each.keywords}]
            without += [f"{path}:{call.lineno}" for call in bare if calls[call] in drawn]
    assert not without
