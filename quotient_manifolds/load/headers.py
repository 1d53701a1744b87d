"""What files of weights hold, by their headers alone, and models that would need far more than that."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from quotient_manifolds.load.names import first_line, shown

Shapes = Mapping[str, tuple[int, ...]]

# A model may have more parameters than its file: tied weights stand there once, quantised ones are packed.
EXCESS = 8
NUMBERS, TENSORS = 10_000_000, 1_000  # and that many more, for models that are small
LABELS, LAYERS = 10_000, 1_000  # that any configuration may have; more only if the weights have as many


class TooLarge(ValueError):
    """A configuration asks for a model that its weights cannot be those of."""


def shapes_in(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor in files of safetensors; only their headers are read."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            'Files of safetensors need that library: pip install "quotient-manifolds[transformers]".'
        ) from error
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as weights:
                shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        except Exception as error:  # safetensors' own kind, or the system's
            raise ValueError(f"{shown(file)} does not load: {first_line(error)}") from error
    return shapes


def check_config(config: Mapping[str, Any], shapes: Shapes, where: str) -> None:
    """Raise ValueError for counts of classes or layers, at any depth of `config`, that the weights are far from.

    Before any object is made of the configuration: a label for each class, a setting for each layer, fill the memory.
    """
    widest = max((size for shape in shapes.values() for size in shape), default=0)
    for name, value in _integers(config):
        limit = max(LABELS, widest) if name in ("num_labels", "num_classes") else None
        if "layer" in name or name in ("depth", "depths"):
            limit = max(LAYERS, len(shapes))
        if limit is not None and value > limit:
            raise TooLarge(
                f"{where} asks for {name} = {value}, but its weights are {len(shapes)} tensors of at most {widest} "
                "rows or columns; one of the two is not this model's."
            )


def _integers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """(key, number) for whole numbers in nested dicts and lists; those of a list go by the list's key."""
    stack = [(name, value)]
    while stack:
        key, each = stack.pop()
        if isinstance(each, dict):
            stack += [(str(inner), content) for inner, content in each.items()]
        elif isinstance(each, list):
            stack += [(key, content) for content in each]
        elif isinstance(each, (int, float)) and not isinstance(each, bool) and math.isfinite(each):
            yield key, int(each)


@contextmanager
def at_most(shapes: Shapes, where: str) -> Iterator[None]:
    """Stop a model from being built as soon as it has many times the parameters that `shapes` lists.

    Counted when a module takes a parameter, in this thread; one that is put in another's place counts once.
    """
    here = threading.get_ident()
    held = sum(math.prod(shape) for shape in shapes.values())
    numbers, count = EXCESS * held + NUMBERS, EXCESS * len(shapes) + TENSORS
    seen: set[tuple[int, str]] = set()
    built = 0

    def watch(module: nn.Module, name: str, parameter: Tensor | None) -> None:
        nonlocal built
        if threading.get_ident() != here or parameter is None or (id(module), name) in seen:
            return
        seen.add((id(module), name))
        built += math.prod(parameter.shape)
        if built > numbers or len(seen) > count:
            raise TooLarge(
                f"{where} describes a model that is many times larger than its weights, which are {len(shapes)} "
                f"tensors of {held} numbers in all; one of the two is not this model's."
            )

    handle = register_module_parameter_registration_hook(watch)
    try:
        yield
    finally:
        handle.remove()
