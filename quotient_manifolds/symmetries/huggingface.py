"""The layouts of Hugging Face attention modules, by class name and attributes: transformers itself is never imported.

Rows name classes of transformers 4 and 5 whose forward pass is plain softmax attention, and no others: rotary
embeddings or norms between projection and product break GL(h) while the attributes stay the same.
"""

from __future__ import annotations

from quotient_manifolds.symmetries.attention import BIAS, LINEAR, TRANSPOSED, Layout, Place


def _linear(path: str) -> tuple[Place, ...]:
    """A Linear's weight, and its bias if it has one as a further row."""
    return (Place(f"{path}.weight", LINEAR), Place(f"{path}.bias", BIAS, optional=True))


def _output(path: str) -> tuple[Place, ...]:
    """The output projection's weight; its bias belongs to no head."""
    return (Place(f"{path}.weight", TRANSPOSED),)


def _fused(path: str, blocks: int, index: int) -> tuple[Place, ...]:
    """One of `blocks` equal blocks of a fused Conv1D, stored (in, out)."""
    weight = Place(
        f"{path}.weight",
        "rows block (heads h) -> heads (block rows) h",
        axes="rows (block out)",
        blocks=blocks,
        index=index,
    )
    bias = Place(
        f"{path}.bias", "block (heads h) -> heads block h", True, axes="(block out)", blocks=blocks, index=index
    )
    return (weight, bias)


def _conv1d(path: str) -> tuple[Place, ...]:
    return (Place(f"{path}.weight", TRANSPOSED), Place(f"{path}.bias", BIAS, optional=True))


def _classes(*families: str) -> tuple[str, ...]:
    """The class names of families in every version: transformers 4 had a class per attention kernel."""
    kernels = ("Attention", "SdpaAttention", "FlashAttention2")
    return tuple(f"{family}{kernel}" for family in families for kernel in kernels)


HUGGINGFACE_LAYOUTS: tuple[Layout, ...] = (
    Layout(  # BERT and its descendants: projections in `self`, output and its norm in `output`
        classes=_classes("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra", "Ernie", "MegatronBert"),
        heads="self.num_attention_heads",
        query=_linear("self.query"),
        key=_linear("self.key"),
        value=_linear("self.value"),
        output=_output("output.dense"),
        beside=("output.dense.bias", "output.LayerNorm.", "ln."),
    ),
    Layout(  # ALBERT: one module, shared by all layers
        classes=_classes("Albert"),
        heads="num_attention_heads",
        query=_linear("query"),
        key=_linear("key"),
        value=_linear("value"),
        output=_output("dense"),
        beside=("dense.bias", "LayerNorm."),
    ),
    Layout(
        classes=(*_classes("DistilBert"), "DistilBertSelfAttention", "MultiHeadSelfAttention"),
        heads="n_heads",
        query=_linear("q_lin"),
        key=_linear("k_lin"),
        value=_linear("v_lin"),
        output=_output("out_lin"),
        beside=("out_lin.bias",),
    ),
    Layout(  # ViT of transformers 5
        classes=_classes("ViT", "DeiT", "ViTMSN"),
        heads="num_attention_heads",
        query=_linear("q_proj"),
        key=_linear("k_proj"),
        value=_linear("v_proj"),
        output=_output("o_proj"),
        beside=("o_proj.bias",),
    ),
    Layout(  # ViT of transformers 4
        classes=_classes("ViT", "DeiT", "ViTMSN"),
        heads="attention.num_attention_heads",
        query=_linear("attention.query"),
        key=_linear("attention.key"),
        value=_linear("attention.value"),
        output=_output("output.dense"),
        beside=("output.dense.bias",),
    ),
    Layout(  # CLIP, text and vision towers
        classes=_classes("CLIP", "Siglip"),
        heads="num_heads",
        query=_linear("q_proj"),
        key=_linear("k_proj"),
        value=_linear("v_proj"),
        output=_output("out_proj"),
        beside=("out_proj.bias",),
    ),
    Layout(  # GPT-2's cross-attention comes first: its c_attn holds two blocks, not three
        classes=_classes("GPT2"),
        heads="num_heads",
        query=_conv1d("q_attn"),
        key=_fused("c_attn", 2, 0),
        value=_fused("c_attn", 2, 1),
        output=(Place("c_proj.weight", LINEAR),),
        beside=("c_proj.bias",),
        linears=("Conv1D",),
    ),
    Layout(
        classes=_classes("GPT2"),
        heads="num_heads",
        query=_fused("c_attn", 3, 0),
        key=_fused("c_attn", 3, 1),
        value=_fused("c_attn", 3, 2),
        output=(Place("c_proj.weight", LINEAR),),
        beside=("c_proj.bias",),
        linears=("Conv1D",),
    ),
)
