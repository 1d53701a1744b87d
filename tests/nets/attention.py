"""ONE table of small models with attention: how each is built, what it eats, and the symmetric pairs it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries import Scope, Symmetries, declare_pair, find_symmetries
from quotient_manifolds.symmetries.tangents import span, tangents
from tests.nets.handwritten import SelfAttention
from tests.nets.net import shaken

Expected = tuple[str, int, int, int, int]  # pair name, heads, n, m, h


@dataclass(frozen=True)
class ModelCase:
    """A small model: `touched` are regular expressions that match exactly the parameters in its pairs."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    pairs: tuple[Expected, ...]
    touched: tuple[str, ...]

    def build(self) -> nn.Module:
        """In eval mode, in float32, every weight and bias away from zero."""
        torch.manual_seed(0)
        return shaken(self.make(), 0.15)

    def found(self, model: nn.Module | None = None, scope: Scope = "pairs") -> Symmetries:
        """What is found in the model, or in a new one: the pairs of attention and their redundant biases, or all."""
        return (_found(self.name) if model is None else find_symmetries(model, self.inputs())).within(scope)


def coverage(symmetries: Symmetries, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For every parameter a mask of its shape: True where a pair owns the element."""
    masks = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in params.items()}
    for pair in symmetries.pairs:
        pair.write(masks, torch.ones(pair.heads, pair.n + pair.m, pair.h, dtype=torch.bool))
    return masks


def orbit_dimension(symmetries: Symmetries, params: Mapping[str, Tensor]) -> int:
    """The rank of the tangent vectors of all symmetries."""
    found = tangents(symmetries, params)
    return len(span(torch.cat(list(found.values())))) if found else 0


def claimed(model: nn.Module, prefix: str = "0", heads: int = 3) -> Symmetries:
    """What attention with these four projections has if nothing stands between them, as declared by hand."""
    p = f"{prefix}." if prefix else ""

    def units(name: str) -> Callable[[Mapping[str, Tensor]], Tensor]:
        def cut(w: Mapping[str, Tensor]) -> Tensor:
            rows = torch.cat([w[f"{p}{name}.weight"].mT, w[f"{p}{name}.bias"][None]])
            return rows.unflatten(1, (heads, -1)).transpose(0, 1)

        return cut

    def output(w: Mapping[str, Tensor]) -> Tensor:
        return w[f"{p}o_proj.weight"].unflatten(1, (heads, -1)).transpose(0, 1)

    qk = declare_pair(model, prefix, "query/key", G=units("q_proj"), H=units("k_proj"))
    vo = declare_pair(model, prefix, "value/output", G=units("v_proj"), H=output)
    return Symmetries((qk, vo), tuple(name for name, _ in model.named_parameters() if name == f"{p}o_proj.bias"))


def both(prefix: str, heads: int, rows: int, h: int, *, bias: bool = True, others: int | None = None) -> list[Expected]:
    """The pairs of one module: `rows` inputs to queries, `others` to keys and values (the same if not given)."""
    others = rows if others is None else others
    return [
        (f"{prefix} query/key".strip(), heads, rows + bias, others + bias, h),
        (f"{prefix} value/output".strip(), heads, others + bias, rows, h),
    ]


def layers(pattern: str, count: int, heads: int, rows: int, h: int, **more: Any) -> tuple[Expected, ...]:
    return tuple(pair for layer in range(count) for pair in both(pattern.format(layer), heads, rows, h, **more))


def tokens(length: int = 6) -> Tensor:
    return torch.randint(3, 40, (2, length), generator=torch.Generator().manual_seed(1))


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def ids() -> dict[str, Tensor]:
    return {"input_ids": tokens()}


def image() -> dict[str, Tensor]:
    return {"pixel_values": noise(2, 3, 8, 8)}


class ViTAttention(nn.Module):
    """The attributes of a recognised class, with something of one's own between projection and product (`twist`)."""

    def __init__(self, twist: Callable[[Tensor], Tensor] = lambda heads: heads) -> None:
        super().__init__()
        self.num_attention_heads = 3
        self.twist = twist
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), 3, self.twist))


def attend(
    q: Tensor, k: Tensor, v: Tensor, heads: int, twist: Callable[[Tensor], Tensor] = lambda heads: heads
) -> Tensor:
    """Softmax attention in plain einsums."""
    q, k, v = (value.unflatten(-1, (heads, -1)) for value in (q, k, v))
    scores = torch.einsum("bihd,bjhd->bhij", twist(q), twist(k)).to(v.dtype)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(-2)


def hugging_face(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """A small model of transformers with random weights, or a skip where transformers is missing."""

    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return make


SIZES = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 16}
TEXT = {**SIZES, "vocab_size": 40, "max_position_embeddings": 24}
IMAGE = {**SIZES, "image_size": 8, "patch_size": 4}
MARKS = {"bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_embd": 12, "n_head": 3, "n_layer": 2, "vocab_size": 40, "n_positions": 24, **MARKS}

TORCH_NAMES = (r"(.*\.)?in_proj_(weight|bias)", r"(.*\.)?out_proj\.weight")


# Many more models of transformers: tests/symmetries/breadth.py.
MODELS: tuple[ModelCase, ...] = (
    ModelCase(
        "torch", lambda: SelfAttention(12, 3), lambda: noise(2, 5, 12), tuple(both("attention", 3, 12, 4)), TORCH_NAMES
    ),
    ModelCase(
        "torch without bias",
        lambda: SelfAttention(12, 3, bias=False),
        lambda: noise(2, 5, 12),
        tuple(both("attention", 3, 12, 4, bias=False)),
        TORCH_NAMES,
    ),
    ModelCase(
        "torch with appended tokens",
        lambda: SelfAttention(12, 3, add_bias_kv=True, add_zero_attn=True),
        lambda: noise(2, 5, 12),
        (("attention query/key", 3, 13, 14, 4), ("attention value/output", 3, 14, 12, 4)),
        (*TORCH_NAMES, r"attention\.bias_[kv]"),
    ),
    ModelCase(
        "torch with separate weights, the whole model",
        lambda: nn.MultiheadAttention(12, 3, kdim=10, vdim=6),
        lambda: (noise(5, 2, 12), noise(4, 2, 10), noise(4, 2, 6)),
        (("query/key", 3, 13, 11, 4), ("value/output", 3, 7, 12, 4)),
        (r"[qkv]_proj_weight", "in_proj_bias", r"out_proj\.weight"),
    ),
    ModelCase(
        "torch encoder",
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 16, batch_first=True), 2),
        lambda: noise(2, 5, 12),
        layers("layers.{}.self_attn", 2, 2, 12, 6),
        TORCH_NAMES,
    ),
    ModelCase(
        "torch decoder",
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(12, 3, 16), 1),
        lambda: (noise(5, 2, 12), noise(4, 2, 12)),
        (*both("layers.0.self_attn", 3, 12, 4), *both("layers.0.multihead_attn", 3, 12, 4)),
        TORCH_NAMES,
    ),
    ModelCase(
        "BERT",
        hugging_face("BertModel", "BertConfig", **TEXT),
        ids,
        layers("encoder.layer.{}.attention", 2, 3, 12, 4),
        (r"encoder\.layer\.\d\.attention\.(self\.(query|key|value)\.(weight|bias)|output\.dense\.weight)",),
    ),
    ModelCase(
        "ALBERT, one attention for all layers",
        hugging_face("AlbertModel", "AlbertConfig", **TEXT, embedding_size=10),
        ids,
        tuple(both("encoder.albert_layer_groups.0.albert_layers.0.attention", 3, 12, 4)),
        (r".*attention\.((query|key|value)\.(weight|bias)|dense\.weight)",),
    ),
    ModelCase(
        "ViT",
        hugging_face("ViTModel", "ViTConfig", **IMAGE),
        image,
        layers("layers.{}.attention", 2, 3, 12, 4),
        (r"layers\.\d\.attention\.([qkv]_proj\.(weight|bias)|o_proj\.weight)",),
    ),
    ModelCase(
        "CLIP, both towers",
        hugging_face(
            "CLIPModel",
            "CLIPConfig",
            text_config={**TEXT, **MARKS},
            vision_config={**IMAGE, "hidden_size": 8, "num_attention_heads": 2},
            projection_dim=6,
        ),
        lambda: {**image(), **ids()},
        (
            *layers("text_model.encoder.layers.{}.self_attn", 2, 3, 12, 4),
            *layers("vision_model.encoder.layers.{}.self_attn", 2, 2, 8, 4),
        ),
        (r".*self_attn\.([qkv]_proj\.(weight|bias)|out_proj\.weight)",),
    ),
    ModelCase(
        "GPT-2",
        hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT2),
        ids,
        layers("transformer.h.{}.attn", 2, 3, 12, 4),
        (r".*attn\.c_attn\.(weight|bias)", r".*attn\.c_proj\.weight"),
    ),
    ModelCase(
        "GPT-2 with cross-attention",
        hugging_face("GPT2Model", "GPT2Config", **GPT2, add_cross_attention=True),
        lambda: {**ids(), "encoder_hidden_states": noise(2, 5, 12)},
        tuple(
            pair
            for layer in range(2)
            for kind in ("attn", "crossattention")
            for pair in both(f"h.{layer}.{kind}", 3, 12, 4)
        ),
        (r".*\.(c|q)_attn\.(weight|bias)", r".*\.(attn|crossattention)\.c_proj\.weight"),
    ),
)

BY_NAME = {case.name: case for case in MODELS}


@cache
def _found(name: str) -> Symmetries:
    return find_symmetries(BY_NAME[name].build(), BY_NAME[name].inputs())


def llama(**settings: Any) -> nn.Module:
    """Build a Llama of 4 heads of 6 and 2 key heads, its weights far from their initial values."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **heads, **settings}))
    return shaken(model, 0.2)


IDS = {"input_ids": torch.arange(3, 15)[None]}  # of a llama
