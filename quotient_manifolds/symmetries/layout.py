"""Describe where an attention class keeps its projections, and what stands between them and their product, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from torch import Tensor, nn

from quotient_manifolds.symmetries.pair import Span

# Submodules that change nothing between projection and product, or only rotate (which a layout declares).
HARMLESS = frozenset({"Dropout", "Identity", "StableDropout", "XDropout", "Softmax"})


class Unrecognised(Exception):
    """Report an attention module whose pairs are not known; the message is the reason."""


@dataclass(frozen=True)
class Place:
    """Say where a layout keeps a piece of a factor: a parameter's path below the module, and how rows are stored there.

    `axes` opens a fused tensor; `axis`, one of its axes, is the concatenation of `pieces`, of which this place is
    number `index`. A piece is a number, or the name of a size of the layout, or a product of such ("heads*g"). An
    optional place (a bias) may be missing.
    """

    path: str
    pattern: str
    optional: bool = False
    axes: str = ""
    axis: str = "block"
    pieces: tuple[int | str, ...] = ()
    index: int = 0

    def span(self, sizes: Mapping[str, int]) -> Span | None:
        """Return the span of the parameter that the piece is, None if it is the whole parameter."""
        if not self.axes:
            return None
        lengths = [_length(piece, sizes) for piece in self.pieces]
        start = sum(lengths[: self.index])
        return Span(self.axes, self.axis, sum(lengths), start, start + lengths[self.index])


@dataclass(frozen=True)
class Rotary:
    """Describe rotary embeddings before the product: which coordinates of a head make a plane, and how many rotate.

    style: "half" pairs coordinates i and i + r/2, "interleaved" 2i and 2i + 1; anything else is an attribute that says
    whether they are interleaved. dims: attribute that counts the r coordinates that rotate (or is their share, a
    fraction), all if empty; they are the first ones. unless: attributes and the values at which the module does not
    rotate at all.
    """

    style: str = "half"
    dims: str = ""
    unless: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True)
class Obstacle:
    """Name an attribute or submodule that, where it is there, not None and not False, takes a pair's symmetry away."""

    kind: Literal["query/key", "value/output"]
    path: str
    reason: str


@dataclass(frozen=True)
class Layout:
    """Say where an attention class keeps its projections: one row of the table of known layouts.

    classes: class names, all under `package` (any, if empty). query, key, value, output: the pieces of the four
    factors. heads: attribute that counts the query heads, and key_heads the key heads if they differ; or width, the
    width of a head, from which both follow by the projections' shapes. Alternatives are separated by "|". sizes:
    further axis lengths, as attributes. beside: parameters allowed next to the projections, as path prefixes; any other
    means that the module computes something else. ignores: submodules that do not matter, by name. rotating: query and
    key places of coordinates with projections of their own, which alone rotate. linears: classes that own the pieces.
    when: attributes and the values that the row is for. key_bias: whether scores see the key bias through the product
    alone. sinks: attributes that give attention a place without key or value. output_bias: what is added to the output,
    if not the bias beside the output's weight.
    """

    classes: tuple[str, ...]
    query: tuple[Place, ...]
    key: tuple[Place, ...]
    value: tuple[Place, ...]
    output: tuple[Place, ...]
    heads: str = ""
    key_heads: str = ""
    width: str = ""
    sizes: tuple[tuple[str, str | int], ...] = ()
    rotary: Rotary | None = None
    rotating: tuple[tuple[Place, ...], tuple[Place, ...]] = ((), ())
    obstacles: tuple[Obstacle, ...] = ()
    beside: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()
    linears: tuple[str, ...] = ("Linear", "NonDynamicallyQuantizableLinear")
    package: str = ""
    when: tuple[tuple[str, object], ...] = ()
    key_bias: bool = True
    sinks: tuple[str, ...] = ("sinks", "add_zero_attn")
    output_bias: str = ""

    @property
    def places(self) -> tuple[Place, ...]:
        """Return all pieces of all factors."""
        return self.query + self.key + self.value + self.output + self.rotating[0] + self.rotating[1]

    def __post_init__(self) -> None:
        if not isinstance(self.classes, tuple):
            raise TypeError(f"the classes of a layout are a tuple of names. Found {self.classes!r}.")

    def names_class(self, cls: type) -> bool:
        """Return whether the row is for this very class."""
        return cls.__name__ in self.classes and cls.__module__.startswith(self.package)

    def fits(self, module: nn.Module) -> bool:
        """Return whether every piece that is not optional exists, in a module that is as the row has it."""
        return not self.missing(module) and all(attribute(module, path, None) == value for path, value in self.when)

    def missing(self, module: nn.Module) -> list[str]:
        """Return paths of pieces that are not optional and that the module lacks."""
        own = {path for path, _ in module.named_parameters(remove_duplicate=False)}
        return [place.path for place in self.places if not place.optional and place.path not in own]

    def keeps_sinks(self, module: nn.Module) -> bool:
        """Return whether attention may go where there is no key or no value."""
        return any(truth(attribute(module, path, None)) for path in self.sinks)

    def read_sizes(self, module: nn.Module) -> dict[str, int]:
        """Return axis lengths: heads (of keys), g (query heads to a key head), and the further ones."""
        sizes = {axis: path if isinstance(path, int) else _count(module, path) for axis, path in self.sizes}
        if self.width:
            sizes["h"] = width = _count(module, self.width)
            queries, keys = (module.get_parameter(place[0].path).shape[0] for place in (self.query, self.key))
            heads, key_heads = queries // width, keys // width
        else:
            heads = _count(module, self.heads)
            key_heads = _count(module, self.key_heads) if self.key_heads else heads
        if key_heads < 1 or heads % key_heads:
            raise Unrecognised(f"its {heads} query heads are no multiple of its {key_heads} key heads")
        return {**sizes, "heads": key_heads, "g": heads // key_heads}


_MISSING = object()


def attribute(module: Any, paths: str, default: Any = _MISSING) -> Any:
    """Return the first of the paths ("a.b|c") that exists, through attributes and dictionary keys."""
    for path in paths.split("|"):
        value = module
        for name in path.split("."):
            value = value.get(name, _MISSING) if isinstance(value, dict) else getattr(value, name, _MISSING)
            if value is _MISSING:
                break
        else:
            return value
    if default is _MISSING:
        raise Unrecognised(f"it has no attribute {paths!r} that counts its heads or their width")
    return default


def truth(value: Any) -> bool:
    """Return whether an attribute is there: tensors and modules are, but not nn.Identity, None, False and 0."""
    return not isinstance(value, nn.Identity) and (isinstance(value, (Tensor, nn.Module)) or bool(value))


def _count(module: nn.Module, paths: str) -> int:
    count = attribute(module, paths)
    if not isinstance(count, int) or count < 1:
        raise Unrecognised(f"{paths!r} is {count!r}, expected a positive number")
    return count


def _length(piece: int | str, sizes: Mapping[str, int]) -> int:
    return piece if isinstance(piece, int) else prod(sizes[name] for name in piece.split("*"))
