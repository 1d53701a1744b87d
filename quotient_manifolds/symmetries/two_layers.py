"""Find the pairs of two layers in a row: bottlenecks (no activation between) and neurons (an activation between).

x -> W_2 (W_1 x + b_1) + b_2: the model sees W_2 [W_1 b_1] only, so GL(r) acts between them.
W_2 relu(W_1 x + b_1): a positive factor passes a ReLU, so GL+(1) acts between a neuron's row of [W_1 b_1] and its
column of W_2. W_2 (act(gate(x)) * (W_1 x + b_1)): whatever the activation, the ungated branch is linear, so GL(1) acts.
Any other activation lets no factor pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn import functional

from quotient_manifolds.symmetries.layout import attribute
from quotient_manifolds.symmetries.pair import Factor, ParameterView, Span, SymmetricPair
from quotient_manifolds.symmetries.symmetries import Match, Refused

BOTTLENECK, RELU, GATED = "bottleneck in/out", "relu neuron", "gated neuron"


def bottleneck(module: nn.Module, name: str, names: Mapping[int, str]) -> Match | None:
    """Return the pairs of neighbouring Linears of an nn.Sequential, each Linear in one; None for any other module."""
    if type(module) is not nn.Sequential:
        return None
    found: list[SymmetricPair | Refused] = []
    before: nn.Linear | None = None
    for child, layer in module.named_children():
        if isinstance(layer, (nn.Identity, nn.Dropout)):
            continue
        if before is None or type(layer) is not nn.Linear:
            before = layer if type(layer) is nn.Linear else None
            continue
        label = f"{name} {child} {BOTTLENECK}".strip()
        if layer.in_features > min(before.in_features, layer.out_features):
            reason = "the middle is wider than an end, so the factors have no full column rank: no manifold"
            found.append(Refused(label, BOTTLENECK, reason))
            before = layer
            continue
        G = [ParameterView.of(names[id(before.weight)], before.weight, "h rows -> 1 rows h", {})]
        if before.bias is not None:
            G.append(ParameterView.of(names[id(before.bias)], before.bias, "h -> 1 1 h", {}))
        H = ParameterView.of(names[id(layer.weight)], layer.weight, "rows h -> 1 rows h", {})
        found.append(SymmetricPair(label, BOTTLENECK, Factor(tuple(G)), Factor((H,))))
        before = None
    return Match.of(found)


@dataclass(frozen=True)
class Neurons:
    """Say where a module keeps its two layers, `up` and `down`, the gate if there is one, and the activation.

    half: up is the second half of the gate's own layer.
    """

    up: str
    down: str
    act: str
    gate: str = ""
    half: bool = False


NEURONS: tuple[Neurons, ...] = (
    Neurons("up_proj", "down_proj", "act_fn", gate="gate_proj"),  # Llama and its descendants
    Neurons("gate_up_proj", "down_proj", "activation_fn", gate="gate_up_proj", half=True),  # Phi-3, GLM
    Neurons("Wi", "Wo", "act", gate="Wi", half=True),  # ModernBERT
    Neurons("wi_1", "wo", "act", gate="wi_0"),  # T5 v1.1
    Neurons("wi", "wo", "act"),  # T5
    Neurons("fc1", "fc2", "activation_fn"),  # BART, CLIP, OPT
    Neurons("up_proj", "down_proj", "act_fn"),
    Neurons("c_fc", "c_proj", "act"),  # GPT-2
    Neurons("dense_h_to_4h", "dense_4h_to_h", "act"),  # GPT-NeoX, Falcon
    Neurons("intermediate.dense", "output.dense", "intermediate.intermediate_act_fn"),  # BERT
)


def neurons(module: nn.Module, name: str, names: Mapping[int, str]) -> Match | None:
    """Return the neurons of two-layer networks: of transformers by attribute names, of nn.Sequential by order."""
    if type(module) is nn.Sequential:
        return _in_sequence(module, name, names)
    for row in NEURONS:
        up, down, gate = (attribute(module, path, None) for path in (row.up, row.down, row.gate or row.up))
        act = attribute(module, row.act, None)
        if act is not None and all(map(_is_layer, (up, down, gate))):
            kind = GATED if row.gate else RELU
            return Match.of([_neurons(f"{name} {kind}".strip(), kind, up, down, act, row.half, names)])
    return None


def _is_layer(layer: object) -> bool:
    """Return whether it is a plain Linear or Conv1D: subclasses (quantised, with adapters) might compute anything."""
    return type(layer) is nn.Linear or type(layer).__name__ in ("Conv1D", "FalconLinear")


def _in_sequence(module: nn.Sequential, name: str, names: Mapping[int, str]) -> Match | None:
    layers = [(child, layer) for child, layer in module.named_children() if not isinstance(layer, nn.Dropout)]
    found: list[SymmetricPair | Refused] = []
    taken = ""
    for (before, up), (_, act), (child, down) in zip(layers, layers[1:], layers[2:], strict=False):
        simple = type(up) is nn.Linear and type(down) is nn.Linear and next(act.parameters(), None) is None
        if simple and not isinstance(act, nn.Identity) and before != taken:
            found.append(_neurons(f"{name} {child} {RELU}".strip(), RELU, up, down, act, False, names))
            taken = child  # a layer between two activations belongs to one pair
    return Match.of(found)


def _neurons(
    label: str, kind: str, up: nn.Module, down: nn.Module, act: object, half: bool, names: Mapping[int, str]
) -> SymmetricPair | Refused:
    if kind == RELU and not (isinstance(act, (nn.ReLU, nn.LeakyReLU)) or act is functional.relu):
        called = getattr(act, "__name__", type(act).__name__)
        return Refused(label, kind, f"{called} lets no factor pass: only a ReLU is positively homogeneous")
    conv = type(up).__name__ == "Conv1D"
    axes = {"weight": "rows heads" if conv else "heads rows", "bias": "heads"}
    G = tuple(_part(up, path, axes[path], half, names) for path, _ in up.named_parameters(recurse=False))
    conv = type(down).__name__ == "Conv1D"
    H = _part(down, "weight", "heads rows" if conv else "rows heads", False, names)
    return SymmetricPair(label, kind, Factor(G), Factor((H,)), "GL+(1)" if kind == RELU else "GL(h)")


def _part(layer: nn.Module, path: str, axes: str, half: bool, names: Mapping[int, str]) -> ParameterView:
    """Return a weight or bias as one neuron per batch entry, (neurons, rows, 1); half: of the second half of them."""
    stored = layer.get_parameter(path)
    if not half:
        return ParameterView.of(names[id(stored)], stored, f"{axes} -> heads {'rows' if 'rows' in axes else '1'} 1", {})
    span = Span(axes.replace("heads", "(block out)"), "block", 2, 1, 2)
    opened = axes.replace("heads", "block heads")
    return ParameterView.of(
        names[id(stored)], stored, f"{opened} -> heads (block{' rows' * ('rows' in axes)}) 1", {}, span
    )
