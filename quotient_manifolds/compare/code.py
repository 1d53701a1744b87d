"""Hash the code that computes the values: the user's modules by source, installed packages by version."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from quotient_manifolds.compare.identity import hashed
from quotient_manifolds.messages import is_users

OURS = __name__.partition(".")[0]  # this package is identified by VERSION and MEANING instead
BY_NAME = ("import_module", "__import__")
BY_FILE = ("spec_from_file_location", "run_path", "run_module", "exec")
PLAIN = (int, float, complex, str, bytes, bool, type(None))


@dataclass(frozen=True)
class Source:
    """Hold the hash of a module's file, the names of the modules that it may import, and the hash of its functions.

    memory: hash of its functions in memory, "" if all of them are in the file. They are not if the file was edited
    after its import.
    """

    digest: str
    imports: tuple[str, ...]
    memory: str = ""


_IMPORTED: dict[str, tuple[object, Source]] = {}  # by module: its import, and its source when first seen afterwards


def code_on_disk(references: Iterable[str]) -> dict[str, str]:
    """Return hashes, by module name, of the source files of modules (or of functions' modules) and of their imports.

    Only the user's modules are hashed: not installed ones, Python's or this package's. For an installed package, the
    key holds name and version. Imports are followed wherever they stand in a file. If the name of an import is
    computed, every module below the folder from which the file is imported counts. Nothing is imported.
    """
    return _followed([each.partition(":")[0] for each in references], _read)


def code_imported(references: Iterable[str], classes: Iterable[type]) -> dict[str, str]:
    """Return the hashes of `code_on_disk`, for modules as this process has imported them.

    references: the user's functions, as package.module:function, or modules. classes: the classes of the objects that
    these functions made. For code without a file, as in a notebook, the code in memory and all that it names is hashed.
    """
    split = [each.partition(":") for each in references]
    objects = [(module, name, getattr(sys.modules.get(module), name, None)) for module, _, name in split]
    objects += [(each.__module__, each.__qualname__, each) for each in classes]
    modules, memory = [module for module, _, _ in objects], dict[str, str]()
    for module, name, each in objects:
        if module.partition(".")[0] not in sys.stdlib_module_names and _file(module) is None:
            memory[f"{module}.{name} in memory"], named = _described(each, module)
            modules += named
    return _followed(modules, _as_imported) | memory


def edited(code: Mapping[str, str], before: Mapping[str, str]) -> str | None:
    """Return the name of a module whose source has changed; None if none has."""
    return next((name for name, digest in before.items() if code.get(name, digest) != digest), None)


# ---- modules with files


def _followed(names: Iterable[str], source_of: Callable[[str, Path], Source]) -> dict[str, str]:
    found, seen, waiting = dict[str, str](), set[str](), [*names]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        top, above = name.partition(".")[0], name.rpartition(".")[0]
        file = None if top == OURS else _file(name)
        if above:
            waiting.append(above)
        if file is None:
            continue
        if is_users(str(file)):
            source = source_of(name, file)
            found[name] = source.digest
            found |= {f"{name} in memory": source.memory} if source.memory else {}
            waiting += source.imports
        elif top not in sys.stdlib_module_names:
            found[f"{top} {_version(top)}"] = ""
    return found


def _file(name: str) -> Path | None:
    """Return the file of a module, imported or not; None if it has none."""
    spec = _spec(name)
    place = getattr(sys.modules.get(name), "__file__", None) or (spec.origin if spec and spec.has_location else None)
    return Path(place) if place and Path(place).is_file() else None


def _spec(name: str) -> Any:
    """Return the import spec of a module; None if it cannot be imported. Its parent packages are not imported."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None)
    above = name.rpartition(".")[0]
    try:
        if not above:
            return importlib.util.find_spec(name)
        parent = _spec(above)
        places = None if parent is None else parent.submodule_search_locations
        return PathFinder.find_spec(name, places) if places else None
    except (ImportError, ValueError, AttributeError):  # finders of other packages raise these
        return None


def _as_imported(name: str, file: Path) -> Source:
    """Return the source of a module as this process first saw it; a new import reads it again."""
    module = sys.modules.get(name)
    if module is None:
        return _read(name, file)
    imported = getattr(module, "__spec__", None) or module  # each import makes a new spec, also importlib.reload
    if name not in _IMPORTED or _IMPORTED[name][0] is not imported:
        source = _read(name, file)
        _IMPORTED[name] = imported, Source(source.digest, source.imports, _other_functions(module, file))
    return _IMPORTED[name][1]


def _read(name: str, file: Path) -> Source:
    content = file.read_bytes()
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    root = Path(os.path.abspath(file)).parents[len(package.split(".")) if package else 0]
    try:
        imports = tuple(dict.fromkeys(_imports(ast.parse(content), package, root)))
    except (SyntaxError, ValueError, RecursionError):  # a compiled module, for example
        imports = ()
    return Source(hashlib.sha256(content).hexdigest(), imports)


def _imports(tree: ast.Module, package: str, root: Path) -> Iterator[str]:
    """Yield the names of all modules that a file may import; some of the names may not be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute("." * node.level + (node.module or ""), package)
            yield from (base, *(f"{base}.{each.name}" for each in node.names))
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            given = node.args[0] if node.args else None
            if called in BY_NAME and isinstance(given, ast.Constant):
                yield _absolute(str(given.value), package)
            elif called in (*BY_NAME, *BY_FILE):
                yield from _below(root)


def _absolute(name: str, package: str) -> str:
    try:
        return importlib.util.resolve_name(name, package)
    except ImportError:  # the relative name leads out of the package
        return name.lstrip(".")


def _below(root: Path) -> Iterator[str]:
    """Yield the names of all modules below a folder, without hidden folders and environments."""
    for folder, below, files in os.walk(root):
        below[:] = sorted(
            each for each in below if each.isidentifier() and not (Path(folder, each, "pyvenv.cfg")).exists()
        )
        for file in sorted(files):
            if file.endswith(".py"):
                yield ".".join(Path(folder, file).relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _version(package: str) -> str:
    """Return the version of an installed package without its build tag, so that CPU and GPU builds are equal."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:  # a distribution may have another name
        names = sorted(set(_distributions().get(package, ())))
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


@cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


# ---- code in memory


def _other_functions(module: ModuleType, file: Path) -> str:
    """Return a hash of a module's functions; "" if the present file contains all of them."""
    codes = [each for each in _codes(vars(module), module.__name__, []) if each.co_filename == str(file)]
    own = [_text(each) for each in codes]
    try:
        now = set(map(_text, _all_codes(compile(file.read_bytes(), str(file), "exec", dont_inherit=True))))
    except (SyntaxError, ValueError, RecursionError):
        now = set()
    return "" if now.issuperset(own) else hashed(own)


def _codes(space: Mapping[str, Any], module: str, seen: list[Any]) -> Iterator[CodeType]:
    """Yield the code of the functions and methods that a module defines."""
    for value in space.values():
        for each in _parts(value):
            if isinstance(each, FunctionType):
                yield each.__code__
            elif isinstance(each, type) and each.__module__ == module and not any(each is other for other in seen):
                seen.append(each)
                yield from _codes(dict(vars(each)), module, seen)


def _parts(value: Any) -> list[Any]:
    """Return the functions that a descriptor of a class holds, or the value itself."""
    if isinstance(value, property):
        return [each for each in (value.fget, value.fset) if each is not None]
    return [value.__func__] if isinstance(value, (staticmethod, classmethod)) else [value]


def _text(code: CodeType) -> str:
    """Return a text that is equal for equal code, wherever it is in a file and in whichever process."""
    constants = [_text(each) if isinstance(each, CodeType) else _plain(each) for each in code.co_consts]
    return repr((code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants))


def _plain(value: Any) -> str:
    """Return a constant as text, with sets sorted."""
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _all_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and all code objects nested in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _all_codes(each)


def _described(value: Any, module: str) -> tuple[str, list[str]]:
    """Return the hash of a function or class from a module without a file, and the names of the modules it uses."""
    texts, modules, seen, waiting = list[str](), list[str](), list[Any](), [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, PLAIN):
            texts.append(repr(each))
        elif isinstance(each, ModuleType):
            modules.append(each.__name__)
        elif not any(each is other for other in seen):
            seen.append(each)
            text, used, held = _made_of(each, module)
            texts.append(text)
            modules.append(used)
            waiting += held
    return hashed(texts), modules


def _made_of(value: Any, module: str) -> tuple[str, str, list[Any]]:
    """Return the text of a value in memory, its module, and the objects that it holds or names in that module."""
    if isinstance(value, FunctionType):
        space, owner = value.__globals__, str(value.__globals__.get("__name__"))
        names = sorted({name for code in _all_codes(value.__code__) for name in code.co_names})
        held = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        held += [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        held += [space[name] for name in names if name in space] if owner == module else []
        return _text(value.__code__), owner, held
    if isinstance(value, type):
        own = {name: each for name, each in vars(value).items() if not name.startswith("__") or callable(each)}
        held = [*value.__bases__, *(part for each in own.values() for part in _parts(each))]
        return repr([*own]), value.__module__, held if value.__module__ == module else []
    if isinstance(value, MethodType):
        return "", module, [value.__func__, value.__self__]
    if isinstance(value, partial):
        return "", module, [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict):
        return str(len(value)), module, [*value, *value.values()]
    if isinstance(value, (list, tuple)):
        return str(len(value)), module, [*value]
    of_class = type(value)
    held = [of_class, *getattr(value, "__dict__", {}).values()] if of_class.__module__ == module else []
    return of_class.__qualname__, of_class.__module__, held
