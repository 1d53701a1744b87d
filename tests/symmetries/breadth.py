"""The breadth table: which symmetries the attention of Hugging Face model types has, exactly, and what is refused.

Types are small models of tests/small_models.py; "type/variant" is a type with settings of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd
import torch
from torch import nn

from quotient_manifolds.symmetries import Symmetries, balance, zeros_of


@dataclass(frozen=True)
class Row:
    """Model types with the same symmetries.

    pairs: "kind group", biases: redundant rows, refused: "kind reason", separated by semicolons, counts in front.
    """

    domain: str
    types: str
    pairs: str = ""
    biases: str = ""
    refused: str = ""


def counts(text: str) -> dict[str, int]:
    """Items and how many: "2 x a; b" as {"a": 2, "b": 1}."""
    items = (item.rpartition(" x ") for item in text.split("; ")) if text else ()
    return {name: int(count or 1) for count, _, name in items}


def redundant(model: nn.Module, found: Symmetries, *, reached: bool = True) -> Counter[str]:
    """Biases of pairs that others make up for, or a softmax ignores: key biases, and those of values.

    reached: whether the canonical point must have the zeros that are said of it.
    """
    point = balance(model, found) if reached else {name: torch.zeros_like(w) for name, w in model.named_parameters()}
    zeros = zeros_of(found.reparameterizations, point)
    less = [pair for pair in found.pairs if pair.without(zeros).views != pair.views]
    return Counter("key bias" if pair.kind == "query/key" else "value/output bias" for pair in less)


def cases() -> Iterator[tuple[str, Row]]:
    return ((name, row) for row in TABLE for name in row.types.split())


def csv() -> str:
    """The table for readers: one line for all types with the same symmetries, pairs of one small model each."""
    columns = ["domain", "model types", "query/key", "value/output", "redundant biases", "not found, and why"]
    rows = []
    for row in TABLE:
        groups: dict[str, list[str]] = {"query/key": [], "value/output": []}
        for item, count in counts(row.pairs).items():
            kind, _, group = item.partition(" ")
            groups[kind].append(f"{group}{f' ({count})' if count > 1 else ''}")
        biases = ", ".join(kind.removesuffix(" bias") for kind in counts(row.biases))
        whys = "; ".join(item.replace(" ", ": ", 1) for item in counts(row.refused))
        rows.append([row.domain, row.types.replace(" ", ", "), *map(", ".join, groups.values()), biases, whys])
    return pd.DataFrame(rows, columns=columns).to_csv(index=False)


TABLE: tuple[Row, ...] = (
    Row(
        "encoder",
        "albert bert big_bird camembert clip_text_model data2vec-text deberta-v2 distilbert dpr electra ernie esm "
        "flaubert ibert layoutlm megatron-bert mobilebert mpnet rembert roberta roberta-prelayernorm splinter "
        "squeezebert tapas tipsv2_text_model visual_bert xlm xlm-roberta",
        pairs="query/key GL(8)^4; value/output GL(8)^4",
        biases="key bias; value/output bias",
    ),
    Row(
        "encoder",
        "deberta deberta-v2/positions deberta-v2/shared deberta/positions",
        pairs="query/key GL(8)^4; value/output GL(8)^4",
        biases="value/output bias",
    ),
    Row(
        "encoder",
        "esm/rotary gte jina_embeddings_v3 roformer",
        pairs="query/key GL(1, C)^16; value/output GL(8)^4",
        biases="value/output bias",
    ),
    Row(
        "encoder",
        "eurobert ultrabert",
        pairs="query/key GL(1, C)^8; value/output GL(8)^2",
    ),
    Row(
        "encoder",
        "modernbert nomic_bert",
        pairs="query/key GL(1, C)^16; value/output GL(8)^4",
    ),
    Row(
        "encoder",
        "bert/cross",
        pairs="2 x query/key GL(8)^4; 2 x value/output GL(8)^4",
        biases="2 x key bias; 2 x value/output bias",
    ),
    Row(
        "encoder",
        "convbert",
        pairs="query/key GL(1)^16; 2 x value/output GL(8)^2",
        biases="key bias; value/output bias",
    ),
    Row(
        "encoder",
        "lilt",
        pairs="2 x query/key GL(12)^4; 2 x query/key GL(3)^4; 2 x value/output GL(12)^4; 2 x value/output GL(3)^4",
        biases="4 x key bias; 4 x value/output bias",
    ),
    Row(
        "encoder",
        "longformer",
        pairs="query/key GL(8)^4",
    ),
    Row(
        "encoder",
        "nystromformer",
        pairs="query/key GL(8)^4; value/output GL(8)^4",
        biases="key bias",
    ),
    Row(
        "decoder",
        "arcee aria_text cohere cohere2 cwm ernie4_5 ernie4_5_moe falcon/grouped gemma gemma2 glm4v_text "
        "glm_image_text glm_ocr_text gpt_oss granite granite_docling_text granite_swa granitemoe granitemoe_swa "
        "granitemoeshared helium higgs_audio_v2 hyperclovax internlm3 iquestcoder llama minimax ministral "
        "ministral3 mistral mixtral olmo phi3 phimoe qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl_text seed_oss "
        "smollm3 solar_open vaultgemma",
        pairs="query/key GL(1, C)^8; value/output GL(8)^2",
    ),
    Row(
        "decoder",
        "apertus cohere/norm exaone4 exaone_moe flex_olmo gemma3_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 "
        "kolibri1 lfm2 llama4_text mellum minimax_m2 nanochat olmo2 olmo3 olmoe qwen3 qwen3_moe qwen3_vl_moe_text "
        "qwen3_vl_text stablelm/norm",
        pairs="value/output GL(8)^2",
        refused="query/key norm",
    ),
    Row(
        "decoder",
        "bert-generation biogpt bloom ctrl gpt-sw3 gpt2 gpt_bigcode/many imagegpt openai-gpt opt",
        pairs="query/key GL(8)^4; value/output GL(8)^4",
        biases="key bias; value/output bias",
    ),
    Row(
        "decoder",
        "deepseek_v2 deepseek_v3 deepseek_v3/direct glm4_moe_lite youtu",
        pairs="query/key GL(1, C)^2; query/key GL(6)^4; value/output GL(8)^4",
    ),
    Row(
        "decoder",
        "bamba glm4_moe nemotron phi3/partial",
        pairs="query/key GL(1, C)^4; query/key GL(4)^2; value/output GL(8)^2",
    ),
    Row(
        "decoder",
        "cohere2/unrotated jamba llama4_text/unrotated smollm3/unrotated",
        pairs="query/key GL(8)^2; value/output GL(8)^2",
    ),
    Row(
        "decoder",
        "falcon/many gpt_neox_japanese modernbert-decoder",
        pairs="query/key GL(1, C)^16; value/output GL(8)^4",
    ),
    Row(
        "decoder",
        "bitnet diffllama",
        pairs="query/key GL(1, C)^8",
        refused="value/output norm",
    ),
    Row(
        "decoder",
        "codegen gptj",
        pairs="query/key GL(1, C)^8; query/key GL(4)^4; value/output GL(8)^4",
    ),
    Row(
        "decoder",
        "glm glm4",
        pairs="query/key GL(1, C)^4; query/key GL(4)^2; value/output GL(8)^2",
        biases="key bias",
    ),
    Row(
        "decoder",
        "jais2 starcoder2",
        pairs="query/key GL(1, C)^8; value/output GL(8)^2",
        biases="value/output bias",
    ),
    Row(
        "decoder",
        "falcon/alibi mpt",
        pairs="query/key GL(8)^4; value/output GL(8)^4",
    ),
    Row(
        "decoder",
        "mpt/clipped olmo/clipped",
        refused="query/key clip; value/output clip",
    ),
    Row(
        "decoder",
        "afmoe",
        refused="query/key norm; value/output gate",
    ),
    Row(
        "decoder",
        "falcon",
        pairs="query/key GL(1, C)^4; value/output GL(8)^1",
    ),
    Row(
        "decoder",
        "gpt_bigcode",
        pairs="query/key GL(8)^1; value/output GL(8)^1",
        biases="key bias; value/output bias",
    ),
    Row(
        "decoder",
        "gpt_neo",
        pairs="2 x query/key GL(8)^4; 2 x value/output GL(8)^4",
    ),
    Row(
        "decoder",
        "gpt_neox",
        pairs="query/key GL(1, C)^4; query/key GL(6)^4; value/output GL(8)^4",
        biases="key bias; value/output bias",
    ),
    Row(
        "decoder",
        "hrm_text",
        pairs="2 x query/key GL(1, C)^16",
        refused="2 x value/output gate",
    ),
    Row(
        "decoder",
        "persimmon",
        pairs="value/output GL(8)^4",
        biases="value/output bias",
        refused="query/key norm",
    ),
    Row(
        "decoder",
        "phi",
        pairs="query/key GL(1, C)^4; query/key GL(4)^2; value/output GL(8)^2",
        biases="key bias; value/output bias",
    ),
    Row(
        "decoder",
        "stablelm",
        pairs="query/key GL(1, C)^2; query/key GL(6)^2; value/output GL(8)^2",
    ),
    Row(
        "decoder",
        "xlnet",
        pairs="query/key GL(8)^4; value/output GL(8)^4",
    ),
    Row(
        "encoder-decoder",
        "bart blenderbot blenderbot-small m2m_100 marian mbart mvp nllb-moe pegasus plbart speech_to_text",
        pairs="3 x query/key GL(8)^4; 3 x value/output GL(8)^4",
        biases="3 x key bias; 3 x value/output bias",
    ),
    Row(
        "encoder-decoder",
        "mt5 switch_transformers t5 udop umt5",
        pairs="3 x query/key GL(8)^4; 3 x value/output GL(8)^4",
    ),
    Row(
        "encoder-decoder",
        "longt5",
        pairs="3 x query/key GL(8)^4; 3 x value/output GL(8)^4",
    ),
    Row(
        "encoder-decoder",
        "moonshine",
        pairs="7 x query/key GL(1, C)^16; query/key GL(4)^8; 8 x value/output GL(4)^8",
    ),
    Row(
        "encoder-decoder",
        "prophetnet",
        pairs="query/key GL(8)^4; value/output GL(8)^4; 2 x query/key GL(2)^16; 2 x value/output GL(2)^16",
        biases="3 x key bias; 3 x value/output bias",
    ),
    Row(
        "encoder-decoder",
        "t5gemma",
        pairs="2 x query/key GL(1, C)^8; 3 x value/output GL(8)^2; query/key GL(8)^2",
    ),
    Row(
        "encoder-decoder",
        "whisper",
        pairs="query/key GL(16)^2; value/output GL(16)^2; 2 x query/key GL(8)^4; 2 x value/output GL(8)^4",
        biases="3 x value/output bias",
    ),
    Row(
        "vision",
        "chinese_clip_vision_model clip_vision_model deit dinov2 dinov2_with_registers dpt idefics3_vision ijepa "
        "pixio smolvlm_vision tipsv2_vision_model vit vit_msn vivit",
        pairs="query/key GL(8)^4; value/output GL(8)^4",
        biases="key bias; value/output bias",
    ),
    Row(
        "vision",
        "dinov3_vit mlcd mlcd_vision_model",
        pairs="query/key GL(1, C)^16; value/output GL(8)^4",
        biases="value/output bias",
    ),
    Row(
        "vision",
        "donut-swin maskformer-swin swin",
        pairs="2 x query/key GL(8)^2; 2 x value/output GL(8)^2; query/key GL(8)^4; value/output GL(8)^4",
        biases="3 x key bias; 3 x value/output bias",
    ),
    Row(
        "vision",
        "sam_hq_vision_model sam_vision_model",
        pairs="query/key GL(8)^1; value/output GL(8)^4",
        biases="key bias; value/output bias",
    ),
    Row(
        "vision",
        "beit",
        pairs="query/key GL(8)^4; value/output GL(8)^4",
        biases="value/output bias",
    ),
    Row(
        "vision",
        "internvl_vision",
        pairs="query/key GL(8)^4; value/output GL(8)^4",
    ),
    Row(
        "vision",
        "pixtral",
        pairs="query/key GL(1, C)^16; value/output GL(8)^4",
    ),
    Row(
        "vision",
        "siglip_vision_model",
        pairs="2 x query/key GL(8)^4; 2 x value/output GL(8)^4",
        biases="2 x key bias; 2 x value/output bias",
    ),
    Row(
        "vision",
        "swinv2",
        pairs="2 x value/output GL(8)^2; value/output GL(8)^4",
        biases="3 x value/output bias",
        refused="3 x query/key norm",
    ),
    Row(
        "audio",
        "audio-spectrogram-transformer data2vec-audio hubert unispeech unispeech-sat wav2vec2 wavlm",
        pairs="query/key GL(8)^4; value/output GL(8)^4",
        biases="key bias; value/output bias",
    ),
    Row(
        "audio",
        "qwen2_audio_encoder voxtral_encoder",
        pairs="query/key GL(8)^4; value/output GL(8)^4",
        biases="value/output bias",
    ),
    Row(
        "audio",
        "lasr_encoder",
        pairs="query/key GL(1, C)^8; value/output GL(8)^2",
    ),
    Row(
        "multimodal",
        "altclip chinese_clip clip clipseg git metaclip_2 owlv2 owlvit tipsv2 vision-text-dual-encoder",
        pairs="2 x query/key GL(8)^4; 2 x value/output GL(8)^4",
        biases="2 x key bias; 2 x value/output bias",
    ),
    Row(
        "multimodal",
        "aya_vision llava",
        pairs="query/key GL(8)^4; value/output GL(8)^4; query/key GL(1, C)^8; value/output GL(8)^2",
        biases="key bias; value/output bias",
    ),
    Row(
        "multimodal",
        "internvl",
        pairs="query/key GL(8)^4; value/output GL(8)^4; query/key GL(1, C)^8; value/output GL(8)^2",
    ),
    Row(
        "multimodal",
        "siglip",
        pairs="3 x query/key GL(8)^4; 3 x value/output GL(8)^4",
        biases="3 x key bias; 3 x value/output bias",
    ),
)

ROTATED = "query/key GL(1, C)^6; query/key GL(1)^2; value/output GL(8)^2"
UNLIKE: dict[str, tuple[str, str]] = {
    # planes that turn so slowly that their cosines are 1, or by angles that are a parameter or of a small image
    **dict.fromkeys(("cwm", "gpt_oss", "higgs_audio_v2", "ministral3"), (ROTATED, "")),
    "roformer": ("query/key GL(1)^12; value/output GL(8)^4", "value/output bias"),
    "dinov3_vit": ("query/key GL(1)^16; value/output GL(8)^4", "value/output bias"),
    **dict.fromkeys(("sam_vision_model", "sam_hq_vision_model"), ("value/output GL(8)^4", "value/output bias")),
    # the last values of the layout are read by nobody: their biases are unseen
    "lilt": (
        "2 x query/key GL(12)^4; 2 x query/key GL(3)^4; 2 x value/output GL(12)^4; 2 x value/output GL(3)^4",
        "4 x key bias; 3 x value/output bias",
    ),
    # the queries of the pooling head come from one vector and fill no head: a change of basis, and no pair
    "siglip_vision_model": ("query/key GL(8)^4; 2 x value/output GL(8)^4", "key bias; 2 x value/output bias"),
    "siglip": ("2 x query/key GL(8)^4; 3 x value/output GL(8)^4", "2 x key bias; 3 x value/output bias"),
    # masked scores are -10000, and a constant of keys is not added to these
    "openai-gpt": ("query/key GL(8)^4; value/output GL(8)^4", "value/output bias"),
}
"""Types of which less is found than they have, and what."""
