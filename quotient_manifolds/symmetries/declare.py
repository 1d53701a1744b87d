"""Layouts of one's own attention, in the words of its forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from quotient_manifolds.symmetries.fused import Order, fused, keys, linear
from quotient_manifolds.symmetries.fused import output as output_of
from quotient_manifolds.symmetries.layout import Layout, Place, Rotary

Projection = str | Place | Sequence[Place]
"""The path of a Linear below the attention module, with its bias if it has one; or the places of tensors."""


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
    unequal: Order = "units" if order == "blocks" and key_heads else order
    parts = (
        [fused(qkv, index, unequal) for index in range(3)]
        if qkv
        else [
            linear(query) if isinstance(query, str) else _places(query),
            *(keys(side) if isinstance(side, str) else _places(side) for side in (key, value)),
        ]
    )
    bias = output_bias or (f"{output}.bias" if isinstance(output, str) else "")
    return Layout(
        classes=(attention.__name__,),
        package=attention.__module__,
        query=parts[0],
        key=parts[1],
        value=parts[2],
        output=output_of(output) if isinstance(output, str) else _places(output),
        heads=heads,
        key_heads=key_heads,
        width=width,
        output_bias=bias,
        rotary=rotary,
        beside=(*beside, *([bias] if bias else [])),
        ignores=ignores,
    )


def _places(projection: Place | Sequence[Place]) -> tuple[Place, ...]:
    return (projection,) if isinstance(projection, Place) else tuple(projection)
