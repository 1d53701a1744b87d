"""From a layout (data) and an attention module to its symmetric pairs, its bias translations, and what is refused.

Per head, the scores (W_Q x + b_Q)' (W_K y + b_K) see query and key through G H^T only, G = [W_Q'; b_Q'],
H = [W_K'; b_K'], and the output sum_j W_O[:, j] (W_V y + b_V)_j sees value and output so, G = [W_V'; b_V'], H = W_O.
The g query heads that share a key head share its group element: their rows are stacked. What else meets queries before
the product (a token that add_bias_kv appends, projected positions) is more rows of the same factor. A rotation between
projection and product leaves its commutant (rotary.py), anything else leaves nothing and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from quotient_manifolds.symmetries.biases import Translation, key_bias, value_output_bias
from quotient_manifolds.symmetries.found import Found
from quotient_manifolds.symmetries.fused import TORCH_LAYOUTS
from quotient_manifolds.symmetries.layout import HARMLESS, Layout, Place, Unrecognised, attribute, truth
from quotient_manifolds.symmetries.pair import QK_NORM, Factor, Part, Refused, SymmetricPair, check_weights
from quotient_manifolds.symmetries.rotary import rotated_pairs

__all__ = ["TORCH_LAYOUTS", "Layout", "Place", "Unrecognised", "pairs_of"]

QK_NORMS = frozenset(
    f"{side}{middle}{norm}"
    for side in ("q", "k", "qk", "query", "key", "query_key")
    for middle in ("_", "")
    for norm in ("norm", "layernorm", "layer_norm", "ln")
)
V_NORMS = frozenset({"v_norm", "value_norm", "v_layernorm", "value_layernorm"})
O_NORMS = frozenset({"o_norm", "attn_sub_norm", "inner_attn_ln", "sub_norm", "groupnorm", "attention_norm"})


def pairs_of(layout: Layout, module: nn.Module, name: str, names: Mapping[int, str]) -> Found:
    """The pairs of `module`, its translations and refusals; raises Unrecognised with the reason.

    name: the module's name in its model. names: from a parameter's id to its (first) name in the model.
    """
    reader = _Reader(layout, module, names)
    reader.check()
    prefix = f"{name} " if name else ""
    refused = tuple(Refused(f"{prefix}{kind}", kind, reason) for kind, reason in _obstacles(layout, module).items())
    kept = {"query/key", "value/output"} - {refusal.kind for refusal in refused}
    pairs: list[SymmetricPair] = []
    translations: list[Translation] = []
    if "query/key" in kept and layout.query:
        pair = reader.pair(f"{prefix}query/key", "query/key", layout.query, layout.key)
        pairs += rotated_pairs(layout, module, pair, reader.stored)
        still = pairs[-1]  # whose coordinates do not rotate
        if still.acts == "GL(h)" and layout.key_bias and reader.bias_of(still.H) and not layout.keeps_sinks(module):
            translations.append(key_bias(still, still.H.parts[1]))
    if "value/output" in kept and layout.value:
        pair = reader.pair(f"{prefix}value/output", "value/output", layout.value, layout.output)
        pairs.append(pair)
        output = reader.output_bias()
        if output and reader.bias_of(pair.G) and len(pair.H.parts) == 1 and not layout.keeps_sinks(module):
            translations.append(value_output_bias(pair, pair.G.parts[1], output))
    return Found(tuple(pairs), tuple(translations), refused)


class _Reader:
    """Reads a module by a layout: sizes from its attributes, factors from its parameters."""

    def __init__(self, layout: Layout, module: nn.Module, names: Mapping[int, str]) -> None:
        self._layout, self._module, self._names = layout, module, names
        self._own = dict(module.named_parameters(remove_duplicate=False))
        self.stored = {names[id(value)]: value for value in self._own.values()}

    def check(self) -> None:
        """The module is what the layout says and nothing more."""
        check_weights(self.stored, self.stored)
        layout = self._layout
        known = {place.path for place in layout.places}
        beside = layout.beside or ("\0",)
        norms = tuple(f"{norm}." for norm in QK_NORMS | V_NORMS | O_NORMS)
        explained = (*beside, *norms, *(f"{obstacle.path}." for obstacle in layout.obstacles))
        strangers = [path for path in self._own if path not in known and not path.startswith(explained)]
        if strangers:
            raise Unrecognised(f"it has a parameter {strangers[0]!r} that the known layout does not explain")
        for place in layout.places:
            owner = place.path.rpartition(".")[0]
            found = type(self._module.get_submodule(owner)).__name__ if place.path in self._own else ""
            if owner and found and found not in layout.linears:
                raise Unrecognised(f"{owner!r} is a {found}, expected {layout.linears[0]}")

    def pair(self, name: str, kind: str, first: tuple[Place, ...], second: tuple[Place, ...]) -> SymmetricPair:
        pair = SymmetricPair(name, kind, self._factor(first), self._factor(second))
        shapes = [part.shape[::2] for part in pair.parts]
        if len(set(shapes)) > 1:
            (heads, wide), (others, narrow) = pair.G.parts[0].shape[::2], pair.H.parts[0].shape[::2]
            one, other = kind.split("/")
            raise Unrecognised(f"{one} has {heads} heads of width {wide}, {other} {others} of width {narrow}")
        return pair

    def bias_of(self, factor: Factor) -> bool:
        """Whether the factor is a weight with a bias below it, and nothing else."""
        return len(factor.parts) == 2 and factor.parts[1].name.endswith("bias") and factor.parts[1].rows == 1

    def output_bias(self) -> Part | None:
        """The bias of the output projection as (1, d, 1), if there is one."""
        path = self._layout.output[0].path.removesuffix("weight") + "bias"
        stored = self._own.get(path)
        return None if stored is None else Part.of(self._names[id(stored)], stored, "rows -> 1 rows 1", {})

    def _factor(self, places: tuple[Place, ...]) -> Factor:
        sizes = self._layout.read_sizes(self._module)
        parts = []
        for place in places:
            if place.path in self._own:
                stored = self._own[place.path]
                try:
                    parts.append(Part.of(self._names[id(stored)], stored, place.pattern, sizes, place.span(sizes)))
                except ValueError as misfit:
                    raise Unrecognised(str(misfit).rstrip(".")) from None
        return Factor(tuple(parts))


def _obstacles(layout: Layout, module: nn.Module) -> dict[str, str]:
    """From a kind of pair to what stands between its two projections; submodules nobody knows raise Unrecognised."""
    reasons: dict[str, str] = {}
    owners = {place.path.partition(".")[0] for place in layout.places} | {
        each.partition(".")[0] for each in layout.beside
    }
    for child, part in module.named_children():
        if type(part).__name__ == "Identity" or child in owners or child in layout.ignores:
            continue
        if child in QK_NORMS:
            reasons.setdefault("query/key", QK_NORM)
        elif child in V_NORMS:
            reasons.setdefault("value/output", f"values are normalised ({child}) between projection and product")
        elif child in O_NORMS:
            reasons.setdefault(
                "value/output", f"the heads' outputs are normalised ({child}) before the output projection"
            )
        elif not (type(part).__name__ in HARMLESS or any(obstacle.path == child for obstacle in layout.obstacles)):
            raise Unrecognised(f"it has a submodule {child!r} ({type(part).__name__}) that the known layout lacks")
    for obstacle in layout.obstacles:
        if truth(attribute(module, obstacle.path, None)):
            reasons[obstacle.kind] = obstacle.reason
    return reasons
