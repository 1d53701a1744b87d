"""Name symmetries by the roles of the parameters that they change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.frame import Frame, Port
from quotient_manifolds.symmetries.groups import FromSum, Gauge, IntoMean, Rows, Span
from quotient_manifolds.symmetries.pair import ADAPTER, BOTTLENECK, GATED, QUERY_KEY, RELU, VALUE_OUTPUT
from quotient_manifolds.symmetries.reparameterization import REDUNDANT

UNREAD, UNREACHED = "unread output direction", "unreached input direction"
CONSTANT, BESIDE = "constant input direction", "redundant weight"
OF_TRANSLATIONS = {"unread": UNREAD, "mean": UNREAD, "unreached": UNREACHED, "constant": CONSTANT}
OF_TRANSLATIONS |= {"beside": BESIDE, "shift": REDUNDANT}
"""The kinds of translations, by `Translation.kind`."""

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
    CONSTANT: "weights of directions in which all inputs are equal",
    REDUNDANT: "constants that one parameter adds and others subtract",
    BESIDE: "weights that one layer adds and a parallel one subtracts",
}

_PEFT = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


def meaning(family: str) -> str:
    """Describe in a few words the action of a family, looked up by the last words of its name; "" if unknown.

    >>> meaning("residual rotation")
    'rotations of channels, undone in the layers that use them'
    """
    return next((words for name, words in MEANINGS.items() if f" {family}".endswith(f" {name}")), "")


def common_path(names: Iterable[str]) -> str:
    """Return the path of the innermost module that contains all the parameters."""
    parts = [name.split(".")[:-1] for name in names]
    return ".".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False)))


class Roles:
    """Look up the roles of parameters by the ports of a frame that contain their entries.

    A port is the rows of entries with which one use of a weight writes or reads channels. A node is a channel of one
    tensor.
    """

    def __init__(self, frame: Frame) -> None:
        self.frame, self.walk = frame, frame.walk
        wires, nodes = frame.nodes.wires, {what: torch.cat(found) for what, found in frame.walk.roles.items()}
        self._nodes = {what: found[found > 0].unique() for what, found in nodes.items()}
        self._classes = {what: self._class(what)[found].unique() for what, found in self._nodes.items()}
        left = torch.cat([self._nodes.get(what, wires[:0]) for what in ("left", "queries")])
        self._left = 2 * wires[left] + frame.nodes.dual[left].long()
        self._rows: dict[str, list[tuple[Tensor, Port]]] = {}
        for port in frame.ports:
            for piece in self._of_one(port):
                start = frame.entries.start[frame.name_of(piece)]
                keys = row_keys(piece.theta.starts - start, piece.theta.steps)
                self._rows.setdefault(frame.name_of(piece), []).append((keys, piece))
        gains = [(gain.entries, gain.before, gain.after) for gain in frame.walk.gains]
        none = torch.zeros(0, dtype=torch.long)
        self._gains = tuple(torch.cat([none, *each]) for each in zip(*gains, strict=True)) if gains else (none,) * 3

    def _of_one(self, port: Port) -> Iterable[Port]:
        """Split a port into parts of one parameter each."""
        table = port.theta
        ends = torch.stack([table.starts + table.steps.min(), table.starts + table.steps.max()])
        owners = self.frame.owners(ends)
        if table.starts.shape[1] == 1 and bool((owners == owners[:1, :1]).all()) and int(ends.min()) >= 0:
            return [port]
        return self.frame.by_parameter(port)

    def port(self, rows: Rows, use: int | None = None, writes: bool | None = None) -> tuple[int, Tensor] | None:
        """Return the number of the first port with these rows, this use and direction, and the nodes of the rows."""
        keys = row_keys(rows.starts, rows.steps)
        for known, port in self._rows.get(rows.name, ()):
            if use not in (None, port.use) or writes not in (None, port.writes):
                continue
            order = torch.argsort(known)
            at = order[torch.searchsorted(known[order], keys).clamp(max=len(known) - 1)]
            if bool((known[at] == keys).all()):
                return self.number(port), port.nodes[at]
        return None

    def number(self, port: Port) -> int:
        """Return the rank of a port in the walk, uses of weights first, then biases; it is even if the port writes."""
        return 2 * port.use + (not port.writes)

    def operation(self, number: int) -> int:
        """Return the number of a port's operation; all groups of a convolution share one, for example."""
        uses = self.walk.uses
        return uses[number // 2].operation if number // 2 < len(uses) else -number

    def gains(self, rows: Rows) -> tuple[Tensor, Tensor] | None:
        """Return the nodes before and after the gains that are stored in these rows; None unless they are gains."""
        entries, before, after = self._gains
        if rows.columns > 1:
            return None
        some = torch.isin(entries, rows.places[:, 0] + self.frame.entries.start[rows.name])
        if bool(some.any()):
            return before[some], after[some]
        port = self.port(rows)
        factors = None if port is None or port[0] // 2 < len(self.walk.uses) else self._nodes.get("factor")
        if factors is None or not bool(torch.isin(port[1], factors).any()):  # type: ignore[index]
            return None
        return port[1][:0], port[1]  # type: ignore[index]

    def _class(self, what: str) -> Tensor:
        """Return the classes by which a role is found; queries may be rotated or normed before they meet keys."""
        return self.frame.nodes.components if what == "left" else self.frame.nodes.wires

    def has(self, what: str, nodes: Tensor) -> bool:
        """Return whether any channel of these nodes has the role `what`, see `Walk.roles`."""
        own = self._class(what)[nodes]
        return what in self._classes and bool(torch.isin(own[own > 0], self._classes[what]).any())

    def is_left(self, nodes: Tensor) -> bool:
        """Return whether any of the nodes is on the left of a contraction, as queries are."""
        return bool(
            torch.isin(2 * self.frame.nodes.wires[nodes] + self.frame.nodes.dual[nodes].long(), self._left).any()
        )

    def role(self, nodes: Tensor) -> str:
        """Return the role of nodes: query/key, value/output, residual or hidden."""
        roles = (("left", QUERY_KEY), ("mixed", VALUE_OUTPUT), ("added", "residual"))
        return next((name for what, name in roles if self.has(what, nodes)), "hidden")

    def mixers(self, known: Tensor | None) -> list[str]:
        """Return the modules whose parameters write and read channels mixed over tokens, without the `known` nodes."""
        wires = self._classes.get("mixed", torch.zeros(0, dtype=torch.long))
        if known is not None:
            wires = wires[~torch.isin(wires, self.frame.nodes.wires[known])]
        found: dict[int, set[tuple[str, bool]]] = {}
        for pieces in self._rows.values():
            for _, port in pieces:
                own = self.frame.nodes.wires[port.nodes]
                for wire in own[torch.isin(own, wires)].unique().tolist():
                    found.setdefault(wire, set()).add((self.frame.name_of(port), port.writes))
        both = {tuple(sorted(each)) for each in found.values() if len({writes for _, writes in each}) == 2}
        return [common_path(name for name, _ in each) for each in sorted(both)]

    # Kinds

    def pair(self, ports: Sequence[int], names: Sequence[str], nodes: Tensor, scale: bool) -> str:
        """Return the kind of the pair with these ports. scale: whether a scale acts on single channels."""
        if self.has("left", nodes):
            return QUERY_KEY
        if scale and self.has("bent", nodes):
            return RELU
        if scale and self.has("gated", nodes):
            return GATED
        if self.has("mixed", nodes):
            return VALUE_OUTPUT
        return ADAPTER if self._adapts(ports, names) else BOTTLENECK

    def _adapts(self, ports: Sequence[int], names: Sequence[str]) -> bool:
        """Return whether a pair is a low-rank update of a weight.

        It is if it has peft's names, if it is a product of two parameters, or if its output is added to the output of
        another linear map of the same inputs.
        """
        if any(part in _PEFT for name in names for part in name.split(".")):
            return True
        uses, last = self.walk.uses, len(self.walk.uses)
        writers = [n // 2 for n in ports if n % 2 == 0]
        readers = [n // 2 for n in ports if n % 2]
        if readers and not any(n < last for n in writers):
            return True
        inputs = {each for n in writers if n < last for each in self._inputs(n)}
        channels = self.frame.nodes.wires
        answers = {int(channels[uses[n].out[0]]) for n in readers}
        others = (n for n in range(last) if n not in readers and int(channels[uses[n].out[0]]) in answers)
        return any(not inputs.isdisjoint(self._inputs(n)) for n in others)

    def _inputs(self, number: int) -> set[tuple[str, int]]:
        """Return keys of a linear map's inputs: its memory and channels, or the number of words of a table."""
        use = self.walk.uses[number]
        if use.tokens.place is None:
            return {("words", use.shape[1])}
        read = self.walk.program.operations[use.operation].args[use.tokens.place].number
        channels = self.frame.nodes.wires[use.into[use.into > 0]].unique().tolist()
        return {("memory", self.walk.program.layouts[read].memory), *(("channel", each) for each in channels)}

    def mixing(self, gauge: Gauge) -> str:
        """Return the kind of a group that mixes channels, such as "residual rotation"."""
        algebra = gauge.algebra
        if isinstance(algebra, FromSum):
            return CONSTANT
        nodes = [found[1] for slot in gauge.wire.slots if (found := self.port(slot.rows)) is not None]
        role = self.role(torch.cat(nodes)) if nodes else "hidden"
        if isinstance(algebra, IntoMean):
            return f"{role} mean"
        generator = torch.Generator().manual_seed(0)
        X = algebra.project(torch.randn(algebra.n, algebra.n, generator=generator, dtype=torch.float64))
        if bool((X + X.mT).abs().max() < 1e-9 * X.abs().max()):
            planes = all(part.n == 2 for _, part in algebra.summands) and algebra.n > 2
            return f"{role} {'phase' if planes or (isinstance(algebra, Span) and algebra.n == 2) else 'rotation'}"
        return f"{role} change of basis"

    def scaling(self, nodes: Tensor, gains: Sequence[tuple[Tensor, Tensor]], weights: bool, biases: bool) -> str:
        """Return the kind of a group of scales of channels, named after the gains that it changes, if there are any.

        weights, biases: whether the scales change weights, and parameters of one number per channel besides gains.
        """
        if gains:
            before, after = (torch.cat(each) for each in zip(*gains, strict=True))
            normed = any(
                bool(torch.isin(before, self._nodes[what]).any()) for what in ("normed", "gated") if what in self._nodes
            )
            kind = "norm gain" if normed else "channel gain"
            return kind if weights else f"{self.role(after)} {kind}"
        if biases and not weights:
            return REDUNDANT
        role = self.role(nodes)
        for name, what in ((RELU, "bent"), (GATED, "gated")):
            if role != QUERY_KEY and self.has(what, nodes):
                return name
        return f"{role} scale"


def row_keys(starts: Tensor, steps: Tensor) -> Tensor:
    """Return a key for each row of entries, computed from its smallest and its largest entry."""
    if starts.shape[1] == 1:
        low, high = starts[:, 0] + steps.min(), starts[:, 0] + steps.max()
    else:
        every = starts + steps
        low, high = every.amin(1), every.amax(1)
    return low * (1 << 31) + high - low
