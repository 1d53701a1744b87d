"""Derive the symmetric pairs of an attention module, its bias translations, and what is refused, from its layout.

Per head, the scores (W_Q x + b_Q)' (W_K y + b_K) see query and key through G H^T only, G = [W_Q'; b_Q'],
H = [W_K'; b_K'], and the output sum_j W_O[:, j] (W_V y + b_V)_j sees value and output so, G = [W_V'; b_V'], H = W_O.
The g query heads that share a key head share its group element: their rows are stacked. What else meets queries before
the product (a token that add_bias_kv appends, projected positions) is more rows of the same factor. A rotation between
projection and product leaves its commutant (rotary.py), anything else leaves nothing and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from quotient_manifolds.symmetries.checks import check_weights
from quotient_manifolds.symmetries.layout import HARMLESS, Layout, Place, Unrecognised, attribute, truth
from quotient_manifolds.symmetries.pair import Factor, ParameterView, SymmetricPair
from quotient_manifolds.symmetries.rotary import rotated_pairs
from quotient_manifolds.symmetries.symmetries import Match, Refused
from quotient_manifolds.symmetries.translations import translations_of

QK_NORMS = frozenset(
    f"{side}{middle}{norm}"
    for side in ("q", "k", "qk", "query", "key", "query_key")
    for middle in ("_", "")
    for norm in ("norm", "layernorm", "layer_norm", "ln")
)
QK_NORM = (
    "queries and keys are normalised between projection and product, which leaves no GL(h) and no rotary commutant; "
    "only a positive factor on each head's projection survives, up to the norm's eps"
)
"""The reason why normalised queries and keys are no pair."""

V_NORMS = frozenset({"v_norm", "value_norm", "v_layernorm", "value_layernorm"})
O_NORMS = frozenset({"o_norm", "attn_sub_norm", "inner_attn_ln", "sub_norm", "groupnorm", "attention_norm"})


def found_in(layout: Layout, module: nn.Module, name: str, names: Mapping[int, str]) -> Match:
    """Return the pairs of `module`, its translations and refusals; raises Unrecognised with the reason.

    name: the module's name in its model. names: from a parameter's id to its (first) name in the model.
    """
    reader = _Reader(layout, module, names)
    reader.check()
    prefix = f"{name} " if name else ""
    refused = tuple(Refused(f"{prefix}{kind}", kind, reason) for kind, reason in _obstacles(layout, module).items())
    kept = {"query/key", "value/output"} - {refusal.kind for refusal in refused}
    pairs: list[SymmetricPair] = []
    if "query/key" in kept:
        pair = reader.pair(f"{prefix}query/key", "query/key", layout.query, layout.key)
        if layout.rotating[0]:
            rotating = reader.pair(pair.name, pair.kind, *layout.rotating)
            pairs += (*rotated_pairs(layout, module, rotating, reader.stored), pair)
        else:
            pairs += rotated_pairs(layout, module, pair, reader.stored)
    if "value/output" in kept:
        pairs.append(reader.pair(f"{prefix}value/output", "value/output", layout.value, layout.output))
    shifts = () if layout.keeps_sinks(module) else translations_of(pairs, module, names, layout.output_bias)
    translations = tuple(shift for shift in shifts if layout.key_bias or shift.kind != "key bias")
    return Match(tuple(pairs), translations, refused)


class _Reader:
    """Read a module by a layout: sizes from its attributes, factors from its parameters."""

    def __init__(self, layout: Layout, module: nn.Module, names: Mapping[int, str]) -> None:
        self._layout, self._module, self._names = layout, module, names
        self._own = dict(module.named_parameters(remove_duplicate=False))
        self.stored = {names[id(value)]: value for value in self._own.values()}

    def check(self) -> None:
        """Raise Unrecognised unless the module is what the layout says and nothing more."""
        check_weights(self.stored, self.stored)
        layout = self._layout
        known = {place.path for place in layout.places}
        norms = tuple(f"{norm}." for norm in QK_NORMS | V_NORMS | O_NORMS)
        explained = (*layout.beside, *norms, *(f"{obstacle.path}." for obstacle in layout.obstacles))
        strangers = [path for path in self._own if path not in known and not path.startswith(explained)]
        if strangers:
            raise Unrecognised(f"it has a parameter {strangers[0]!r} that the known layout does not explain")
        for place in layout.places:
            owner, _, leaf = place.path.rpartition(".")
            projects = place.path in self._own and leaf in ("weight", "bias")
            found = type(self._module.get_submodule(owner)).__name__ if projects else ""
            if owner and found and found not in layout.linears:
                raise Unrecognised(f"{owner!r} is a {found}, expected {layout.linears[0]}")

    def pair(self, name: str, kind: str, first: tuple[Place, ...], second: tuple[Place, ...]) -> SymmetricPair:
        pair = SymmetricPair(name, kind, self._factor(first), self._factor(second))
        shapes = [view.shape[::2] for view in pair.views]
        if len(set(shapes)) > 1:
            (heads, wide), (others, narrow) = pair.G.views[0].shape[::2], pair.H.views[0].shape[::2]
            one, other = kind.split("/")
            raise Unrecognised(f"{one} has {heads} heads of width {wide}, {other} {others} of width {narrow}")
        return pair

    def _factor(self, places: tuple[Place, ...]) -> Factor:
        sizes = self._layout.read_sizes(self._module)
        views = []
        for place in places:
            if place.path in self._own:
                stored = self._own[place.path]
                try:
                    views.append(
                        ParameterView.of(self._names[id(stored)], stored, place.pattern, sizes, place.span(sizes))
                    )
                except ValueError as misfit:
                    raise Unrecognised(str(misfit).rstrip(".")) from None
        return Factor(tuple(views))


def _obstacles(layout: Layout, module: nn.Module) -> dict[str, str]:
    """Return what stands between the projections of each kind of pair; unknown submodules raise Unrecognised."""
    reasons: dict[str, str] = {}
    owners = {path.partition(".")[0] for path in (*(place.path for place in layout.places), *layout.beside)}
    obstructing = {obstacle.path for obstacle in layout.obstacles}
    for child, part in module.named_children():
        kind = type(part).__name__
        if kind == "Identity" or child in owners or child in layout.ignores:
            continue
        if child in QK_NORMS:
            reasons.setdefault("query/key", QK_NORM)
        elif child in V_NORMS:
            reasons.setdefault("value/output", f"values are normalised ({child}) between projection and product")
        elif child in O_NORMS:
            reason = f"the heads' outputs are normalised ({child}) before the output projection"
            reasons.setdefault("value/output", reason)
        elif kind not in HARMLESS and child not in obstructing:
            raise Unrecognised(f"it has a submodule {child!r} ({kind}) that the known layout lacks")
    for obstacle in layout.obstacles:
        if truth(attribute(module, obstacle.path, None)):
            reasons[obstacle.kind] = obstacle.reason
    return reasons
