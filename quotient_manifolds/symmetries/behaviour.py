"""Tell from its source whether a module's forward pass computes a softmax whose result enters a product.

Followed are methods of the module, of its ancestors too, and functions of the package they stand in, by name; other
modules that it calls speak for themselves. Where there is no source (a prompt, exec), the names that the compiled code
uses decide.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

KERNELS = frozenset(
    {
        "scaled_dot_product_attention",
        "multi_head_attention_forward",
        "_native_multi_head_attention",
        "flex_attention",
        "memory_efficient_attention",
        "eager_attention_forward",
        "flash_attn_func",
        "flash_attn_qkvpacked_func",
        "flash_attn_kvpacked_func",
        "flash_attn_varlen_func",
        "dot_product_attention",
    }
)
"""Functions that are attention, whoever calls them."""

PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum", "contract", "mm", "tensordot", "__matmul__"})
_SOFTMAX = re.compile(r"softmax|softmin|sparsemax|entmax", re.IGNORECASE)
_OTHER = re.compile(r"log_?softmax|gumbel|cross_entropy|criterion|loss", re.IGNORECASE)


def attends(module: nn.Module) -> str:
    """Return what makes the forward pass attention: the name of a kernel, "softmax", or "" if nothing does."""
    if isinstance(module, (torch.jit.ScriptModule, torch.fx.GraphModule)):
        return _in_tree(_parsed(str(getattr(module, "code", ""))), frozenset(), {})[0]
    layers = frozenset(name for name, child in module.named_children() if isinstance(child, nn.Softmax))
    cls: Any = type(module)
    return _of_class(cls, _plain(vars(module).get("forward")), layers)


@functools.lru_cache(maxsize=1024)
def _of_class(cls: type, forward: FunctionType | None, layers: frozenset[str]) -> str:
    """Return what makes a class attention; forward: the instance's own, where one was put in the class's place."""
    functions = list(_reached(cls, forward or _plain(getattr(cls, "forward", None))))
    soft: set[str] = set()
    for function in reversed(functions):  # what is called before what calls it: some of them return a softmax
        found, softens = _in_function(function, layers, soft)
        if found:
            return found
        if softens:
            soft.add(function.__name__)
    return ""


def _reached(cls: type, start: FunctionType | None) -> Iterator[FunctionType]:
    """Yield the function, and those of the class and of its package whose names its code uses, each once."""
    waiting, seen = [start], set()
    while waiting:
        function = waiting.pop(0)
        if function is None or function in seen:
            continue
        seen.add(function)
        yield function
        names = set(_names(function.__code__))
        places = [vars(ancestor) for ancestor in cls.__mro__] + [function.__globals__]
        used = [place[name] for place in places for name in sorted(names & place.keys())]
        beside = [vars(each) for each in used if isinstance(each, ModuleType) and _package(each) == _package(function)]
        used += [place[name] for place in beside for name in sorted(names & place.keys())]
        found = [_plain(each) for each in used]
        waiting += [
            each for each in found if each is not None and _package(each) in (_package(function), _package(cls))
        ]


def _plain(value: object) -> FunctionType | None:
    """Return the function below methods and wrappers; None if there is none."""
    value = inspect.unwrap(value) if callable(value) and not isinstance(value, type) else value
    value = value.func if isinstance(value, functools.partial) else value
    value = getattr(value, "__func__", value)
    return value if isinstance(value, FunctionType) else None


def _package(value: object) -> str:
    """Return the first part of the name of the module where something is defined."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _in_function(function: FunctionType, layers: frozenset[str], soft: set[str]) -> tuple[str, bool]:
    """Return what in the function is attention's, and whether it takes a softmax."""
    called = {name: getattr(value, "__name__", name) for name, value in function.__globals__.items()}
    try:
        tree = _parsed(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError):
        return _in_code(function.__code__, layers | soft, called)
    return _in_tree(tree, layers | soft, called)


def _parsed(text: str) -> ast.AST:
    try:
        return ast.parse(text)
    except SyntaxError:  # a lambda in the middle of an expression
        return ast.Module([], [])


def _in_code(code: CodeType, soft: frozenset[str], called: dict[str, str]) -> tuple[str, bool]:
    names = {called.get(name, name) for name in _names(code)}
    kernel = next(iter(sorted(names & KERNELS)), "")
    softens = any(_is_softmax(name, soft) for name in names)
    return kernel or ("softmax" if softens and (names & PRODUCTS or _multiplies(code)) else ""), softens


def _multiplies(code: CodeType) -> bool:
    operators = (step.argrepr if step.opname == "BINARY_OP" else step.opname for step in dis.get_instructions(code))
    return any(operator in ("@", "BINARY_MATRIX_MULTIPLY") for operator in operators)


def _is_softmax(name: str, soft: frozenset[str]) -> bool:
    return name in soft or (_SOFTMAX.search(name) is not None and _OTHER.search(name) is None)


def _in_tree(tree: ast.AST, soft: frozenset[str], called: dict[str, str]) -> tuple[str, bool]:
    """Look, as in functions, for a product one of whose factors depends on a softmax, through variables too."""
    parts = [part for part in ast.walk(tree) if isinstance(part, (ast.stmt, ast.expr))]
    reading = _Reading(soft, called)
    kernel = next((name for part in parts if (name := reading.name(part)) in KERNELS), "")
    if kernel:
        return kernel, True
    for part in sorted(parts, key=lambda part: (part.lineno, part.col_offset)):
        reading.follow(part)
        if any(reading.depends(factor) for factor in reading.factors(part)):
            return "softmax", True
    return "", any(reading.softens(part) for part in parts)


class _Reading:
    """Pass once over a function: `tainted` are the variables so far whose values depend on a softmax."""

    def __init__(self, soft: frozenset[str], called: dict[str, str]) -> None:
        self._soft, self._called = soft, called
        self.tainted: set[str] = set()

    def name(self, node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            return node.attr
        return self._called.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    def softens(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and _is_softmax(self.name(node.func), self._soft)

    def depends(self, node: ast.AST) -> bool:
        return any(
            self.softens(part) or (isinstance(part, ast.Name) and part.id in self.tainted) for part in ast.walk(node)
        )

    def follow(self, node: ast.AST) -> None:
        """Taint what an assignment stores, if what it stores depends on a softmax."""
        if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
            return
        if node.value is not None and self.depends(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            stored = (part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
            self.tainted |= {part.id for part in stored if isinstance(part.ctx, ast.Store)}

    def factors(self, node: ast.AST) -> list[ast.expr]:
        """Return what the expression multiplies, if it is a product of matrices."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            return [node.left, node.right]
        if isinstance(node, ast.Call) and self.name(node.func) in PRODUCTS:
            return [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
        return []
