"""Flatten a batch into its tensors and rebuild it; no other module depends on the types of containers."""

from __future__ import annotations

import copy
import enum
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

_LEAVES = (Tensor, nn.Module, type, FunctionType, ModuleType, enum.Enum, str, bytes, int, float, complex)
"""Types that are never taken apart."""


def taken_apart(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each leaf of a batch, in order.

    Mappings of every kind (such as the `BatchEncoding` of a tokenizer), lists, deques, tuples, named tuples and objects
    with a tensor among their attributes (such as data classes) are taken apart. A container inside itself is skipped.
    """
    yield from _leaves(batch, "", ())


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, in the order of `taken_apart`."""
    return [leaf for _, leaf in taken_apart(batch) if isinstance(leaf, Tensor)]


def mapped(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """Return the batch with each tensor replaced by its image under a function.

    Containers are new, of the same types. Other objects without a tensor are passed on unchanged.
    Raises TypeError for a container of a type that cannot be copied.
    """
    return _mapped(function, batch, {})


def _parts(node: Any) -> dict[Any, Any]:
    """Return the content of a container by key; empty for a leaf."""
    if isinstance(node, _LEAVES):
        return {}
    if isinstance(node, Mapping):
        return dict(node.items())
    if isinstance(node, (list, tuple, deque)):
        return dict(enumerate(node))
    attributes = _attributes(node)
    return attributes if _reaches_tensor(attributes, {id(node)}) else {}


def _attributes(node: Any) -> dict[str, Any]:
    slots = (vars(kind).get("__slots__", ()) for kind in type(node).__mro__)
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    in_slots = {name: getattr(node, name) for name in names if name[:2] != "__" and hasattr(node, name)}
    return in_slots | getattr(node, "__dict__", {})


def _reaches_tensor(parts: Mapping[Any, Any], seen: set[int]) -> bool:
    """Return whether a part is or contains a tensor. `seen` has the ids of visited containers, and is updated."""
    for part in parts.values():
        if isinstance(part, Tensor):
            return True
        if id(part) in seen or isinstance(part, _LEAVES):
            continue
        seen.add(id(part))
        inside = _parts(part) if isinstance(part, (Mapping, list, tuple, deque)) else _attributes(part)
        if _reaches_tensor(inside, seen):
            return True
    return False


def _leaves(node: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    if id(node) in above:
        return
    parts = _parts(node)
    for key, part in parts.items():
        yield from _leaves(part, f"{path}/{type(node).__name__} {key!r}", (*above, id(node)))
    if not parts:
        yield path, node


def _mapped(function: Callable[[Tensor], Any], node: Any, memo: dict[int, tuple[Any, Any]]) -> Any:
    """Return the image of a node; `memo` has copies by the id of the original, as in `copy.deepcopy`."""
    if isinstance(node, Tensor):
        return function(node)
    if id(node) in memo:
        return memo[id(node)][1]
    parts = _parts(node)
    if isinstance(node, (MutableMapping, list, deque)) or (parts and not isinstance(node, (Mapping, tuple))):
        new = _built(node, copy.copy, node)
        memo[id(node)] = node, new  # entered before its parts are mapped, because they may refer to it
        for key, part in parts.items():
            _put(new, key, _mapped(function, part, memo))
        return new
    values = {key: _mapped(function, part, memo) for key, part in parts.items()}
    if all(values[key] is part for key, part in parts.items()):
        return node
    if isinstance(node, Mapping):
        return _built(node, type(node), values)
    is_structseq = hasattr(type(node), "n_fields")  # such as the result of `Tensor.max`
    return _built(node, type(node) if is_structseq else partial(tuple.__new__, type(node)), tuple(values.values()))


def _built(node: Any, build: Callable[[Any], Any], parts: Any) -> Any:
    try:
        return build(parts)
    except Exception as error:  # a class of the user may raise anything
        raise TypeError(
            f"A batch must consist of containers that can be copied. Found a {type(node).__name__}, which raises "
            f"{type(error).__name__}: {' '.join(str(error).split())}; give its tensors in a dict"
        ) from error


def _put(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, (MutableMapping, list, deque)):
        container[key] = value
    elif key in getattr(container, "__dict__", {}):
        vars(container)[key] = value  # works for frozen data classes, too
    else:
        object.__setattr__(container, key, value)
