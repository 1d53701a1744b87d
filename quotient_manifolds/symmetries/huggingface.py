"""The layouts of Hugging Face attention modules, by class name and attributes: transformers itself is never imported.

Rows name classes of transformers 4 and 5 whose forward pass was read: what stands between projection and product is in
the row, not in the attributes, which look the same with rotary embeddings or norms and without. This file holds plain
softmax attention: scores that see queries and keys through their product alone, whatever is added to the scores.
"""

from __future__ import annotations

from dataclasses import replace

from quotient_manifolds.symmetries.fused import linear, optional, output
from quotient_manifolds.symmetries.huggingface_fused import FUSED_LAYOUTS
from quotient_manifolds.symmetries.huggingface_latent import LATENT_LAYOUTS
from quotient_manifolds.symmetries.huggingface_rotary import ROTARY_LAYOUTS
from quotient_manifolds.symmetries.layout import Layout


def _classes(families: str) -> tuple[str, ...]:
    """The class names of families in every version: transformers 4 had a class per attention kernel."""
    kernels = ("Attention", "SdpaAttention", "FlashAttention2")
    return tuple(f"{family}{kernel}" for family in families.split() for kernel in kernels)


def _separate(classes: tuple[str, ...], projections: str, heads: str, beside: tuple[str, ...] = ()) -> Layout:
    """Separate Linears, their paths in the order query key value output."""
    query, key, value, out = projections.split()
    return Layout(
        classes=classes,
        heads=heads,
        query=linear(query),
        key=linear(key),
        value=linear(value),
        output=output(out),
        beside=(f"{out}.bias", *beside),
    )


_BERT = "self.query self.key self.value output.dense"
_BERT_BESIDE = ("output.LayerNorm.", "ln.", "LayerNorm.", "self.dropout", "self.distance_embedding.")

BERT_LIKE = _classes(
    "Bert Roberta XLMRoberta Camembert Electra Ernie MegatronBert BertGeneration BridgeTower "
    "Data2VecText RobertaPreLayerNorm RoCBert AlignText AltRoberta ChineseCLIPText ClapText "
    "LayoutLM MarkupLM Splinter VisualBert RemBert Tapas Canine BlipText Git LayoutLMv3 Flava "
    "MobileBert BigBird"
)

PLAIN_LAYOUTS: tuple[Layout, ...] = (
    _separate(BERT_LIKE, _BERT, "self.num_attention_heads", _BERT_BESIDE),
    _separate(  # window attention: a learned bias is added to the scores
        _classes("ClapAudio DonutSwin MaskFormerSwin Swin"),
        _BERT,
        "self.num_attention_heads",
        ("self.relative_position_bias",),
    ),
    _separate(_classes("Albert"), "query key value dense", "num_attention_heads", ("LayerNorm.",)),
    _separate(
        ("DistilBertSelfAttention", "MultiHeadSelfAttention", "DistilBertSdpaAttention", "DistilBertFlashAttention2"),
        "q_lin k_lin v_lin out_lin",
        "n_heads",
    ),
    _separate(("MPNetAttention",), "attn.q attn.k attn.v attn.o", "attn.num_attention_heads", ("LayerNorm.",)),
    _separate(  # ViT of transformers 5
        _classes(
            "ViT DeiT ViTMSN AST Swin Beit Dinov2 Dinov2WithRegisters IJepa LwDetrViT Pixio "
            "MoonshineStreamingEncoder RfDetrDinov2 Tipsv2Vision ViTMAE Vivit MllamaVision Radio"
        ),
        "q_proj k_proj v_proj o_proj",
        "num_attention_heads|num_heads|config.num_attention_heads",
        ("relative_position_bias.",),
    ),
    _separate(  # ViT of transformers 4, and those that keep its layout
        _classes("ViT DeiT ViTMSN DPTViT VitPoseBackbone Yolos Flava"),
        "attention.query attention.key attention.value output.dense",
        "attention.num_attention_heads",
    ),
    _separate(  # CLIP and the decoders of the BART family, self- and cross-attention
        _classes(
            "CLIP Siglip Siglip2 Aimv2 Idefics2Vision Idefics3Vision SmolVLMVision Eomt AltCLIP "
            "ChineseCLIPVision CLIPSeg MetaClip2 XCLIP GitVision Ovis2Vision Blenderbot Bart "
            "BigBirdPegasusDecoder BioGpt BlenderbotSmall Informer M2M100 Marian MBart Pegasus PegasusX "
            "PLBart TimeSeriesTransformer OPT Whisper Speech2Text Musicgen MusicgenMelody Data2VecAudio "
            "Hubert PatchTSMixer PatchTST SEW UniSpeech NllbMoe UniSpeechSat Wav2Vec2 Qwen2Audio "
            "Voxtral GroupViT OwlViT Owlv2 LEDDecoder AudioFlamingo3 Mvp PPFormulaNet XGLM Sam SamHQ "
            "Tipsv2Text"
        ),
        "q_proj k_proj v_proj out_proj",
        "num_heads|num_attention_heads",
    ),
    replace(  # DETR: positions are added to the inputs of queries and keys
        _separate(
            _classes(
                "DetrSelf ConditionalDetrSelf DeformableDetrSelf DFineSelf RTDetrSelf RTDetrV2Self MaskFormerDetrSelf "
                "DetrCross MaskFormerDetrCross"
            ),
            "q_proj k_proj v_proj o_proj",
            "",
        ),
        width="head_dim",
    ),
    _separate(("GPTNeoSelfAttention",), "q_proj k_proj v_proj out_proj", "num_heads"),
    _separate(
        ("InternVLVisionAttention", "JanusVisionAttention"), "q_proj k_proj v_proj projection_layer", "num_heads"
    ),
    _separate(("LxmertSelfAttentionLayer",), _BERT, "self.num_attention_heads", _BERT_BESIDE),
    _separate(
        ("LxmertCrossAttentionLayer",),
        "att.query att.key att.value output.dense",
        "att.num_attention_heads",
        _BERT_BESIDE,
    ),
    *(
        replace(_separate((name,), projections, heads), package=f"transformers.models.{family}.")
        for family, name, projections, heads in (
            ("fsmt", "Attention", "q_proj k_proj v_proj out_proj", "num_heads"),
            ("ctrl", "MultiHeadAttention", "Wq Wk Wv dense", "num_heads"),
            ("xlm", "MultiHeadAttention", "q_lin k_lin v_lin out_lin", "n_heads"),
            ("flaubert", "MultiHeadAttention", "q_lin k_lin v_lin out_lin", "n_heads"),
        )
    ),
    _separate(  # T5: a learned bias is added to the scores
        _classes("T5 MT5 LongT5 SwitchTransformers Pop2Piano Udop UMT5"),
        "q k v o",
        "n_heads",
        ("relative_attention_bias.",),
    ),
    Layout(  # DeBERTa-v2: projected positions meet the other side's content, so they are further rows of this side
        classes=("DebertaV2Attention",),
        heads="self.num_attention_heads",
        query=linear("self.query_proj") + optional(linear("self.pos_query_proj")),
        key=linear("self.key_proj") + optional(linear("self.pos_key_proj")),
        value=linear("self.value_proj"),
        output=output("output.dense"),
        beside=("output.dense.bias", "output.LayerNorm."),
        key_bias=False,  # position-to-content scores see it times a position
    ),
)

HUGGINGFACE_LAYOUTS: tuple[Layout, ...] = (*PLAIN_LAYOUTS, *FUSED_LAYOUTS, *ROTARY_LAYOUTS, *LATENT_LAYOUTS)
