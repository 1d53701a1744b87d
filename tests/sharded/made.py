"""The small Llama that processes share in the tests, its batch, and what is measured of it."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn

from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, KnownSymmetries, Quotient
from quotient_manifolds.sharpness import AverageCase, GradientNorm, PreparedModel, WorstCase, next_token_cross_entropy
from quotient_manifolds.symmetries import Symmetries

Batch = dict[str, Tensor]
Numbers = list[float | None]
WORDS = 65  # odd, so that parts differ in size
FEW = ("adaptive", "inv")  # geometries, where a second model takes the same way
ELSEWHERE = ("euclidean", "inv", "exact")  # and where a second way of sharing takes the same measures


def config() -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        attn_implementation="sdpa",
    )


def llama(dtype: torch.dtype) -> nn.Module:
    """A model with generic gains, and weights large enough for a loss with slopes."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config()).eval()
    with torch.no_grad():
        for w in model.parameters():
            w.mul_(2.0) if w.ndim > 1 else w.add_(0.1 * torch.randn_like(w))
    return model.to(dtype)


def frozen(model: nn.Module) -> nn.Module:
    """The model with a layer and a norm elsewhere that stay where they are."""
    model.model.layers[0].requires_grad_(False)
    model.model.norm.requires_grad_(False)
    return model


def batch() -> Batch:
    ids = torch.randint(0, WORDS, (4, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def half(model: nn.Module, batch: Batch) -> Tensor:
    """The loss with products in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return next_token_cross_entropy(model, batch).float()


def geometries(symmetries: Symmetries) -> dict[str, Geometry]:
    return {
        "euclidean": Euclidean(),
        "adaptive": Adaptive(),
        "linf": Euclidean(norm="linf"),
        "inv": Quotient("inv", symmetries=symmetries),
        "mix": Quotient("mix", symmetries=symmetries.within("pairs"), verify="none"),  # by nothing else, whole or not
        "exact": Quotient("mix", "exact", symmetries=symmetries),
    }


def measured(model: nn.Module, batch: Batch, symmetries: Symmetries, *names: str) -> dict[str, Numbers]:
    """For each geometry, or those named, worst case, its length and reach, the gradient norm, and the average case."""
    values: dict[str, Numbers] = {}
    known = KnownSymmetries()
    for name, geometry in geometries(symmetries).items():
        if names and name not in names:
            continue
        prepared = PreparedModel.of(model, next_token_cross_entropy, [batch], geometry, known=known)
        radius = 1e-3 if name == "linf" else 0.1
        worst, average, slope = (
            measure.on(prepared, 0, lambda: None, {})
            for measure in (
                WorstCase(geometry, radius, steps=3, restarts=int(name == "inv")),
                AverageCase(geometry, radius, samples=2),
                GradientNorm(geometry),
            )
        )
        values[name] = [worst.value, worst.norm, worst.reach, slope.value, average.value, worst.base_loss]
    return values
