"""The layouts of Hugging Face attention modules with queries, keys and values in one tensor."""

from __future__ import annotations

from quotient_manifolds.symmetries.fused import Order, fused, fused_weight, linear, optional, output
from quotient_manifolds.symmetries.layout import BIAS, LINEAR, TRANSPOSED, Layout, Obstacle, Place, Rotary

CLIPPED = "projections are clipped before the product"


def _fused(
    classes: tuple[str, ...],
    qkv: str,
    out: str,
    order: Order = "blocks",
    *,
    heads: str = "num_heads|num_attention_heads|n_heads|config.num_attention_heads",
    key_heads: str = "",
    rotary: Rotary | None = None,
    obstacles: tuple[Obstacle, ...] = (),
    linears: tuple[str, ...] = ("Linear",),
    ignores: tuple[str, ...] = (),
    beside: tuple[str, ...] = (),
    package: str = "",
    when: tuple[tuple[str, object], ...] = (),
) -> Layout:
    """One Linear for queries, keys and values, one for the output."""
    return Layout(
        classes=classes,
        heads=heads,
        key_heads=key_heads,
        query=fused(qkv, 0, order),
        key=fused(qkv, 1, order),
        value=fused(qkv, 2, order),
        output=output(out),
        beside=(f"{out}.bias", *beside),
        rotary=rotary,
        obstacles=obstacles,
        linears=linears,
        ignores=ignores,
        package=package,
        when=when,
    )


def _clipped(path: str) -> tuple[Obstacle, ...]:
    return (Obstacle("query/key", path, CLIPPED), Obstacle("value/output", path, CLIPPED))


def _conv1d(path: str, index: int, parts: int = 3) -> tuple[Place, ...]:
    return fused(path, index, parts=parts, conv=True)


def _sliced(index: int) -> tuple[Place, ...]:
    left, right = "slice block (local h) rows", "(slice local) (block rows) h"
    return (Place("qkv_proj.weight", f"{left} -> {right}", False, "(slice block c) rows", "block", (1, 1, 1), index),)


_GPT2 = ("GPT2Attention", "GPT2SdpaAttention", "GPT2FlashAttention2", "DecisionTransformerGPT2Attention")
_FACTOR = "config.rope_parameters.partial_rotary_factor"

_NORMALISED = (
    Obstacle("value/output", "norm", "the heads' outputs are normalised (norm) before the output projection"),
)
_QWEN_LIKE = ("Qwen2_5_VL", "Glm4v", "Glm4vMoe", "Qwen3_5", "Qwen3VL", "Qwen3VLMoe", "Qwen3OmniMoe")
_ORDERS: tuple[tuple[Order, bool], ...] = (("units", True), ("heads", False))

FUSED_LAYOUTS: tuple[Layout, ...] = (
    Layout(  # GPT-2's cross-attention comes first: its c_attn holds two blocks, not three
        classes=_GPT2,
        heads="num_heads",
        query=(Place("q_attn.weight", TRANSPOSED), Place("q_attn.bias", BIAS, optional=True)),
        key=_conv1d("c_attn", 0, 2),
        value=_conv1d("c_attn", 1, 2),
        output=(Place("c_proj.weight", LINEAR),),
        beside=("c_proj.bias",),
        linears=("Conv1D",),
    ),
    Layout(
        classes=(*_GPT2, "ImageGPTAttention"),
        heads="num_heads",
        query=_conv1d("c_attn", 0),
        key=_conv1d("c_attn", 1),
        value=_conv1d("c_attn", 2),
        output=(Place("c_proj.weight", LINEAR),),
        beside=("c_proj.bias",),
        linears=("Conv1D",),
    ),
    Layout(  # the first GPT
        classes=("Attention",),
        package="transformers.models.openai.",
        heads="n_head",
        query=_conv1d("c_attn", 0),
        key=_conv1d("c_attn", 1),
        value=_conv1d("c_attn", 2),
        output=(Place("c_proj.weight", LINEAR),),
        beside=("c_proj.bias",),
        linears=("Conv1D",),
    ),
    *(  # GPT-BigCode: blocks of unequal width with one key head, head by head with as many
        _fused(
            ("GPTBigCodeAttention",), "c_attn", "c_proj", order, key_heads="kv_heads", when=(("multi_query", multi),)
        )
        for order, multi in _ORDERS
    ),
    _fused(("BloomAttention",), "query_key_value", "dense", "heads"),
    _fused(
        ("GPTNeoXAttention",),
        "query_key_value",
        "dense",
        "heads",
        rotary=Rotary(dims="rotary_ndims|rotary_dim"),
        ignores=("rotary_emb",),
    ),
    _fused(
        ("GPTNeoXJapaneseAttention",),
        "query_key_value",
        "dense",
        "heads",
        rotary=Rotary(dims="rotary_ndims"),
        beside=("dense_bias",),
        ignores=("rotary_emb",),
    ),
    _fused(("PersimmonAttention",), "query_key_value", "dense", "heads", rotary=Rotary(dims="rotary_ndims")),
    *(  # Falcon: grouped, one key head, or as many keys as queries
        _fused(
            ("FalconAttention", "FalconFlashAttention2"),
            "query_key_value",
            "dense",
            "heads",
            key_heads=key_heads,
            rotary=Rotary(unless=(("config.alibi", True),)),
            linears=("FalconLinear",),
            when=(("new_decoder_architecture", new), *((("multi_query", multi),) if not new else ())),
        )
        for new, multi, key_heads in ((True, True, "num_kv_heads"), (False, True, "num_kv_heads"), (False, False, ""))
    ),
    _fused(("MptAttention",), "Wqkv", "out_proj", obstacles=_clipped("clip_qkv")),
    _fused(("ModernBertAttention",), "Wqkv", "Wo", rotary=Rotary()),
    _fused(
        ("Phi3Attention", "Phi4MultimodalAttention"),
        "qkv_proj",
        "o_proj",
        "units",
        heads="config.num_attention_heads",
        key_heads="num_key_value_heads|config.num_key_value_heads",
        rotary=Rotary(dims=_FACTOR),
    ),
    Layout(  # BLIP-2's vision tower keeps the query and value biases apart from the weight
        classes=("Blip2Attention", "InstructBlipAttention", "InstructBlipVideoAttention", "BlipAttention"),
        heads="num_heads",
        query=fused("qkv", 0),
        key=fused("qkv", 1),
        value=fused("qkv", 2),
        output=output("projection"),
        beside=("projection.bias",),
    ),
    Layout(  # DeBERTa: queries, keys and values of a head after another, biases apart, projected positions
        classes=("DebertaAttention",),
        heads="self.num_attention_heads",
        query=(
            *fused_weight("self.in_proj.weight", 0, "heads"),
            Place("self.q_bias", BIAS),
            *optional(linear("self.pos_q_proj")),
        ),
        key=(*fused_weight("self.in_proj.weight", 1, "heads"), *optional(linear("self.pos_proj"))),
        value=(*fused_weight("self.in_proj.weight", 2, "heads"), Place("self.v_bias", BIAS)),
        output=output("output.dense"),
        beside=("output.dense.bias", "output.LayerNorm.", "self.head_logits_proj.", "self.head_weights_proj."),
        key_bias=False,
        sinks=("self.head_weights_proj",),  # mixed weights do not add up to one
    ),
    Layout(  # CodeGen: four slices of heads, each with its queries, values and keys
        classes=("CodeGenAttention",),
        heads="num_attention_heads",
        sizes=(("slice", 4), ("h", "head_dim")),
        query=_sliced(0),
        key=_sliced(2),
        value=_sliced(1),
        output=output("out_proj"),
        rotary=Rotary("interleaved", dims="rotary_dim"),
    ),
    *(
        _fused(  # vision towers in the manner of timm
            classes, "qkv", "proj", rotary=rotary, package=package, obstacles=_NORMALISED
        )
        for classes, rotary, package in (
            (("MgpstrAttention",), None, ""),
            (("Attention",), None, "timm.models.vision_transformer"),
            (
                tuple(f"{family}VisionAttention" for family in _QWEN_LIKE),
                Rotary(),
                "transformers.",
            ),
            (("VisionAttention",), Rotary(), "transformers.models.qwen2_vl."),
        )
    ),
)
