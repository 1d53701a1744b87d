"""Make layouts of paths: to three Linears, or to one that holds queries, keys and values in any usual order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from quotient_manifolds.symmetries.layout import Layout, Place, Rotary

# How the rows of a factor are stored. Linear keeps (out, in), so each head's outputs are columns of its factor; g
# queries share a key. Conv1D keeps (in, out), as do the output projections, whose inputs are the heads.
LINEAR = "(heads g h) rows -> heads (g rows) h"
TRANSPOSED = "rows (heads g h) -> heads (g rows) h"
BIAS = "(heads g h) -> heads g h"

Order = Literal["blocks", "heads", "units"]
"""How one tensor holds queries, keys and values. blocks: all queries, all keys, all values, as wide as each other.
heads: query, key and value of one key head after another. units: as blocks, with fewer key heads than query heads."""

# For each order: its axes, the one along which the three lie, their lengths, and for each of the three what is left of
# the axes once it is taken out, and which of them count as rows.
_ORDERS: dict[Order, tuple[str, str, tuple[int | str, ...], tuple[str, str, str], tuple[str, str, str]]] = {
    "blocks": ("(block out)", "block", (1, 1, 1), ("block (heads g h)",) * 3, ("block g",) * 3),
    "heads": ("(heads unit c)", "unit", ("g", 1, 1), ("heads unit h",) * 3, ("unit",) * 3),
    "units": ("(unit c)", "unit", ("heads*g", "heads", "heads"), ("(heads g) h", "heads h", "heads h"), ("g", "", "")),
}

Projection = str | Place | Sequence[Place]
"""The path of a Linear below the attention module, with its bias if it has one; or the places of tensors."""


def queries(path: str) -> tuple[Place, ...]:
    """Return the places of a Linear's weight, and of its bias, if it has one, as a further row."""
    return (Place(f"{path}.weight", LINEAR), Place(f"{path}.bias", BIAS, optional=True))


def keys(path: str) -> tuple[Place, ...]:
    """Return the places of a Linear that makes one key (or value) for each group of queries."""
    weight = Place(f"{path}.weight", "(heads h) rows -> heads rows h")
    return (weight, Place(f"{path}.bias", "(heads h) -> heads 1 h", optional=True))


def optional(places: tuple[Place, ...]) -> tuple[Place, ...]:
    """Return the places as ones that a module may lack."""
    return tuple(replace(place, optional=True) for place in places)


def output_of(path: str, *, conv: bool = False) -> tuple[Place, ...]:
    """Return the place of the output projection's weight; its bias belongs to no head."""
    return (Place(f"{path}.weight", LINEAR if conv else TRANSPOSED),)


def fused(
    path: str, index: int, order: Order = "blocks", *, count: int = 3, conv: bool = False, dot: str = "."
) -> tuple[Place, ...]:
    """Return the places of projection number `index` of the `count` that one weight, and its bias, hold.

    conv: the weight is stored (in, out), as Conv1D does. dot: what is between path and "weight" in the tensor's name.
    """
    axes, axis, lengths, opened, opened_rows = _ORDERS[order]
    left, rows = opened[index], opened_rows[index]
    weight, all_axes = (f"rows {each}" if conv else f"{each} rows" for each in (left, axes))
    span = (axis, lengths[:count], index)
    return (
        Place(f"{path}{dot}weight", f"{weight} -> heads ({rows} rows) h", False, all_axes, *span),
        Place(f"{path}{dot}bias", f"{left} -> heads ({rows}) h" if rows else f"{left} -> heads 1 h", True, axes, *span),
    )


def layout_of(
    classes: Sequence[str],
    projections: str,
    *,
    order: Order = "blocks",
    conv: bool = False,
    beside: tuple[str, ...] = (),
    **settings: Any,
) -> Layout:
    """Return the layout of classes with projections at these paths: three layers, or one for all, and the output's.

    settings: those of `Layout`; query, key and value in place of what the paths say.
    """
    *into, out = projections.split()
    places = {"output": output_of(out, conv=conv), **_queries_keys_values(into, order, conv=conv)}
    return Layout(tuple(classes), **{**places, "beside": (f"{out}.bias", *beside), **settings})


def _queries_keys_values(paths: Sequence[str], order: Order, *, conv: bool = False) -> dict[str, Any]:
    if len(paths) == 3:
        return {"query": queries(paths[0]), "key": keys(paths[1]), "value": keys(paths[2])}
    return {kind: fused(paths[0], i, order, conv=conv) for i, kind in enumerate(("query", "key", "value"))}


def attention_layout(
    attention: type[nn.Module],
    *,
    output: Projection,
    qkv: str = "",
    order: Order = "blocks",
    query: Projection = (),
    key: Projection = (),
    value: Projection = (),
    heads: str = "",
    key_heads: str = "",
    width: str = "",
    output_bias: str = "",
    rotary: Rotary | None = None,
    beside: tuple[str, ...] = (),
    ignores: tuple[str, ...] = (),
) -> Layout:
    """Return the layout of a class of softmax attention: what find_symmetries needs to read its pairs.

    attention: the class. qkv: the Linear that makes queries, keys and values, which lie in it in this order: "blocks"
    (all queries, all keys, all values) or "heads" (query, key and value of one key head after another). Else query, key
    and value. output: the projection of the heads' outputs. heads, key_heads: attributes that count the heads of
    queries and of keys, if those are fewer; or width, the attribute that is the width of a head. Attributes may
    be paths ("config.n_head").

    Each projection is the path of a Linear, or a `Place` (several for several pieces, such as weight and bias): the
    path of a tensor and an einops pattern from it to "heads rows h", where the model sees the tensor through products
    over h alone. In patterns "heads" counts key heads and "g" the query heads that share one, whose rows are stacked:
    "(heads g h) rows -> heads (g rows) h".

    output_bias: the path of the output's bias where it is not that of a Linear. rotary: the rotary embeddings between
    projection and product. beside: further parameters that take no part, by prefixes of their paths; ignores: further
    submodules that change nothing between projection and product. Parameters and submodules that are not named are
    reason to leave a module unrecognised, since they may come between.

    What is declared is believed as far as shapes allow: prove_symmetries says whether it is true. ValueError for a
    layout that lacks a projection or the number of heads.
    """
    if not isinstance(attention, type):
        raise TypeError(f"the attention of a layout is a class of modules. Found {attention!r}.")
    if bool(qkv) == bool(query and key and value):
        raise ValueError("a layout needs qkv, or else query, key and value.")
    if bool(heads) == bool(width):
        raise ValueError("a layout needs heads, the attribute that counts them, or else width, that of one.")
    if order not in ("blocks", "heads"):
        raise ValueError(f"order is 'blocks' or 'heads'. Found {order!r}.")
    places: dict[str, Any] = (
        _queries_keys_values([qkv], "units" if order == "blocks" and key_heads else order)
        if qkv
        else {"query": _places(query, queries), "key": _places(key, keys), "value": _places(value, keys)}
    )
    bias = output_bias or (f"{output}.bias" if isinstance(output, str) else "")
    return Layout(
        classes=(attention.__name__,),
        package=attention.__module__,
        **places,
        output=_places(output, output_of),
        heads=heads,
        key_heads=key_heads,
        width=width,
        output_bias=bias,
        rotary=rotary,
        beside=(*beside, *([bias] if bias else [])),
        ignores=ignores,
    )


def _places(projection: Projection, of_linear: Callable[[str], tuple[Place, ...]]) -> tuple[Place, ...]:
    if isinstance(projection, str):
        return of_linear(projection)
    return (projection,) if isinstance(projection, Place) else tuple(projection)
