"""Small random models of Hugging Face model types, made from their configurations alone."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from tests.nets.net import shaken

# Sizes by attribute name. A configuration takes those it knows, and so do the configurations inside it.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "embedding_size"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim"), 8),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "depth"), 1),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 24),
    **dict.fromkeys(("ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("vocab_size",), 60),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx", "max_seq_len"), 32),
    **dict.fromkeys(("image_size",), 16),
    **dict.fromkeys(("patch_size",), 8),
    **dict.fromkeys(("bos_token_id", "pad_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 2),
    **dict.fromkeys(("num_experts_per_tok",), 1),
    "max_source_positions": 12,
    "num_mel_bins": 8,
    "projection_dim": 16,
    "num_frames": 2,
    "sliding_window": 8,
    "layer_types": None,
    "prediction_length": 4,
    "context_length": 12,
}


def build(row_type: str, *, model_class: str = "") -> nn.Module:
    """A small model of the type with random weights, none of them zero, in eval mode."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    default = transformers.AutoConfig.for_model(row_type.partition("/")[0])
    config = small_config(default, SETTINGS.get(row_type, {}))
    config._experts_implementation = "eager"  # grouped products of experts exist in float32 only
    make = getattr(transformers, model_class) if model_class else transformers.AutoModel.from_config
    model: nn.Module = make(config)
    return shaken(model, 0.1)


def small_config(default: Any, overrides: dict[str, Any]) -> Any:
    """The configuration with every size it knows made small, and the configurations inside it likewise."""
    known = set(default.to_dict()) | set(getattr(default, "attribute_map", {}))
    renamed = {name for name, new in getattr(default, "attribute_map", {}).items() if new in overrides}
    renamed |= {"layer_types"} & set(getattr(default, "attribute_map", {}))
    settings: dict[str, Any] = {name: size for name, size in SMALL.items() if name in known and name not in renamed}
    nested = {name: getattr(default, name, None) for name in getattr(default, "sub_configs", {})}
    settings |= {name: small_config(part, overrides.get(name, {})) for name, part in nested.items() if part is not None}
    settings |= {name: value for name, value in overrides.items() if name not in nested}
    return type(default)(**settings)


LATENT = {
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "head_dim": 4,
    "v_head_dim": 8,
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "num_key_value_heads": 4,
}
CONVOLUTIONS = {
    "conv_dim": (8, 8),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
WINDOWS = {"embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 2, "image_size": 16}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
RELATIVE = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": 4,
    "max_relative_positions": 8,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "mobilebert": {"intra_bottleneck_size": 32, "num_feedforward_networks": 2},
    "lilt": {"hidden_size": 48, "num_hidden_layers": 2},
    "vit": {"encoder_stride": 8},
    "longformer": {"attention_window": [8]},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_hidden_layers": 2},
    "lasr_encoder": {"conv_kernel_size": 9},
    "jamba": {"attn_layer_period": 1, "attn_layer_offset": 0},
    "bamba": {"attn_layer_indices": [0], "mamba_n_heads": 8},
    "gpt_bigcode/many": {"multi_query": False},
    "falcon/many": {"multi_query": False, "num_kv_heads": 4},
    "falcon/alibi": {"multi_query": False, "num_kv_heads": 4, "alibi": True},
    "falcon/grouped": {"new_decoder_architecture": True},
    "phi3/partial": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "stablelm/norm": {"qk_layernorm": True},
    "cohere/norm": {"use_qk_norm": True},
    "esm/rotary": {"position_embedding_type": "rotary"},
    "bert/cross": {"is_decoder": True, "add_cross_attention": True},
    "olmo/clipped": {"clip_qkv": 0.5},
    "mpt/clipped": {"attn_config": {"clip_qkv": 0.5}},
    "smollm3/unrotated": {"no_rope_layers": [0]},
    "cohere2/unrotated": {"layer_types": ["full_attention"]},
    "deberta-v2/positions": RELATIVE,
    "deberta-v2/shared": {**RELATIVE, "share_att_key": True},
    "deberta/positions": {**RELATIVE, "max_relative_positions": 8},
    "deepseek_v3/direct": {**LATENT, "q_lora_rank": None},
    "llama4_text/unrotated": {"no_rope_layers": [0]},
    "internvl": {"image_token_id": 59, "image_token_index": 59},
    "aya_vision": {
        "image_token_id": 59,
        "vision_feature_layer": -1,
        "vision_config": {"vision_use_head": False},
    },
    "llava": {"image_token_id": 59, "image_token_index": 59, "vision_feature_layer": -1},
    **dict.fromkeys(("swin", "swinv2", "donut-swin", "maskformer-swin"), WINDOWS),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm_image_text", "glm_ocr_text"), MROPE),
    **dict.fromkeys(("wav2vec2", "hubert", "unispeech", "unispeech-sat", "data2vec-audio", "wavlm"), CONVOLUTIONS),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), LATENT),
}
