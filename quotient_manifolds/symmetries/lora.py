"""Find the symmetry of peft's low-rank adapters: a layer sees B A only, so GL(r) acts by (B Z^-1, Z A).

The scale in front (alpha / r, or alpha / sqrt(r) for rsLoRA) does not matter unless it is 0. DoRA divides by the norm
of the columns of W + B A, which sees the product only as well: the symmetry stays. An adapter that the forward pass
does not read is refused, with the reason: peft skips all adapters of a layer that are switched off, and all of them
as soon as one is merged. peft is never imported.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from quotient_manifolds.symmetries.checks import check_weights
from quotient_manifolds.symmetries.pair import Factor, ParameterView, SymmetricPair
from quotient_manifolds.symmetries.symmetries import Match, Refused

ADAPTER = "lora B/A"
"""The kind of the pairs of adapters."""


def lora(module: nn.Module, name: str, names: Mapping[int, str]) -> Match | None:
    """Return the pairs of a peft layer with adapters, one for each that acts; None for any other module."""
    tuners = [cls for cls in type(module).__mro__ if cls.__module__.startswith("peft.tuners.")]
    layers = {"LoraLayer", "BaseTunerLayer"}.intersection(cls.__name__ for cls in tuners)
    if not layers or next(module.parameters(), None) is None:
        return None
    if tuners[0].__module__.startswith("peft.tuners.lora."):  # AdaLoRA's layers are LoraLayers too
        found = [_adapter(module, name, adapter, names) for adapter in _adapters(module)]
    else:
        kind = tuners[0].__module__.split(".")[2]
        reason = f"adapters of this kind ({kind}) are not known: only those of LoRA are"
        found = [Refused(f"{name} {type(module).__name__}", ADAPTER, reason)]
    return Match.of(found)


def _adapters(module: nn.Module) -> tuple[str, ...]:
    holders = (getattr(module, holder, None) for holder in ("lora_A", "lora_embedding_A"))
    return tuple(key for holder in holders if isinstance(holder, (nn.ModuleDict, nn.ParameterDict)) for key in holder)


def _adapter(module: nn.Module, name: str, adapter: str, names: Mapping[int, str]) -> SymmetricPair | Refused:
    label = f"{name} {ADAPTER}" if adapter == "default" else f"{name} {adapter} {ADAPTER}"
    B, A = (_weight(module, side, adapter) for side in ("B", "A"))
    reason = _unread(module, adapter) or _no_product(module, adapter, B, A)
    if reason:
        return Refused(label, ADAPTER, reason)
    check_weights({names[id(value)]: value for value in (B, A)}, (names[id(B)], names[id(A)]))
    kernel = [f"k{axis}" for axis in range(A.ndim - 2)]
    # Linear: A (r, in), B (out, r). Convolution: A (r, in, *kernel), B (out, r, 1, ...). Experts: A (experts r, in),
    # B (out, r experts), for adapters of parameters that hold one matrix for each of several experts.
    sizes = {"heads": getattr(module, "num_experts", 1), **dict(zip(kernel, A.shape[2:], strict=True))}
    axes = " ".join(kernel)
    G = ParameterView.of(names[id(B)], B, f"rows (h heads) {' '.join('1' * len(kernel))} -> heads rows h", sizes)
    H = ParameterView.of(names[id(A)], A, f"(heads h) rows {axes} -> heads (rows {axes}) h", sizes)
    return SymmetricPair(label, ADAPTER, Factor((G,)), Factor((H,)))


def _unread(module: nn.Module, adapter: str) -> str:
    """Say why the forward pass does not read the adapter; "" if it does."""
    merged = list(getattr(module, "merged_adapters", ()))
    if getattr(module, "disable_adapters", False):
        return "adapters are switched off, so the model does not read B and A: call enable_adapter_layers()"
    if adapter in merged:
        return "the adapter is merged into the weight, so the model does not read B and A: call unmerge_adapter()"
    if merged:
        return f"the adapter {merged[0]!r} is merged into the weight, and peft then reads no adapter of this layer"
    if adapter not in getattr(module, "active_adapters", (adapter,)):
        return "the adapter is not active, so the model does not read B and A: call set_adapter() with its name"
    if getattr(module, "scaling", {}).get(adapter, 1) == 0:
        return "the adapter's scale is 0, so the model does not see B and A"
    return ""


def _no_product(module: nn.Module, adapter: str, B: Tensor, A: Tensor) -> str:
    """Say why the layer sees more of B and A than their product; "" if it does not."""
    variants = getattr(module, "lora_variant", {})
    variant = type(variants[adapter]).__name__ if adapter in variants else ""
    if variant and not variant.startswith("Dora"):
        return f"{variant} is more than the product B A"
    if B.ndim != A.ndim or B.ndim < 2 or B.shape[1] != A.shape[0] or B.shape[2:].numel() > 1:
        return f"B {tuple(B.shape)} and A {tuple(A.shape)} are no factors of a matrix"
    return ""


def _weight(module: nn.Module, side: str, adapter: str) -> Tensor:
    """Return the weight of one side of an adapter: a layer's, or an embedding's own parameter."""
    layers = getattr(module, f"lora_{side}", {})
    return layers[adapter].weight if adapter in layers else getattr(module, f"lora_embedding_{side}")[adapter]
