"""Take a batch apart into its tensors and put it together again: the one place that knows what may hold tensors."""

from __future__ import annotations

import copy
import enum
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

_WHOLE = (Tensor, nn.Module, type, FunctionType, ModuleType, enum.Enum, str, bytes, int, float, complex)
"""Types of what is never taken apart."""


def taken_apart(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a batch holds that holds nothing itself, each with its path, in order.

    Taken apart are mappings of every kind (as the `BatchEncoding` of a tokenizer), lists, deques, tuples with names or
    without, and objects with a tensor among their attributes, such as data classes. A container that is met again
    inside of itself is left out there.
    """
    yield from _leaves(batch, "", ())


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, in the order of `taken_apart`."""
    return [leaf for _, leaf in taken_apart(batch) if isinstance(leaf, Tensor)]


def mapped(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """Return the batch with the value of a function in the place of each tensor; containers are new, of the same types.

    What holds no tensor and is no list, tuple or mapping is passed on as it is.
    Raises TypeError for a container of a type that cannot be copied.
    """
    return _mapped(function, batch, {})


def _parts(node: Any) -> dict[Any, Any]:
    """Return what a container holds, by key; nothing for a leaf."""
    if isinstance(node, _WHOLE):
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
    found = {name: getattr(node, name) for name in names if name[:2] != "__" and hasattr(node, name)}
    return found | getattr(node, "__dict__", {})


def _reaches_tensor(parts: Mapping[Any, Any], seen: set[int]) -> bool:
    for each in parts.values():
        if isinstance(each, Tensor):
            return True
        if id(each) in seen or isinstance(each, _WHOLE):
            continue
        seen.add(id(each))
        held = _parts(each) if isinstance(each, (Mapping, list, tuple, deque)) else _attributes(each)
        if _reaches_tensor(held, seen):
            return True
    return False


def _leaves(node: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    if id(node) in above:
        return
    parts = _parts(node)
    for key, each in parts.items():
        yield from _leaves(each, f"{path}/{type(node).__name__} {key!r}", (*above, id(node)))
    if not parts:
        yield path, node


def _mapped(function: Callable[[Tensor], Any], node: Any, made: dict[int, tuple[Any, Any]]) -> Any:
    if isinstance(node, Tensor):
        return function(node)
    if id(node) in made:
        return made[id(node)][1]
    parts = _parts(node)
    if isinstance(node, (MutableMapping, list, deque)) or (parts and not isinstance(node, (Mapping, tuple))):
        new = _built(node, copy.copy, node)
        made[id(node)] = node, new  # before its parts, which may refer to it
        for key, each in parts.items():
            _put(new, key, _mapped(function, each, made))
        return new
    values = {key: _mapped(function, each, made) for key, each in parts.items()}
    if all(values[key] is each for key, each in parts.items()):
        return node
    if isinstance(node, Mapping):
        return _built(node, type(node), values)
    named_by_c = hasattr(type(node), "n_fields")  # what `Tensor.max` returns
    return _built(node, type(node) if named_by_c else partial(tuple.__new__, type(node)), tuple(values.values()))


def _built(node: Any, build: Callable[[Any], Any], parts: Any) -> Any:
    try:
        return build(parts)
    except Exception as error:  # of a class of the user's
        raise TypeError(
            f"A batch must be made of containers that can be copied. Found a {type(node).__name__}, which raises "
            f"{type(error).__name__}: {' '.join(str(error).split())}; give its tensors in a dict"
        ) from error


def _put(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, (MutableMapping, list, deque)):
        container[key] = value
    elif key in getattr(container, "__dict__", {}):
        vars(container)[key] = value  # which frozen data classes allow, too
    else:
        object.__setattr__(container, key, value)
