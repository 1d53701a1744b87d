"""Name symmetries by what is done to the channels on which they act: queries and keys, values, neurons, norms."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from quotient_manifolds.symmetries.pair import ADAPTER, BOTTLENECK, GATED, QUERY_KEY, RELU, VALUE_OUTPUT
from quotient_manifolds.symmetries.wires.blocks import Block
from quotient_manifolds.symmetries.wires.channels import Bundle, Part
from quotient_manifolds.symmetries.wires.linear_algebra import Array
from quotient_manifolds.symmetries.wires.nodes import FIXED, ZERO
from quotient_manifolds.symmetries.wires.uses import Linear, Vector
from quotient_manifolds.symmetries.wires.walk import Walk

UNREAD, UNREACHED = "unread output direction", "unreached input direction"
SHIFTED = {"bias": "redundant bias", "weight": "constant input direction"}
_MIXED = {
    "orthogonal": "rotation",
    "centred": "rotation",
    "mean": "mean",
    "linear": "change of basis",
    "complex": "phase",
}

MEANINGS = {
    QUERY_KEY: "invertible matrices on the queries of heads, their inverses on the keys",
    VALUE_OUTPUT: "invertible matrices on the values of heads, their inverses on the outputs",
    ADAPTER: "invertible matrices on one factor of an update, their inverses on the other",
    BOTTLENECK: "invertible matrices on the outputs of a linear layer, their inverses on the next",
    RELU: "positive factors of single neurons, undone in the next layer",
    GATED: "factors of single neurons beside their gates, undone in the next layer",
    "gain": "factors of gains, undone in weights",
    "scale": "factors of channels, undone in the layers that use them",
    "rotation": "rotations of channels, undone in the layers that use them",
    "change of basis": "invertible matrices on channels, undone in the layers that use them",
    "phase": "rotations of pairs of channels, undone in the layers that use them",
    "mean": "anything added to the mean of channels, which has no effect",
    UNREAD: "outputs in directions that no layer uses",
    UNREACHED: "weights of directions in which inputs are 0",
    SHIFTED["weight"]: "weights of directions in which all inputs are equal",
    SHIFTED["bias"]: "constants that one parameter adds and others subtract",
}


def meaning(family: str) -> str:
    """Return in a few words what may change; of a family by its last word, such as "residual rotation". "" if unknown.

    >>> meaning("residual rotation")
    'rotations of channels, undone in the layers that use them'
    """
    return next((words for name, words in MEANINGS.items() if f" {family}".endswith(f" {name}")), "")


class Roles:
    """Tell of channels what they are for: query/key, value/output, residual or hidden."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.left, self.right = np.zeros(walk.count, bool), np.zeros(walk.count, bool)
        for flow in walk.flows:
            if flow.kind == "dot":
                self.left[flow.terms[0]], self.right[flow.terms[1]] = True, True
        self.sums = _summed(walk)
        root = walk.turns.find(np.arange(walk.count))[0]
        roles = (
            (QUERY_KEY, self.left | self.right),
            (VALUE_OUTPUT, walk.about("mixed")[: walk.count]),
            ("residual", _added(walk)),
        )
        self._roles = [(name, np.isin(root, np.setdiff1d(root[there], [ZERO, FIXED]))) for name, there in roles]

    def mixing(self, block: Block) -> str:
        """Return how a group is called that mixes the channels of a block, such as "residual rotation"."""
        nodes = np.flatnonzero(np.isin(block.classes.find(np.arange(self.walk.count))[0], block.roots))
        return f"{self._of(nodes)} {_MIXED[block.kind]}"

    def scaling(self, nodes: Array, gains: Sequence[Vector], weights: bool) -> str:
        """Return how scales of channels are called: by the gains among them, if there are any."""
        if gains:
            scaled = np.concatenate([each.ins.reshape(-1) for each in gains])
            normed = self.walk.about("normed")[scaled] | self.walk.about("gated")[scaled]
            kind = "norm gain" if normed.any() else "channel gain"
            return kind if weights else f"{self._of(np.concatenate([each.outs[0] for each in gains]))} {kind}"
        for name, what in ((RELU, "positive"), (GATED, "gated")):
            if self._of(nodes) != QUERY_KEY and self.walk.about(what)[nodes].any():
                return name
        return f"{self._of(nodes)} scale"

    def _of(self, nodes: Array) -> str:
        return next((name for name, there in self._roles if there[nodes].any()), "hidden")


class Labels:
    """Tell of bundles of channels which kind of pair they are, which side comes first, and how it is called."""

    def __init__(self, walk: Walk, parts: list[Part], bundles: Sequence[Bundle]) -> None:
        self.walk, self.parts, self.roles = walk, parts, Roles(walk)
        self._number = {id(bundle): number for number, bundle in enumerate(bundles)}
        self._start = np.cumsum([0, *(len(each.nodes) for each in bundles)])[:-1]
        self._nodes = np.concatenate([np.zeros(0, np.int64), *(each.nodes for each in bundles)])
        self._known: dict[str, list[bool]] = {}
        self._attention = self._modules_that_mix(bundles)

    def about(self, bundle: Bundle) -> object:
        """Return what heads of one pair have in common."""
        where = tuple((self.parts[key[0]].family, key[1], bundle.places[key].shape[1]) for key in self.places(bundle))
        return bundle.acts, bundle.size, self.kind(bundle), self.turned(bundle), self.positive(bundle), where

    def places(self, bundle: Bundle) -> list[tuple[int, bool]]:
        """Return the parts of a bundle with their sides, the first side first, and weights before biases."""
        turned = self.turned(bundle)

        def rank(key: tuple[int, bool]) -> tuple[bool, int, int, int]:
            part = self.parts[key[0]]
            return key[1] ^ turned, -part.length, part.family, key[0]

        return sorted(bundle.places, key=rank)

    def positive(self, bundle: Bundle) -> bool:
        return self._has(bundle, "positive")

    def turned(self, bundle: Bundle) -> bool:
        """Return whether queries, or what writes, are on the side of the inverse."""
        return self._has(bundle, "left") and bool(bundle.sign[self.roles.left[bundle.nodes].argmax()] < 0)

    def kind(self, bundle: Bundle) -> str:
        if self._has(bundle, "left"):
            return QUERY_KEY
        if self.positive(bundle):
            return RELU
        if bundle.acts == "scale" and self._has(bundle, "gated"):
            return GATED
        if self._has(bundle, "mixed"):
            return VALUE_OUTPUT
        return ADAPTER if self._is_adapter(bundle) else BOTTLENECK

    def name(self, bundle: Bundle, kind: str) -> str:
        """Return the path of the module that has the parameters, and the kind.

        Queries and keys are named by the module that has values and their output, too.
        """
        path = common_path([self.parts[number].name for number, _ in bundle.places])
        if kind == QUERY_KEY:
            alone = len(self._attention) == 1
            around = [each for each in self._attention if (f"{path}.".startswith(f"{each}.") if each else alone)]
            path = max(around, key=len) if around else path
        return f"{path} {kind}".strip()

    def _modules_that_mix(self, bundles: Sequence[Bundle]) -> list[str]:
        """Return the modules that have values and their output: attention, as a rule, of which no group may be left."""
        mixing = [each for each in bundles if self._has(each, "mixed") and self.kind(each) in (VALUE_OUTPUT, GATED)]
        found = {self.about(each): self.name(each, "") for each in mixing}
        root = self.walk.turns.find(np.arange(self.walk.count))[0]
        mixed = np.zeros(self.walk.count, bool)
        mixed[root[self.walk.about("mixed")[: self.walk.count]]] = True
        mixed[root[self._nodes]] = False
        where: dict[int, dict[int, bool]] = {}
        for number, part in enumerate(self.parts):
            for each in np.unique(root[part.nodes][mixed[root[part.nodes]]]).tolist():
                where.setdefault(each, {})[number] = part.reads
        rest = {
            tuple(each): common_path([self.parts[n].name for n in each])
            for each in where.values()
            if len(set(each.values())) == 2
        }
        return [*found.values(), *rest.values()]

    def _has(self, bundle: Bundle, what: str) -> bool:
        if what not in self._known:
            here = (self.roles.left if what == "left" else self.walk.about(what))[self._nodes]
            self._known[what] = np.logical_or.reduceat(here, self._start).tolist()
        return self._known[what][self._number[id(bundle)]]

    def _is_adapter(self, bundle: Bundle) -> bool:
        """Return whether what a bottleneck answers is added to what another linear map makes of the same inputs."""
        sources = [(self.parts[number].source, self.parts[number].reads) for number, _ in bundle.places]
        readers = {id(each) for each, reads in sources if reads}
        writers = [each for each, reads in sources if not reads]
        if all(isinstance(each, Vector) and len(each.outs) > 1 for each in writers):
            return True  # a product of two parameters
        inputs = {about for each in writers if isinstance(each, Linear) for about in _inputs(each)}
        others = (other for one, other in self.roles.sums if id(one) in readers)
        return any(not inputs.isdisjoint(_inputs(each)) for each in others)


def _inputs(linear: Linear) -> set[tuple[bool, int]]:
    """Return what a linear map reads: of a table how many words it has."""
    return {(True, linear.shape[2])} if linear.table else {(False, n) for n in np.unique(linear.ins).tolist()}


def _added(walk: Walk) -> Array:
    """Say of channels whether they are sums of two activations, such as of a stream and of what a block adds."""
    activation, found = np.ones(walk.count, bool), np.zeros(walk.count, bool)
    activation[: FIXED + 1] = False
    for each in walk.vectors:
        activation[each.outs] &= each.gain
    for flow in walk.flows:
        if flow.kind in ("sum", "offset", "token"):
            found[flow.outs[activation[flow.terms[0]].sum(1) > 1]] = True
    return found


def _summed(walk: Walk) -> list[tuple[Linear, Linear]]:
    """Return which linear maps have answers that are added, directly or with others."""
    origin: dict[int, frozenset[int]] = {}
    for number, linear in enumerate(walk.linears):
        origin.update((n, frozenset([number])) for n in linear.outs[:, 0].tolist())
    known = np.zeros(walk.count, bool)
    known[list(origin)] = True
    found = dict[tuple[int, int], None]()
    for flow in walk.flows:
        if flow.kind != "sum":
            continue
        some = known[flow.terms[0]].any(1)
        known[flow.outs[some]] = True
        for out, names in zip(flow.outs[some].tolist(), flow.terms[0][some].tolist(), strict=True):
            parts = [origin[n] for n in names if n in origin]
            origin[out] = frozenset().union(*parts)
            found.update(
                ((a, b), None) for one in parts for other in parts if one is not other for a in one for b in other
            )
    return [(walk.linears[a], walk.linears[b]) for a, b in found]


def common_path(names: Sequence[str]) -> str:
    """Return the path of the innermost module that has all the parameters."""
    parts = [name.split(".")[:-1] for name in names]
    return ".".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False)))
