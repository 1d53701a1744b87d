"""The layouts of Hugging Face attention modules whose heads share something: a latent key, or tables of positions.

Multi-head latent attention (DeepSeek): the scores are a product of coordinates without positions, whose keys and values
one projection makes from a normalised latent, plus a product of coordinates that rotate, whose one key all heads share.
Segment Anything: queries meet their keys and, in every head, the same two tables of relative positions, so all heads
share one group element and the tables are rows of the keys.
"""

from __future__ import annotations

from quotient_manifolds.symmetries.fused import fused, output
from quotient_manifolds.symmetries.layout import Layout, Place, Rotary

_WIDTHS = (
    ("nope", "qk_nope_head_dim"),
    ("rope", "qk_rope_head_dim"),
    ("rank", "kv_lora_rank"),
    ("wide", "v_head_dim"),
)
_HEADS = "(heads c) rows"


def _latent(classes: tuple[str, ...], query: str, style: str) -> Layout:
    def piece(path: str, pieces: tuple[str, str], index: int, pattern: str = "heads h rows -> heads rows h") -> Place:
        return Place(f"{path}.weight", pattern, False, _HEADS, "c", pieces, index)

    shared = Place("kv_a_proj_with_mqa.weight", "h rows -> 1 rows h", False, "c rows", "c", ("rank", "rope"), 1)
    return Layout(
        classes=classes,
        heads="num_heads|config.num_attention_heads",
        sizes=_WIDTHS,
        query=(piece(query, ("nope", "rope"), 0),),
        key=(piece("kv_b_proj", ("nope", "wide"), 0),),
        value=(piece("kv_b_proj", ("nope", "wide"), 1),),
        output=(Place("o_proj.weight", "rows (heads h) -> heads rows h"),),
        rotating=((piece(query, ("nope", "rope"), 1, "heads h rows -> 1 (heads rows) h"),), (shared,)),
        rotary=Rotary(style),
        beside=("o_proj.bias", "q_a_proj.", "q_a_layernorm.", "kv_a_layernorm."),
    )


def _shared_table(classes: tuple[str, ...]) -> tuple[Layout, Layout]:
    """With tables of relative positions, and without."""
    tables = tuple(Place(path, "rows h -> 1 rows h") for path in ("rel_pos_h", "rel_pos_w"))

    def all_heads(index: int) -> tuple[Place, ...]:
        weight = ("block (heads h) rows -> 1 (block heads rows) h", False, "(block out) rows")
        bias = ("block (heads h) -> 1 (block heads) h", True, "(block out)")
        return tuple(
            Place(f"qkv.{name}", *places, "block", (1, 1, 1), index)
            for name, places in (("weight", weight), ("bias", bias))
        )

    heads, value, out = "num_attention_heads", fused("qkv", 2), output("proj")
    return (
        Layout(
            classes=classes,
            heads=heads,
            query=all_heads(0),
            key=all_heads(1) + tables,
            value=value,
            output=out,
            beside=("proj.bias",),
        ),
        Layout(
            classes=classes,
            heads=heads,
            query=fused("qkv", 0),
            key=fused("qkv", 1),
            value=value,
            output=out,
            beside=("proj.bias",),
        ),
    )


LATENT_LAYOUTS: tuple[Layout, ...] = (
    *(
        _latent(classes, query, style)
        for query in ("q_proj", "q_b_proj")
        for classes, style in (
            (("DeepseekV2Attention",), "interleaved"),
            (("DeepseekV3Attention", "Glm4MoeLiteAttention", "YoutuAttention"), "config.rope_interleave"),
        )
    ),
    *_shared_table(
        (
            *("SamVisionAttention", "SamVisionSdpaAttention", "SamHQVisionAttention", "SamHQVisionSdpaAttention"),
            "GotOcr2VisionAttention",
        )
    ),
)
