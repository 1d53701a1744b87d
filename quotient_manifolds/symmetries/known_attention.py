"""List known attention: a row for each layout of classes of torch, transformers 4 and 5, and timm, by name.

No library is imported: rows name classes whose forward pass was read, and attributes. What stands between projection
and product is in the row and not found in the attributes, which look the same with rotary embeddings or norms and
without; only query and key norms are found by name (attention.py). Softmax attention is meant: scores that see queries
and keys through their product alone, whatever is added to the scores.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quotient_manifolds.symmetries.layout import Layout, Obstacle, Place, Rotary
from quotient_manifolds.symmetries.projections import (
    BIAS,
    LINEAR,
    TRANSPOSED,
    Order,
    fused,
    keys,
    layout_of,
    optional,
    output_of,
    queries,
)

_BERT = "self.query self.key self.value output.dense"
_BERT_BESIDE = ("output.LayerNorm.", "ln.", "LayerNorm.", "self.dropout", "self.distance_embedding.")
_QKV = "q_proj k_proj v_proj"

# What takes a symmetry away.
_GATED = "the heads' outputs are multiplied elementwise by a gate before the output projection"
_NORM = Obstacle("value/output", "norm", "the heads' outputs are normalised (norm) before the output projection")

# Which coordinates rotate; the share is an attribute.
_SHARE = "config.rope_parameters.partial_rotary_factor"
_HALF, _INTERLEAVED = Rotary(dims=_SHARE), Rotary("interleaved", dims=_SHARE)


def _classes(families: str) -> tuple[str, ...]:
    """Return the class names of families in every version: transformers 4 had a class per attention kernel."""
    kernels = ("Attention", "SdpaAttention", "FlashAttention2")
    return tuple(f"{family}{kernel}" for family in families.split() for kernel in kernels)


def _named(families: str, suffix: str = "Attention") -> tuple[str, ...]:
    return tuple(f"{family}{suffix}" for family in families.split())


def _clipped(path: str) -> tuple[Obstacle, ...]:
    reason = "projections are clipped before the product"
    return (Obstacle("query/key", path, reason), Obstacle("value/output", path, reason))


# ---- torch.nn.MultiheadAttention: one packed weight, or three where kdim or vdim is given, and one packed bias


def _torch(query: Place, key: Place, value: Place) -> Layout:
    biases = [fused("in_proj", index, dot="_")[1] for index in range(3)]
    tokens = [Place(name, "1 1 (heads h) -> heads 1 h", optional=True) for name in ("bias_k", "bias_v")]
    return Layout(
        ("MultiheadAttention",),
        (query, biases[0]),
        (key, biases[1], tokens[0]),  # a key and a value that add_bias_kv appends
        (value, biases[2], tokens[1]),
        output_of("out_proj"),
        heads="num_heads",
        beside=("out_proj.bias",),
        package="torch.nn.modules.activation",
    )


TORCH_LAYOUTS = (
    _torch(*(fused("in_proj", index, dot="_")[0] for index in range(3))),
    _torch(*(Place(f"{name}_proj_weight", LINEAR) for name in "qkv")),
)

# ---- three Linears, as many keys as queries

PLAIN_LAYOUTS = (
    layout_of(
        _classes(
            "Bert Roberta XLMRoberta Camembert Electra Ernie MegatronBert BertGeneration BridgeTower "
            "Data2VecText RobertaPreLayerNorm RoCBert AlignText AltRoberta ChineseCLIPText ClapText "
            "LayoutLM MarkupLM Splinter VisualBert RemBert Tapas Canine BlipText Git LayoutLMv3 Flava "
            "MobileBert BigBird"
        ),
        _BERT,
        heads="self.num_attention_heads",
        beside=_BERT_BESIDE,
    ),
    layout_of(  # window attention: a learned bias is added to the scores
        _classes("ClapAudio DonutSwin MaskFormerSwin Swin"),
        _BERT,
        heads="self.num_attention_heads",
        beside=("self.relative_position_bias",),
    ),
    layout_of(_classes("Albert"), "query key value dense", heads="num_attention_heads", beside=("LayerNorm.",)),
    layout_of(
        ("DistilBertSelfAttention", "MultiHeadSelfAttention", "DistilBertSdpaAttention", "DistilBertFlashAttention2"),
        "q_lin k_lin v_lin out_lin",
        heads="n_heads",
    ),
    layout_of(
        ("MPNetAttention",), "attn.q attn.k attn.v attn.o", heads="attn.num_attention_heads", beside=("LayerNorm.",)
    ),
    layout_of(  # ViT of transformers 5
        _classes(
            "ViT DeiT ViTMSN AST Swin Beit Dinov2 Dinov2WithRegisters IJepa LwDetrViT Pixio "
            "MoonshineStreamingEncoder RfDetrDinov2 Tipsv2Vision ViTMAE Vivit MllamaVision Radio"
        ),
        f"{_QKV} o_proj",
        heads="num_attention_heads|num_heads|config.num_attention_heads",
        beside=("relative_position_bias.",),
    ),
    layout_of(  # ViT of transformers 4, and those that keep its layout
        _classes("ViT DeiT ViTMSN DPTViT VitPoseBackbone Yolos Flava"),
        "attention.query attention.key attention.value output.dense",
        heads="attention.num_attention_heads",
    ),
    layout_of(  # CLIP and the decoders of the BART family, self- and cross-attention
        _classes(
            "CLIP Siglip Siglip2 Aimv2 Idefics2Vision Idefics3Vision SmolVLMVision Eomt AltCLIP "
            "ChineseCLIPVision CLIPSeg MetaClip2 XCLIP GitVision Ovis2Vision Blenderbot Bart "
            "BigBirdPegasusDecoder BioGpt BlenderbotSmall Informer M2M100 Marian MBart Pegasus PegasusX "
            "PLBart TimeSeriesTransformer OPT Whisper Speech2Text Musicgen MusicgenMelody Data2VecAudio "
            "Hubert PatchTSMixer PatchTST SEW UniSpeech NllbMoe UniSpeechSat Wav2Vec2 Qwen2Audio "
            "Voxtral GroupViT OwlViT Owlv2 LEDDecoder AudioFlamingo3 Mvp PPFormulaNet XGLM Sam SamHQ "
            "Tipsv2Text"
        ),
        f"{_QKV} out_proj",
        heads="num_heads|num_attention_heads",
    ),
    layout_of(  # DETR: positions are added to the inputs of queries and keys
        _classes(
            "DetrSelf ConditionalDetrSelf DeformableDetrSelf DFineSelf RTDetrSelf RTDetrV2Self MaskFormerDetrSelf "
            "DetrCross MaskFormerDetrCross"
        ),
        f"{_QKV} o_proj",
        width="head_dim",
    ),
    layout_of(("GPTNeoSelfAttention",), f"{_QKV} out_proj", heads="num_heads"),
    layout_of(("InternVLVisionAttention", "JanusVisionAttention"), f"{_QKV} projection_layer", heads="num_heads"),
    layout_of(("LxmertSelfAttentionLayer",), _BERT, heads="self.num_attention_heads", beside=_BERT_BESIDE),
    layout_of(
        ("LxmertCrossAttentionLayer",),
        "att.query att.key att.value output.dense",
        heads="att.num_attention_heads",
        beside=_BERT_BESIDE,
    ),
    *(
        layout_of((name,), projections, heads=heads, package=f"transformers.models.{family}.")
        for family, name, projections, heads in (
            ("fsmt", "Attention", f"{_QKV} out_proj", "num_heads"),
            ("ctrl", "MultiHeadAttention", "Wq Wk Wv dense", "num_heads"),
            ("xlm", "MultiHeadAttention", "q_lin k_lin v_lin out_lin", "n_heads"),
            ("flaubert", "MultiHeadAttention", "q_lin k_lin v_lin out_lin", "n_heads"),
        )
    ),
    layout_of(  # T5: a learned bias is added to the scores
        _classes("T5 MT5 LongT5 SwitchTransformers Pop2Piano Udop UMT5"),
        "q k v o",
        heads="n_heads",
        beside=("relative_attention_bias.",),
    ),
    layout_of(  # DeBERTa-v2: projected positions meet the other side's content, so they are further rows of this side
        ("DebertaV2Attention",),
        "self.query_proj self.key_proj self.value_proj output.dense",
        query=queries("self.query_proj") + optional(queries("self.pos_query_proj")),
        key=keys("self.key_proj") + optional(keys("self.pos_key_proj")),
        heads="self.num_attention_heads",
        beside=("output.LayerNorm.",),
        key_bias=False,  # position-to-content scores see it times a position
    ),
    layout_of(  # RoFormer, which may rotate the values too
        ("RoFormerAttention",),
        _BERT,
        heads="self.num_attention_heads",
        beside=("output.LayerNorm.",),
        rotary=Rotary("interleaved"),
        obstacles=(Obstacle("value/output", "self.rotary_value", "values are rotated by their positions"),),
    ),
    layout_of(  # ESM: rotary or learned positions, by configuration
        ("EsmAttention",),
        _BERT,
        heads="self.num_attention_heads",
        beside=("LayerNorm.",),
        rotary=Rotary(unless=(("self.position_embedding_type", "absolute"),)),
    ),
)

# ---- decoders: three Linears, keys for groups of queries, heads by the width of one, most with rotary embeddings

# Llama and its descendants: coordinates i and i + r/2 rotate into each other. (The Exaones do not rotate in every
# layer, and normalise in all.)
_LLAMA = (
    "Llama Arcee AriaText Bamba Csm DeepseekOcr2Text Emu3 EuroBert Evolla Gemma Gemma2 VaultGemma Granite "
    "GraniteMoe GraniteMoeShared HiggsAudioV2 HyperCLOVAX Jais2 Phimoe Qwen2Moe SolarOpen Cwm SeedOss "
    "Ministral Ministral3 MiniMax Mistral Mixtral VoxtralRealtime VoxtralRealtimeText Qwen2 Starcoder2 Gte "
    "JinaEmbeddingsV3 LasrEncoder NomicBert PaddleOCR Qwen2_5Omni Qwen2_5_VL Qwen2VL Mimi Qwen3 Qwen3Moe "
    "Dots1 Gemma3 Olmo2 Olmo3 Olmoe FlexOlmo Qwen3VLText Qwen3VLMoeText HunYuanDenseV1 HunYuanMoEV1 "
    "HunYuanVLDenseV1 Apertus FalconH1 Glm4Moe Nemotron Mellum Chameleon NanoChat MiniMaxM2 HYV3 T5GemmaSelf "
    "GraniteDoclingText Granite4VisionText UnlimitedOcrText Ultrabert Glm4vMoeText GlmImageText "
    "MllamaTextSelf Pixtral BitNet Exaone4 Exaone4_5_ ExaoneMoe Kolibri1"
)
_DECODERS: tuple[tuple[str, Rotary | None, str, dict[str, Any]], ...] = (
    (_LLAMA, _HALF, "o_proj", {}),
    ("StableLm Phi", Rotary(dims="rotary_ndims"), "o_proj", {}),
    ("DINOv3ViT EomtDinov3", Rotary(), "o_proj", {}),
    ("MLCD", Rotary(), "out_proj", {}),
    ("MllamaTextCross T5GemmaCross", None, "o_proj", {}),
    ("Phi", Rotary(dims="rotary_ndims"), "dense", {}),
    ("DiffLlama", _HALF, "o_proj", {"beside": ("lambda_",)}),
    ("GptOss GraniteSWA GraniteMoeSWA", _HALF, "o_proj", {"beside": ("sinks",)}),
    ("Afmoe HrmText", _HALF, "o_proj", {"obstacles": (Obstacle("value/output", "gate_proj", _GATED),)}),
    ("Qwen3Next Qwen3_5 Qwen3_5Moe", _HALF, "o_proj", {"obstacles": (Obstacle("value/output", "q_proj", _GATED),)}),
    ("ModernBertDecoder", _HALF, "Wo", {}),
    ("Olmo", _HALF, "o_proj", {"obstacles": _clipped("config.clip_qkv")}),
    ("Lfm2", _HALF, "out_proj", {}),
    ("SmolLM3", replace(_HALF, unless=(("use_rope", 0),)), "o_proj", {}),
    ("Llama4Text", replace(_INTERLEAVED, unless=(("use_rope", 0),)), "o_proj", {}),
    (
        "Cohere Helium Glm Glm4 Ernie4_5 Ernie4_5_Moe Glm4vText GlmOcrText Moonshine MoonshineStreaming",
        _INTERLEAVED,
        "o_proj",
        {},
    ),
    ("Cohere2", replace(_INTERLEAVED, unless=(("sliding_window", None),)), "o_proj", {}),
    ("GPTJ", Rotary("interleaved", dims="rotary_dim"), "out_proj", {}),
    ("Jamba", None, "o_proj", {}),  # order comes from the recurrent layers: nothing rotates
)

DECODER_LAYOUTS = tuple(
    layout_of(
        _named(families),
        f"{_QKV} {out}",
        width="head_dim",
        rotary=rotary,
        ignores=("rotary_emb", "rotary_fn"),
        linears=("Linear",),
        **settings,
    )
    for families, rotary, out, settings in _DECODERS
)

# ---- queries, keys and values in one tensor

_HEADS = "num_heads|num_attention_heads|n_heads|config.num_attention_heads"
_GPT2 = ("GPT2Attention", "GPT2SdpaAttention", "GPT2FlashAttention2", "DecisionTransformerGPT2Attention")
_BIG_CODE_ORDERS: tuple[tuple[Order, bool], ...] = (("units", True), ("heads", False))
_QWEN_LIKE = _named("Qwen2_5_VL Glm4v Glm4vMoe Qwen3_5 Qwen3VL Qwen3VLMoe Qwen3OmniMoe", "VisionAttention")


def _in_one(classes: tuple[str, ...], projections: str, order: Order = "blocks", **settings: Any) -> Layout:
    return layout_of(classes, projections, order=order, **{"heads": _HEADS, "linears": ("Linear",), **settings})


def _sliced(index: int) -> tuple[Place, ...]:
    left, right = "slice block (local h) rows", "(slice local) (block rows) h"
    return (Place("qkv_proj.weight", f"{left} -> {right}", False, "(slice block c) rows", "block", (1, 1, 1), index),)


FUSED_LAYOUTS = (
    layout_of(  # GPT-2's cross-attention comes first: its c_attn holds two blocks, not three
        _GPT2,
        "c_attn c_proj",
        conv=True,
        query=(Place("q_attn.weight", TRANSPOSED), Place("q_attn.bias", BIAS, optional=True)),
        key=fused("c_attn", 0, count=2, conv=True),
        value=fused("c_attn", 1, count=2, conv=True),
        heads="num_heads",
        linears=("Conv1D",),
    ),
    layout_of((*_GPT2, "ImageGPTAttention"), "c_attn c_proj", conv=True, heads="num_heads", linears=("Conv1D",)),
    layout_of(  # the first GPT
        ("Attention",),
        "c_attn c_proj",
        conv=True,
        heads="n_head",
        linears=("Conv1D",),
        package="transformers.models.openai.",
    ),
    *(  # GPT-BigCode: blocks of unequal width with one key head, head by head with as many
        _in_one(("GPTBigCodeAttention",), "c_attn c_proj", order, key_heads="kv_heads", when=(("multi_query", multi),))
        for order, multi in _BIG_CODE_ORDERS
    ),
    _in_one(("BloomAttention",), "query_key_value dense", "heads"),
    _in_one(
        _named("GPTNeoX GPTNeoXJapanese Persimmon"),
        "query_key_value dense",
        "heads",
        rotary=Rotary(dims="rotary_ndims|rotary_dim"),
        beside=("dense_bias",),
        ignores=("rotary_emb",),
    ),
    *(  # Falcon: grouped, one key head, or as many keys as queries
        _in_one(
            ("FalconAttention", "FalconFlashAttention2"),
            "query_key_value dense",
            "heads",
            key_heads=key_heads,
            rotary=Rotary(unless=(("config.alibi", True),)),
            linears=("FalconLinear",),
            when=when,
        )
        for key_heads, when in (
            ("num_kv_heads", (("new_decoder_architecture", True),)),
            ("num_kv_heads", (("new_decoder_architecture", False), ("multi_query", True))),
            ("", (("new_decoder_architecture", False), ("multi_query", False))),
        )
    ),
    _in_one(("MptAttention",), "Wqkv out_proj", obstacles=_clipped("clip_qkv")),
    _in_one(("ModernBertAttention",), "Wqkv Wo", rotary=Rotary()),
    _in_one(
        ("Phi3Attention", "Phi4MultimodalAttention"),
        "qkv_proj o_proj",
        "units",
        heads="config.num_attention_heads",
        key_heads="num_key_value_heads|config.num_key_value_heads",
        rotary=_HALF,
    ),
    layout_of(  # BLIP-2's vision tower keeps the query and value biases apart from the weight
        _named("Blip2 InstructBlip InstructBlipVideo Blip"), "qkv projection", heads="num_heads"
    ),
    layout_of(  # DeBERTa: queries, keys and values of a head after another, biases apart, projected positions
        ("DebertaAttention",),
        "self.in_proj output.dense",
        query=(fused("self.in_proj", 0, "heads")[0], Place("self.q_bias", BIAS), *optional(queries("self.pos_q_proj"))),
        key=(fused("self.in_proj", 1, "heads")[0], *optional(keys("self.pos_proj"))),
        value=(fused("self.in_proj", 2, "heads")[0], Place("self.v_bias", BIAS)),
        heads="self.num_attention_heads",
        beside=("output.LayerNorm.", "self.head_logits_proj.", "self.head_weights_proj."),
        key_bias=False,
        sinks=("self.head_weights_proj",),  # mixed weights do not add up to one
    ),
    Layout(  # CodeGen: four slices of heads, each with its queries, values and keys
        ("CodeGenAttention",),
        query=_sliced(0),
        key=_sliced(2),
        value=_sliced(1),
        output=output_of("out_proj"),
        heads="num_attention_heads",
        sizes=(("slice", 4), ("h", "head_dim")),
        rotary=Rotary("interleaved", dims="rotary_dim"),
    ),
    *(  # vision towers in the manner of timm
        _in_one(classes, "qkv proj", rotary=rotary, package=package, obstacles=(_NORM,))
        for classes, rotary, package in (
            (("MgpstrAttention",), None, ""),
            (("Attention",), None, "timm.models.vision_transformer"),
            (_QWEN_LIKE, Rotary(), "transformers."),
            (("VisionAttention",), Rotary(), "transformers.models.qwen2_vl."),
        )
    ),
)

# ---- heads that share something

# Multi-head latent attention (DeepSeek): the scores are a product of coordinates without positions, whose keys and
# values one projection makes from a normalised latent, plus a product of coordinates that rotate, whose one key all
# heads share.
_WIDTHS = (("nope", "qk_nope_head_dim"), ("rope", "qk_rope_head_dim"), ("rank", "kv_lora_rank"), ("wide", "v_head_dim"))


def _latent(classes: tuple[str, ...], query: str, style: str) -> Layout:
    def piece(path: str, pieces: tuple[str, str], index: int, pattern: str = "heads h rows -> heads rows h") -> Place:
        return Place(f"{path}.weight", pattern, False, "(heads c) rows", "c", pieces, index)

    shared = Place("kv_a_proj_with_mqa.weight", "h rows -> 1 rows h", False, "c rows", "c", ("rank", "rope"), 1)
    return Layout(
        classes,
        query=(piece(query, ("nope", "rope"), 0),),
        key=(piece("kv_b_proj", ("nope", "wide"), 0),),
        value=(piece("kv_b_proj", ("nope", "wide"), 1),),
        output=(Place("o_proj.weight", "rows (heads h) -> heads rows h"),),
        heads="num_heads|config.num_attention_heads",
        sizes=_WIDTHS,
        rotating=((piece(query, ("nope", "rope"), 1, "heads h rows -> 1 (heads rows) h"),), (shared,)),
        rotary=Rotary(style),
        beside=("o_proj.bias", "q_a_proj.", "q_a_layernorm.", "kv_a_layernorm."),
    )


# Segment Anything: queries meet their keys and, in every head, the same two tables of relative positions, so all heads
# share one group element and the tables are rows of the keys. Its windows may have no such tables.
def _all_heads(index: int) -> tuple[Place, ...]:
    weight = ("block (heads h) rows -> 1 (block heads rows) h", False, "(block out) rows")
    bias = ("block (heads h) -> 1 (block heads) h", True, "(block out)")
    span = ("block", (1, 1, 1), index)
    return (Place("qkv.weight", *weight, *span), Place("qkv.bias", *bias, *span))


_SAM = _named("SamVision SamVisionSdpa SamHQVision SamHQVisionSdpa GotOcr2Vision")
_TABLES = tuple(Place(path, "rows h -> 1 rows h") for path in ("rel_pos_h", "rel_pos_w"))

SHARED_LAYOUTS = (
    *(
        _latent(classes, query, style)
        for query in ("q_proj", "q_b_proj")
        for classes, style in (
            (("DeepseekV2Attention",), "interleaved"),
            (_named("DeepseekV3 Glm4MoeLite Youtu"), "config.rope_interleave"),
        )
    ),
    layout_of(_SAM, "qkv proj", query=_all_heads(0), key=_all_heads(1) + _TABLES, heads="num_attention_heads"),
    layout_of(_SAM, "qkv proj", heads="num_attention_heads"),
)

LAYOUTS: tuple[Layout, ...] = (*TORCH_LAYOUTS, *PLAIN_LAYOUTS, *FUSED_LAYOUTS, *DECODER_LAYOUTS, *SHARED_LAYOUTS)
"""Attention modules; the first layout that fits settles a module and everything in it."""
