"""Places of projections, separate and fused: queries, keys and values in one tensor, in the orders models use.

Also the layouts of torch.nn.MultiheadAttention, and of vision attention that keeps `qkv` and `proj`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from quotient_manifolds.symmetries.layout import BIAS, LINEAR, TRANSPOSED, Layout, Place

Order = Literal["blocks", "heads", "units"]

# How a fused out axis opens, which axis the three projections share, their pieces, and what an opened projection is.
# blocks: all queries, all keys, all values, as wide as each other. heads: query, key and value of one key head after
# another. units: as blocks, but with fewer key heads than query heads.
_OPEN: dict[Order, tuple[str, str, tuple[int | str, ...]]] = {
    "blocks": ("(block out)", "block", (1, 1, 1)),
    "heads": ("(heads unit c)", "unit", ("g", 1, 1)),
    "units": ("(unit c)", "unit", ("heads*g", "heads", "heads")),
}
_OPENED: dict[Order, tuple[str, str, str]] = {
    "blocks": ("block (heads g h)",) * 3,
    "heads": ("heads unit h",) * 3,
    "units": ("(heads g) h", "heads h", "heads h"),
}
_ROWS: dict[Order, tuple[str, str, str]] = {
    "blocks": ("block g",) * 3,
    "heads": ("unit",) * 3,
    "units": ("g", "", ""),
}


def linear(path: str) -> tuple[Place, ...]:
    """A Linear's weight, and its bias if it has one as a further row."""
    return (Place(f"{path}.weight", LINEAR), Place(f"{path}.bias", BIAS, optional=True))


def keys(path: str) -> tuple[Place, ...]:
    """A Linear that makes one key (or value) for a group of queries."""
    weight = Place(f"{path}.weight", "(heads h) rows -> heads rows h")
    return (weight, Place(f"{path}.bias", "(heads h) -> heads 1 h", optional=True))


def optional(places: tuple[Place, ...]) -> tuple[Place, ...]:
    return tuple(replace(place, optional=True) for place in places)


def output(path: str) -> tuple[Place, ...]:
    """The output projection's weight; its bias belongs to no head."""
    return (Place(f"{path}.weight", TRANSPOSED),)


def conv1d(path: str) -> tuple[Place, ...]:
    return (Place(f"{path}.weight", TRANSPOSED), Place(f"{path}.bias", BIAS, optional=True))


def fused(path: str, index: int, order: Order = "blocks", *, parts: int = 3, conv: bool = False) -> tuple[Place, ...]:
    """Projection number `index` of a fused weight, and of its bias; conv: stored (in, out)."""
    return fused_weight(f"{path}.weight", index, order, parts=parts, conv=conv) + fused_bias(
        f"{path}.bias", index, order, parts=parts
    )


def fused_weight(
    path: str, index: int, order: Order = "blocks", *, parts: int = 3, conv: bool = False
) -> tuple[Place, ...]:
    axes, axis, pieces = _OPEN[order]
    opened, rows = _OPENED[order][index], f"({_ROWS[order][index]} rows)"
    left = f"rows {opened}" if conv else f"{opened} rows"
    axes = f"rows {axes}" if conv else f"{axes} rows"
    return (Place(path, f"{left} -> heads {rows} h", False, axes, axis, pieces[:parts], index),)


def fused_bias(path: str, index: int, order: Order = "blocks", *, parts: int = 3) -> tuple[Place, ...]:
    axes, axis, pieces = _OPEN[order]
    opened, rows = _OPENED[order][index], f"({_ROWS[order][index]})" if _ROWS[order][index] else "1"
    return (Place(path, f"{opened} -> heads {rows} h", True, axes, axis, pieces[:parts], index),)


_TOKEN = "1 1 (heads h) -> heads 1 h"  # a key or value token that add_bias_kv appends
_KEY_TOKEN = Place("bias_k", _TOKEN, optional=True)
_VALUE_TOKEN = Place("bias_v", _TOKEN, optional=True)


def _torch_packed(index: int) -> tuple[Place, ...]:
    return fused_weight("in_proj_weight", index) + _torch_bias(index)


def _torch_bias(index: int) -> tuple[Place, ...]:
    return fused_bias("in_proj_bias", index)


TORCH_LAYOUTS: tuple[Layout, ...] = (
    Layout(
        classes=("MultiheadAttention",),
        package="torch.nn.modules.activation",
        heads="num_heads",
        query=_torch_packed(0),
        key=(*_torch_packed(1), _KEY_TOKEN),
        value=(*_torch_packed(2), _VALUE_TOKEN),
        output=output("out_proj"),
        beside=("out_proj.bias",),
    ),
    Layout(  # kdim or vdim given: three separate weights, one packed bias
        classes=("MultiheadAttention",),
        package="torch.nn.modules.activation",
        heads="num_heads",
        query=(Place("q_proj_weight", LINEAR), *_torch_bias(0)),
        key=(Place("k_proj_weight", LINEAR), *_torch_bias(1), _KEY_TOKEN),
        value=(Place("v_proj_weight", LINEAR), *_torch_bias(2), _VALUE_TOKEN),
        output=output("out_proj"),
        beside=("out_proj.bias",),
    ),
)
