"""Hold the evidence for translations: samples at generic weights.

A sample has the token vectors of all uses, and gradients of activations that are parameters, gains and small tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.entries import Reading
from quotient_manifolds.symmetries.charges.frame import Frame, Port, Table
from quotient_manifolds.symmetries.charges.kernel import NOISE
from quotient_manifolds.symmetries.charges.samples import Sample, Side
from quotient_manifolds.symmetries.charges.uses import Lookup, Use
from quotient_manifolds.symmetries.groups import Part, Rows, Translation

MOST = 1_000_000
"""Maximum number of entries of a table whose gradient is computed."""
MOST_APART = 1024
"""A bias or table with at most this many columns, such as positions, is tested by column if samples suffice."""
Drawn = Sequence[tuple[Mapping[str, Tensor], Sample]]


class Evidence:
    """Provide token vectors, gradients and units at generic weights, and record how far from 0 charges were."""

    def __init__(self, frame: Frame, drawn: Drawn, draw: Callable[[], Sample]) -> None:
        """Take samples, and a function that draws another one, to find units that are active in none of these."""
        self.frame, self.walk = frame, frame.walk
        self.classes = _classes(self.walk.uses)
        self.drawn, self.draw = [self._joined(sample) for _, sample in drawn], lambda: self._joined(draw())
        self.readings, self.units = list[Reading](), list[Tensor]()
        for k, (weights, _) in enumerate(drawn):  # losses of one point have the same weights
            same = k > 0 and weights is drawn[k - 1][0]
            self.readings.append(self.readings[-1] if same else frame.entries.read(weights.__getitem__))
            self.units.append(self.units[-1] if same else frame.units(self.readings[-1]))
        self.tables = {n for n, use in enumerate(self.walk.uses) if isinstance(use.tokens, Lookup)}
        self.refused: list[str] = []
        self.largest, self.smallest = 0.0, float("inf")

    def _joined(self, sample: Sample) -> Sample:
        """Return a sample in which the first of several uses of the same entries has the tokens of all of them."""
        several = [some for some in self.classes if len(some) > 1]

        def joined(sides: Mapping[int, Side]) -> Mapping[int, Side]:
            found = [(some[0], [sides[n] for n in some if n in sides]) for some in several if some[0] in sides]
            pairs = ((n, [(side.values, side.slopes) for side in some]) for n, some in found)
            return {**sides, **{n: Side(*map(torch.cat, zip(*some, strict=True))) for n, some in pairs}}

        return replace(sample, read=joined(sample.read), written=joined(sample.written)) if several else sample

    def vanishes(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
        """Return whether values are rounding errors of their summands in all samples, and record the relative charge.

        pairs: values and sums of absolute summands, by sample, up to the first that is no rounding error. Returns False
        if all summands are 0.
        """
        found, worst = False, 0.0
        for v, s in pairs:
            if v.numel() and bool(s.any()):
                charge = float(v.abs().max()) / float(s.max())
                if not charge <= NOISE:
                    self.smallest = min(self.smallest, charge)
                    return False
                found, worst = True, max(worst, charge)
        self.largest = max(self.largest, worst)
        return found

    def made(self, kind: str, *parts: Part) -> Iterator[Translation]:
        """Yield the translation of these parts; if groups cannot act on them, record why."""
        try:
            yield Translation(parts, kind)
        except ValueError as error:
            self.refused.append(f"a translation of {parts[0].rows.name}: {error}")

    def tried(self, made: Iterator[Translation]) -> Iterator[Translation]:
        """Yield all translations of an iterator; if it raises ValueError, yield nothing and record why."""
        try:
            yield from list(made)
        except ValueError as error:
            self.refused.append(f"a translation: {error}")

    def alone(self, entries: Tensor, uses: int = 1) -> bool:
        """Return whether all entries (numbers, or a view of a grid) belong to parameters and have `uses` uses each."""
        if entries.is_meta:
            shares = self.frame.shares.as_strided(entries.shape, entries.stride(), int(entries.storage_offset()))
            return bool((shares == uses).all())
        return bool((entries >= 0).all()) and bool((self.frame.shares[entries] == uses).all())

    @cached_property
    def lone(self) -> set[int]:
        """Return the uses whose entries are of parameters, in no other use, with as many channels in all samples.

        A map that mixes tokens has more channels for longer inputs. Several uses of the same entries are represented
        by the first (see `_joined`), if nothing else uses any of these entries.
        """

        def steady(n: int) -> bool:
            read = {s.read[n].values.shape[1] for s in self.drawn if n in s.read}
            return len(read) <= 1 and len({s.written[n].slopes.shape[1] for s in self.drawn if n in s.written}) <= 1

        uses = self.walk.uses
        return {some[0] for some in self.classes if self.alone(uses[some[0]].theta, len(some)) and steady(some[0])}

    def side(self, n: int, writes: bool) -> Port:
        """Return a use as a port whose rows are its outputs, or its inputs and taps, and are on no wire."""
        use = self.walk.uses[n]
        if writes or use.shape[2] == 1:
            theta, spots = (Table.side(each, writes) for each in (use.theta, use.spots))
        else:
            theta, spots = (Table.of(each.flatten(1).T) for each in (use.entries, use.places))
        rows = torch.arange(len(theta.starts))
        return Port(n, use.memory, writes, False, rows, torch.zeros_like(rows), rows, theta, spots)

    def rows(self, port: Port) -> Rows | None:
        """Return a port as rows of one parameter; None unless groups can act on it as such."""
        pieces = list(self.frame.by_parameter(port))
        try:
            return self.frame.rows(pieces[0]) if len(pieces) == 1 and len(pieces[0].rows) == len(port.rows) else None
        except ValueError as error:
            self.refused.append(f"{self.frame.name_of(port)}: {error}")
            return None

    def entries(self, entries: Tensor) -> Rows:
        """Return entries of one parameter as a column."""
        name = list(self.frame.entries.start)[int(self.frame.owners(entries[:1])[0]) - 1]
        shape = tuple(self.frame.entries.shapes[name])
        return Rows.at(name, shape, entries[:, None] - self.frame.entries.start[name])

    def gradients(self, port: Port) -> list[Tensor] | None:
        """Return the gradients (rows, columns) of a port's entries, by sample; None if samples do not have them."""
        name = self.frame.name_of(port)
        if name not in self.drawn[0].gradients:
            return None
        at = port.entries - self.frame.entries.start[name]
        return [s.gradients[name].reshape(-1)[at].double() for s in self.drawn]

    @cached_property
    def biases(self) -> dict[int, Tensor]:
        """Return by use the entries of its bias, if their gradient is the sum of dy over uses of the same weight."""
        found, every = dict[int, Tensor](), self.walk.biases
        for some in self.classes:
            bias = every.get(some[0])
            if bias is None or not all(n in every and torch.equal(every[n], bias) for n in some):
                continue
            rows = self.entries(bias) if self.alone(bias, len(some)) else None
            if rows is not None and rows.name in self.drawn[0].gradients:
                slopes = [s.written[some[0]].slopes for s in self.drawn]
                pairs = zip(self.drawn, slopes, strict=True)
                if self.vanishes((rows.entries(s.gradients)[:, 0] - d.sum(0), d.abs().sum(0)) for s, d in pairs):
                    found |= dict.fromkeys(some, bias)
        return found

    def ratio(self, k: int, above: Tensor, below: Tensor) -> Tensor:
        """Return the units of the nodes `above` over the units of the nodes `below` in sample k."""
        one, other = (torch.where(each > 0, self.units[k][each], 1.0) for each in (above, below))
        return one / other

    def ports(self, nodes: Tensor) -> list[Port]:
        """Return the ports that contain the channel of the first of these nodes."""
        known = len(nodes) > 0 and int(nodes[0]) > 0 and (channel := int(self.frame.channel_of[nodes[0]])) >= 0
        return self.frame.holding(channel) if known else []

    def leaves(self, nodes: Tensor) -> list[Port]:
        """Return the `ports` whose entries are activations themselves, such as biases, with one entry per channel."""
        last = len(self.walk.uses)
        return [p for p in self.ports(nodes) if p.use >= last and len(p.theta.steps) == 1]

    def of_nodes(self, port: Port, nodes: Tensor) -> Port | None:
        """Return the rows of a port on the channels of these nodes, in order; None unless it has each of them once."""
        channels = torch.where(nodes > 0, self.frame.channel_of[nodes], -1)
        if not bool((channels >= 0).all()) or bool((self.frame.nodes.dual[nodes] != port.dual).any()):
            return None
        place = torch.full((len(self.frame.roots),), -1)
        place[port.channels] = torch.arange(len(port.channels))
        rows = place[channels]
        return port.at(rows) if bool((rows >= 0).all()) and len(rows.unique()) == len(rows) else None


def _classes(uses: Sequence[Use]) -> list[list[int]]:
    """Return lists of the numbers of uses that share their entries, such as the uses of a layer that is run twice."""
    same = dict[tuple[object, ...], list[int]]()
    for n, use in enumerate(uses):
        theta = use.theta
        entries = (*theta.stride(), int(theta.storage_offset())) if theta.is_meta else theta.numpy().tobytes()
        key = (type(use.tokens), use.memory, theta.shape, entries)
        same.setdefault(key, []).append(n)
    return list(same.values())
