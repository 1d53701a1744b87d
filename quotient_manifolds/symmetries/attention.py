"""From a layout (data) and an attention module to its two symmetric pairs; the layouts of torch.nn.MultiheadAttention.

Per head, the scores (W_Q x + b_Q)' (W_K y + b_K) see query and key through G H^T only, G = [W_Q'; b_Q'],
H = [W_K'; b_K'], and the output sum_j W_O[:, j] (W_V y + b_V)_j sees value and output so, G = [W_V'; b_V'], H = W_O.
A token that add_bias_kv appends to the keys or values stands beside their rows: one more row of the same factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from torch import nn

from quotient_manifolds.symmetries.pair import Factor, Part, Span, SymmetricPair, check_weights


class Unrecognised(Exception):
    """An attention module whose pairs are not known; the message is the reason."""


@dataclass(frozen=True)
class Place:
    """A piece of a factor in a layout: a parameter's path below the attention module, and how rows are stored there.

    `axes` opens a fused tensor into `blocks` equal blocks, of which this piece is number `index`. An optional piece
    (a bias) may be missing.
    """

    path: str
    pattern: str
    optional: bool = False
    axes: str = ""
    blocks: int = 1
    index: int = 0

    def span(self) -> Span | None:
        return Span(self.axes, "block", self.blocks, self.index, self.index + 1) if self.axes else None


@dataclass(frozen=True)
class Layout:
    """Where an attention class keeps its projections: one row of the table of known layouts.

    classes: class names, all under `package` (any, if empty). heads: path of the attribute that counts the heads.
    query, key, value, output: the pieces of the four factors. beside: parameters allowed next to them, as path
    prefixes; any other parameter means that the module computes something else. linears: classes that own the pieces.
    """

    classes: tuple[str, ...]
    heads: str
    query: tuple[Place, ...]
    key: tuple[Place, ...]
    value: tuple[Place, ...]
    output: tuple[Place, ...]
    beside: tuple[str, ...] = ()
    linears: tuple[str, ...] = ("Linear", "NonDynamicallyQuantizableLinear")
    package: str = ""

    @property
    def places(self) -> tuple[Place, ...]:
        return self.query + self.key + self.value + self.output

    def names_class(self, module: nn.Module) -> bool:
        return type(module).__name__ in self.classes and type(module).__module__.startswith(self.package)

    def fits(self, module: nn.Module) -> bool:
        """Whether every piece that is not optional exists."""
        own = {path for path, _ in module.named_parameters(remove_duplicate=False)}
        return all(place.path in own for place in self.places if not place.optional)


def pairs_of(layout: Layout, module: nn.Module, name: str, names: Mapping[int, str]) -> tuple[SymmetricPair, ...]:
    """The query/key and the value/output pair of `module`; raises Unrecognised with the reason.

    name: the module's name in its model. names: from a parameter's id to its (first) name in the model.
    """
    _check_structure(layout, module, names)
    heads = _count_heads(layout, module)
    query, key, value, output = (
        _factor(places, module, heads, names) for places in (layout.query, layout.key, layout.value, layout.output)
    )
    prefix = f"{name} " if name else ""
    pairs = (
        SymmetricPair(f"{prefix}query/key", "query/key", query, key),
        SymmetricPair(f"{prefix}value/output", "value/output", value, output),
    )
    for pair in pairs:
        _check_widths(pair)
    return pairs


def _factor(places: tuple[Place, ...], module: nn.Module, heads: int, names: Mapping[int, str]) -> Factor:
    own = dict(module.named_parameters(remove_duplicate=False))
    parts = []
    for place in places:
        if place.path in own:
            stored = own[place.path]
            try:
                parts.append(Part.of(names[id(stored)], stored, place.pattern, {"heads": heads}, place.span()))
            except ValueError as misfit:
                raise Unrecognised(str(misfit).rstrip(".")) from None
    return Factor(tuple(parts))


def _check_structure(layout: Layout, module: nn.Module, names: Mapping[int, str]) -> None:
    own = dict(module.named_parameters(remove_duplicate=False))
    check_weights({names[id(value)]: value for value in own.values()}, [names[id(value)] for value in own.values()])
    known = {place.path for place in layout.places}
    strangers = [path for path in own if path not in known and not path.startswith(layout.beside or ("\0",))]
    if strangers:
        raise Unrecognised(f"it has a parameter {strangers[0]!r} that the known layout does not explain")
    for place in layout.places:
        owner = place.path.rpartition(".")[0]
        found = type(module.get_submodule(owner)).__name__
        if owner and place.path in own and found not in layout.linears:
            raise Unrecognised(f"{owner!r} is a {found}, expected {layout.linears[0]}")


def _count_heads(layout: Layout, module: nn.Module) -> int:
    try:
        heads = attrgetter(layout.heads)(module)
    except AttributeError:
        raise Unrecognised(f"it has no attribute {layout.heads!r} that counts its heads") from None
    if not isinstance(heads, int) or heads < 1:
        raise Unrecognised(f"{layout.heads!r} is {heads!r}, expected a positive number of heads")
    return heads


def _check_widths(pair: SymmetricPair) -> None:
    widths = {part.shape[2] for part in pair.parts}
    if len(widths) > 1:
        first, second = pair.kind.split("/")
        wide, narrow = pair.G.parts[0].shape[2], pair.H.parts[0].shape[2]
        raise Unrecognised(f"{first} heads are {wide} wide, {second} heads {narrow}: grouped heads are not supported")


# How the rows of a factor are stored. Linear keeps (out, in), so each head's outputs are columns of its factor.
LINEAR = "(heads h) rows -> heads rows h"
TRANSPOSED = "rows (heads h) -> heads rows h"  # Conv1D's (in, out); also the output projection, whose inputs are heads
BIAS = "(heads h) -> heads 1 h"

_PACKED_WEIGHT = ("block (heads h) rows -> heads (block rows) h", "(block out) rows")
_PACKED_BIAS = ("block (heads h) -> heads block h", "(block out)")
_TOKEN = "1 1 (heads h) -> heads 1 h"  # an appended key or value token


def _torch_packed(index: int, *extra: Place) -> tuple[Place, ...]:
    weight = Place("in_proj_weight", _PACKED_WEIGHT[0], axes=_PACKED_WEIGHT[1], blocks=3, index=index)
    return (weight, _torch_bias(index), *extra)


def _torch_bias(index: int) -> Place:
    return Place("in_proj_bias", _PACKED_BIAS[0], optional=True, axes=_PACKED_BIAS[1], blocks=3, index=index)


_KEY_TOKEN = Place("bias_k", _TOKEN, optional=True)
_VALUE_TOKEN = Place("bias_v", _TOKEN, optional=True)

TORCH_LAYOUTS: tuple[Layout, ...] = (
    Layout(
        classes=("MultiheadAttention",),
        package="torch.nn.modules.activation",
        heads="num_heads",
        query=_torch_packed(0),
        key=_torch_packed(1, _KEY_TOKEN),
        value=_torch_packed(2, _VALUE_TOKEN),
        output=(Place("out_proj.weight", TRANSPOSED),),
        beside=("out_proj.bias",),
    ),
    Layout(  # kdim or vdim given: three separate weights, one packed bias
        classes=("MultiheadAttention",),
        package="torch.nn.modules.activation",
        heads="num_heads",
        query=(Place("q_proj_weight", LINEAR), _torch_bias(0)),
        key=(Place("k_proj_weight", LINEAR), _torch_bias(1), _KEY_TOKEN),
        value=(Place("v_proj_weight", LINEAR), _torch_bias(2), _VALUE_TOKEN),
        output=(Place("out_proj.weight", TRANSPOSED),),
        beside=("out_proj.bias",),
    ),
)
