"""Two Linears in a row, x -> W_2 (W_1 x + b_1) + b_2: the model sees W_2 [W_1 b_1] only, so GL(r) acts between them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from quotient_manifolds.symmetries.found import Found
from quotient_manifolds.symmetries.pair import Factor, Part, Refused, SymmetricPair

KIND = "bottleneck in/out"
_NOTHING = (nn.Identity, nn.Dropout)


def bottleneck(module: nn.Module, name: str, names: Mapping[int, str]) -> Found | None:
    """The pairs of neighbouring Linears of an nn.Sequential, each Linear in one pair; None for any other module."""
    if type(module) is not nn.Sequential:
        return None
    pairs: list[SymmetricPair] = []
    refused: list[Refused] = []
    before: nn.Linear | None = None
    for child, layer in module.named_children():
        if isinstance(layer, _NOTHING):
            continue
        if before is None or type(layer) is not nn.Linear:
            before = layer if type(layer) is nn.Linear else None
            continue
        label = f"{name} {child} {KIND}".strip()
        if layer.in_features > min(before.in_features, layer.out_features):
            reason = "the middle is wider than an end, so the factors have no full column rank: no manifold"
            refused.append(Refused(label, KIND, reason))
            before = layer
            continue
        pairs.append(_pair(label, before, layer, names))
        before = None
    return Found(tuple(pairs), (), tuple(refused)) if pairs or refused else None


def _pair(label: str, first: nn.Linear, second: nn.Linear, names: Mapping[int, str]) -> SymmetricPair:
    rows = [Part.of(names[id(first.weight)], first.weight, "h rows -> 1 rows h", {})]
    if first.bias is not None:
        rows.append(Part.of(names[id(first.bias)], first.bias, "h -> 1 1 h", {}))
    out = Part.of(names[id(second.weight)], second.weight, "rows h -> 1 rows h", {})
    return SymmetricPair(label, KIND, Factor(tuple(rows)), Factor((out,)))
