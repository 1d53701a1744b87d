"""Low-rank adapters of peft: a layer sees B and A through B A only, so GL(r) acts by (B Z^-1, Z A).

The scale in front (alpha / r, or alpha / sqrt(r) for rsLoRA) does not matter. DoRA divides by the norm of the columns
of W + B A, which sees the product only as well: the symmetry stays. peft is never imported.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from quotient_manifolds.symmetries.found import Found
from quotient_manifolds.symmetries.pair import Factor, Part, Refused, SymmetricPair

KIND = "lora B/A"
# A (r, in) and B (out, r) of a linear layer; of a convolution with a kernel; of an embedding, whose A is (r, words).
_OUT = {2: "rows h -> 1 rows h", 4: "rows h 1 1 -> 1 rows h"}
_IN = {2: "h rows -> 1 rows h", 4: "h rows height width -> 1 (rows height width) h"}


def lora(module: nn.Module, name: str, names: Mapping[int, str]) -> Found | None:
    """The pairs of a peft layer with adapters, one for each adapter; None for any other module."""
    if not type(module).__module__.startswith("peft.tuners.lora"):
        return None
    found = [_adapter(module, name, adapter, names) for adapter in _adapters(module)]
    pairs = tuple(each for each in found if isinstance(each, SymmetricPair))
    return Found(pairs, (), tuple(each for each in found if isinstance(each, Refused))) if found else None


def _adapters(module: nn.Module) -> tuple[str, ...]:
    holders = (getattr(module, holder, None) for holder in ("lora_A", "lora_embedding_A"))
    return tuple(key for holder in holders if isinstance(holder, (nn.ModuleDict, nn.ParameterDict)) for key in holder)


def _adapter(module: nn.Module, name: str, adapter: str, names: Mapping[int, str]) -> SymmetricPair | Refused:
    label = f"{name} {KIND}" if adapter == "default" else f"{name} {adapter} {KIND}"
    variants = getattr(module, "lora_variant", {})
    variant = type(variants[adapter]).__name__ if adapter in variants else ""
    reason = ""
    if adapter in getattr(module, "merged_adapters", ()):
        reason = "the adapter is merged into the weight, so the model does not read B and A"
    elif adapter not in getattr(module, "active_adapters", (adapter,)):
        reason = "the adapter is not active, so the model does not read B and A"
    elif variant and not variant.startswith("Dora"):
        reason = f"{variant} is more than the product B A"
    B, A = (_weight(module, side, adapter) for side in ("B", "A"))
    if not reason and not (B.ndim in _OUT and A.ndim in _IN and B.shape[2:].numel() == 1):
        reason = f"B {tuple(B.shape)} and A {tuple(A.shape)} are no factors of a matrix"
    if reason:
        return Refused(label, KIND, reason)
    kernel = dict(zip(("height", "width"), A.shape[2:], strict=False))
    G, H = Part.of(names[id(B)], B, _OUT[B.ndim], {}), Part.of(names[id(A)], A, _IN[A.ndim], kernel)
    return SymmetricPair(label, KIND, Factor((G,)), Factor((H,)))


def _weight(module: nn.Module, side: str, adapter: str) -> Tensor:
    """The weight of one side of an adapter: a layer's, or an embedding's own parameter."""
    layers = getattr(module, f"lora_{side}", {})
    return layers[adapter].weight if adapter in layers else getattr(module, f"lora_embedding_{side}")[adapter]
