"""The layouts of Hugging Face decoders with separate projections, grouped keys and rotary embeddings.

Query and key norms, where a class has them, are found by name (attention.py) and take the query/key pair away.
"""

from __future__ import annotations

from quotient_manifolds.symmetries.fused import keys, linear, output
from quotient_manifolds.symmetries.layout import Layout, Obstacle, Rotary

GATED = "the heads' outputs are multiplied elementwise by a gate before the output projection"
CLIPPED = "projections are clipped before the product"
_FACTOR = "config.rope_parameters.partial_rotary_factor"
HALF = Rotary(dims=_FACTOR)


def _grouped(
    families: str,
    rotary: Rotary | None = HALF,
    *,
    out: str = "o_proj",
    width: str = "head_dim",
    obstacles: tuple[Obstacle, ...] = (),
    ignores: tuple[str, ...] = ("rotary_emb", "rotary_fn"),
    beside: tuple[str, ...] = (),
    suffix: str = "Attention",
    linears: tuple[str, ...] = ("Linear",),
    prefix: str = "",
) -> Layout:
    """q_proj, k_proj, v_proj and an output projection; heads by the width of one."""
    return Layout(
        classes=tuple(f"{family}{suffix}" for family in families.split()),
        width=width,
        query=linear(f"{prefix}q_proj"),
        key=keys(f"{prefix}k_proj"),
        value=keys(f"{prefix}v_proj"),
        output=output(out),
        beside=(f"{out}.bias", *beside),
        rotary=rotary,
        obstacles=obstacles,
        ignores=ignores,
        linears=linears,
    )


def _clipped(path: str) -> tuple[Obstacle, ...]:
    return (Obstacle("query/key", path, CLIPPED), Obstacle("value/output", path, CLIPPED))


INTERLEAVED = Rotary("interleaved", dims=_FACTOR)
_GATE = (Obstacle("value/output", "gate_proj", GATED),)

ROTARY_LAYOUTS: tuple[Layout, ...] = (
    _grouped(  # Llama and its descendants: coordinates i and i + r/2 rotate into each other
        "Llama Arcee AriaText Bamba Csm DeepseekOcr2Text Emu3 EuroBert Evolla Gemma Gemma2 VaultGemma Granite "
        "GraniteMoe GraniteMoeShared HiggsAudioV2 HyperCLOVAX Jais2 Phimoe Qwen2Moe SolarOpen Cwm SeedOss "
        "Ministral Ministral3 MiniMax Mistral Mixtral VoxtralRealtime VoxtralRealtimeText Qwen2 Starcoder2 Gte "
        "JinaEmbeddingsV3 LasrEncoder NomicBert PaddleOCR Qwen2_5Omni Qwen2_5_VL Qwen2VL Mimi Qwen3 Qwen3Moe "
        "Dots1 Gemma3 Olmo2 Olmo3 Olmoe FlexOlmo Qwen3VLText Qwen3VLMoeText HunYuanDenseV1 HunYuanMoEV1 "
        "HunYuanVLDenseV1 Apertus FalconH1 Glm4Moe Nemotron Mellum Chameleon NanoChat MiniMaxM2 HYV3 T5GemmaSelf "
        "GraniteDoclingText Granite4VisionText UnlimitedOcrText Ultrabert Glm4vMoeText GlmImageText "
        "MllamaTextSelf Pixtral"
    ),
    _grouped("StableLm Phi", Rotary(dims="rotary_ndims")),
    _grouped("Exaone4 Exaone4_5_ ExaoneMoe Kolibri1"),  # what does not rotate is normalised all the same
    _grouped("DINOv3ViT EomtDinov3", Rotary()),
    _grouped("MLCD", Rotary(), out="out_proj"),
    _grouped("MllamaTextCross T5GemmaCross", None),
    _grouped("Phi", Rotary(dims="rotary_ndims"), out="dense"),
    _grouped("BitNet"),
    _grouped("DiffLlama", beside=("lambda_",)),
    _grouped("GptOss GraniteSWA GraniteMoeSWA", beside=("sinks",)),
    _grouped("Afmoe HrmText", obstacles=_GATE),
    _grouped("Qwen3Next Qwen3_5 Qwen3_5Moe", obstacles=(Obstacle("value/output", "q_proj", GATED),)),
    _grouped("ModernBertDecoder", out="Wo"),
    _grouped("Olmo", obstacles=_clipped("config.clip_qkv")),
    _grouped("Lfm2", out="out_proj"),
    _grouped("SmolLM3", Rotary(dims=_FACTOR, unless=(("use_rope", 0),))),
    _grouped("Llama4Text", Rotary("interleaved", dims=_FACTOR, unless=(("use_rope", 0),))),
    _grouped(
        "Cohere Helium Glm Glm4 Ernie4_5 Ernie4_5_Moe Glm4vText GlmOcrText Moonshine MoonshineStreaming", INTERLEAVED
    ),
    _grouped("Cohere2", Rotary("interleaved", dims=_FACTOR, unless=(("sliding_window", None),))),
    _grouped("GPTJ", Rotary("interleaved", dims="rotary_dim"), out="out_proj"),
    _grouped("Jamba", None),  # order comes from the recurrent layers: nothing rotates
    Layout(  # RoFormer, which may rotate the values too
        classes=("RoFormerAttention",),
        heads="self.num_attention_heads",
        query=linear("self.query"),
        key=linear("self.key"),
        value=linear("self.value"),
        output=output("output.dense"),
        beside=("output.dense.bias", "output.LayerNorm."),
        rotary=Rotary("interleaved"),
        obstacles=(Obstacle("value/output", "self.rotary_value", "values are rotated by their positions"),),
    ),
    Layout(  # ESM: rotary or learned positions, by configuration
        classes=("EsmAttention",),
        heads="self.num_attention_heads",
        query=linear("self.query"),
        key=linear("self.key"),
        value=linear("self.value"),
        output=output("output.dense"),
        beside=("output.dense.bias", "LayerNorm."),
        rotary=Rotary(unless=(("self.position_embedding_type", "absolute"),)),
    ),
)
