"""Read translations that hold at all weights off token vectors: no gradient of a weight is formed.

For a wire, what a constant z on its channels adds to the loss is z . g for each way to add it, with g the gradient of
a bias, the sum over tokens of dy of a table, or minus the sum of dx of a reader, whose bias takes V z back.
Combinations of ways with sum of c g = 0 are shifts, for any z. Of single uses y = W x, token by token:

| vanishes | translation |
|---|---|
| sum of dy | W += z 1^T, what it writes having a free mean |
| sum of (x - b) / g | W += z / g, and its bias -= z (sum of b / g), behind a norm with gains g and biases b |
| dy of A minus (B^T dy of W), A and W reading the same | A += z, W -= B z |
| (x of B minus A x), and dy of B minus dy of W | B += z, W -= z A |
| dy of V minus dy of W, V and W reading the same | V += z, W -= z |
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.entries import Reading
from quotient_manifolds.symmetries.charges.frame import Frame, Port, Table
from quotient_manifolds.symmetries.charges.kernel import NOISE, null_space
from quotient_manifolds.symmetries.charges.readings import Readings
from quotient_manifolds.symmetries.charges.samples import Sample, Side
from quotient_manifolds.symmetries.charges.uses import Lookup, Use
from quotient_manifolds.symmetries.groups import (
    Factor,
    Gain,
    Matrix,
    Part,
    Product,
    Rows,
    Sparse,
    Sum,
    Symmetry,
    Terms,
    Translation,
)

_APART = 1024
"""Columns of a bias or a table, as positions, up to which each is a way of its own if there are enough samples."""
MOST = 1_000_000
"""Entries of a table whose gradient is computed."""
_FLOOR, _SPARE, _CALM, _TINY, _CLEAR = 1e-3, 2, 12, 1e-7, 1e-3
Drawn = Sequence[tuple[Mapping[str, Tensor], Sample]]


@dataclass(frozen=True, eq=False)
class Known:
    """Hold 1 / g (1, inputs) for which x times it is the sum of b / g at all tokens, this sum (1, 1), and g of data."""

    right: Matrix
    sum: Product
    of: tuple[Gain, ...] = ()


@dataclass(frozen=True, eq=False)
class Way:
    """Hold one way to add constants to channels: g (samples, n), and the sums of its absolute summands.

    port: the entries, one row per channel; of a reader those of its matrix, and `bias` those that take constants back,
    in the order of its outputs, with what units they have there.
    known: of a weight behind a norm, the inputs that make a sum, and this sum, which all other ways are multiplied by.
    """

    port: Port
    g: Tensor
    size: Tensor
    bias: Port | None = None
    known: Known | None = None

    def repeats(self, other: Way) -> bool:
        """Return whether another way has the same bias take back the same: that of a map that is used twice."""
        if self.bias is None or other.bias is None:
            return False
        pairs = ((self.bias.theta, other.bias.theta), (self.port.theta, other.port.theta))
        return all(torch.equal(a.starts, b.starts) and torch.equal(a.steps, b.steps) for a, b in pairs)


class Shifts:
    """Read translations off samples at generic weights."""

    def __init__(self, frame: Frame, drawn: Drawn, draw: Callable[[], Sample]) -> None:
        """Take samples, and what gives more, for units that are never on in these."""
        self.frame, self.walk = frame, frame.walk
        self.classes = _classes(self.walk.uses)
        self.drawn, self.draw = [self._joined(sample) for _, sample in drawn], lambda: self._joined(draw())
        self.readings, self.units = list[Reading](), list[Tensor]()
        for k, (weights, _) in enumerate(drawn):  # losses of one point have the same weights
            same = k > 0 and weights is drawn[k - 1][0]
            self.readings.append(self.readings[-1] if same else frame.entries.read(weights.__getitem__))
            self.units.append(self.units[-1] if same else frame.units(self.readings[-1]))
        self.tables = {n for n, use in enumerate(self.walk.uses) if isinstance(use.tokens, Lookup)}
        self.known = dict[int, Known]()
        """By use without a bias of its own."""
        self.given = torch.zeros(frame.entries.size, dtype=torch.bool)
        """Entries that add what others do, too, and are moved by that alone."""
        self.refused: list[str] = []
        self.largest, self.smallest = 0.0, float("inf")

    def every(self) -> Readings:
        """Return all translations."""
        found: list[Symmetry] = []
        for made in (self._means(), self._idle(), self._constants(), self._beside(), self._along_wires()):
            found += made
        return Readings(tuple(found), tuple(self.refused), self.largest, self.smallest)

    def _vanishes(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
        """Return whether values are rounding of their summands at all tokens of all samples, and take note of that.

        pairs: values and sizes of their summands, by sample; none are computed behind one that is not rounding.
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

    def _made(self, kind: str, *parts: Part) -> Iterator[Translation]:
        """Yield a translation of parts, unless groups cannot act on what they are."""
        try:
            yield Translation(parts, kind)
        except ValueError as error:
            self.refused.append(f"a translation of {parts[0].rows.name}: {error}")

    def _tried(self, made: Iterator[Translation]) -> Iterator[Translation]:
        """Yield what is made, unless groups cannot read what it is made of."""
        try:
            yield from list(made)
        except ValueError as error:
            self.refused.append(f"a translation: {error}")

    def _joined(self, sample: Sample) -> Sample:
        """Return a sample in which the first of several uses of the same entries has the tokens of all of them."""
        several = [some for some in self.classes if len(some) > 1]

        def joined(sides: Mapping[int, Side]) -> Mapping[int, Side]:
            found = [(some[0], [sides[n] for n in some if n in sides]) for some in several if some[0] in sides]
            pairs = ((n, [(side.values, side.slopes) for side in some]) for n, some in found)
            return {**sides, **{n: Side(*map(torch.cat, zip(*some, strict=True))) for n, some in pairs}}

        return replace(sample, read=joined(sample.read), written=joined(sample.written)) if several else sample

    def _alone(self, entries: Tensor, uses: int = 1) -> bool:
        """Return whether all entries, numbers or a view of a grid, are of parameters, and used so often."""
        if entries.is_meta:
            shares = self.frame.shares.as_strided(entries.shape, entries.stride(), int(entries.storage_offset()))
            return bool((shares == uses).all())
        return bool((entries >= 0).all()) and bool((self.frame.shares[entries] == uses).all())

    @cached_property
    def lone(self) -> set[int]:
        """Return the uses whose entries are all of parameters, with as many channels in all samples: see `_joined`.

        A map that mixes tokens has more for longer inputs. Of uses of the same entries it is the first, for all of
        them, if nothing else uses any of these.
        """

        def steady(n: int) -> bool:
            read = {s.read[n].values.shape[1] for s in self.drawn if n in s.read}
            return len(read) <= 1 and len({s.written[n].slopes.shape[1] for s in self.drawn if n in s.written}) <= 1

        uses = self.walk.uses
        return {some[0] for some in self.classes if self._alone(uses[some[0]].theta, len(some)) and steady(some[0])}

    def _side(self, n: int, writes: bool) -> Port:
        """Return a use by outputs, or by inputs and taps, as rows that are channels of no wire."""
        use = self.walk.uses[n]
        if writes or use.shape[2] == 1:
            theta, spots = (Table.side(each, writes) for each in (use.theta, use.spots))
        else:
            theta, spots = (Table.of(each.flatten(1).T) for each in (use.entries, use.places))
        rows = torch.arange(len(theta.starts))
        return Port(n, use.memory, writes, False, rows, torch.zeros_like(rows), rows, theta, spots)

    def _rows(self, port: Port) -> Rows | None:
        """Return a port as rows of one parameter, None if it is no such."""
        pieces = list(self.frame.by_parameter(port))
        try:
            return self.frame.rows(pieces[0]) if len(pieces) == 1 and len(pieces[0].rows) == len(port.rows) else None
        except ValueError as error:
            self.refused.append(f"{self.frame.name_of(port)}: {error}")
            return None

    def _entries(self, entries: Tensor) -> Rows:
        """Return entries of one parameter as a column."""
        name = list(self.frame.entries.start)[int(self.frame.owners(entries[:1])[0]) - 1]
        shape = tuple(self.frame.entries.shapes[name])
        return Rows.at(name, shape, entries[:, None] - self.frame.entries.start[name])

    def _gradients(self, port: Port) -> list[Tensor] | None:
        """Return the gradients (rows, columns) of entries that are activations or a table, by sample."""
        name = self.frame.name_of(port)
        if name not in self.drawn[0].gradients:
            return None
        at = port.entries - self.frame.entries.start[name]
        return [s.gradients[name].reshape(-1)[at].double() for s in self.drawn]

    @cached_property
    def biases(self) -> dict[int, Tensor]:
        """Return by use the entries of its bias, if their gradient is that of the uses of the same weight alone."""
        found, every = dict[int, Tensor](), self.walk.biases
        for some in self.classes:
            bias = every.get(some[0])
            if bias is None or not all(n in every and torch.equal(every[n], bias) for n in some):
                continue
            rows = self._entries(bias) if self._alone(bias, len(some)) else None
            if rows is not None and rows.name in self.drawn[0].gradients:
                slopes = [s.written[some[0]].slopes for s in self.drawn]
                pairs = zip(self.drawn, slopes, strict=True)
                if self._vanishes((rows.entries(s.gradients)[:, 0] - d.sum(0), d.abs().sum(0)) for s, d in pairs):
                    found |= dict.fromkeys(some, bias)
        return found

    # Single uses

    def _means(self) -> Iterator[Translation]:
        """Yield what is added to the mean of all that is written: equal numbers in the units of some part of a wire."""
        for n, use in enumerate(self.walk.uses):
            slopes = [s.written[n].slopes for s in self.drawn]
            if len(use.out) < 2 or n not in self.lone or (equal := self._equal(use.out, slopes)) is None:
                continue
            if (rows := self._rows(self._side(n, False))) is not None:
                one = torch.ones(1)
                yield from self._made("mean", Part(rows, None, Matrix(one, equal[0], gains=((), equal[1]))))
        for port in self.frame.ports:
            g = self._gradients(port) if port.use >= len(self.walk.uses) and self._alone(port.entries) else None
            if g is None or len(port.rows) < 2:
                continue
            if (axis := self._axis(port)) is not None:
                yield from self._made("mean", axis)
                continue
            every = torch.arange(g[0].shape[1])
            columns, equal = every, self._equal(port.nodes, [d.mT for d in g])
            if equal is None and 1 < len(every) <= _APART:  # of some positions, as where a single token is read
                free = [self._equal(port.nodes, [d[:, k : k + 1].mT for d in g]) is not None for k in every]
                columns = every[torch.tensor(free)]
                equal = self._equal(port.nodes, [d[:, columns].mT for d in g])
            if equal is not None and (rows := self._rows(port.at(torch.arange(len(port.rows)), columns))) is not None:
                yield from self._made("mean", Part(rows, Matrix(equal[0], torch.ones(1), gains=(equal[1], ()))))

    def _axis(self, port: Port) -> Part | None:
        """Return what adds equal numbers along one axis of a parameter, as to all keys of a query, or None."""
        name = self.frame.name_of(port)
        shape = tuple(self.frame.entries.shapes[name])
        if torch.Size(shape).numel() != port.entries.numel() or sum(size > 1 for size in shape) < 2:
            return None
        numbers, gradients = torch.arange(port.entries.numel()).view(shape), [s.gradients[name] for s in self.drawn]
        for axis, size in reversed([*enumerate(shape)]):
            if size > 1 and self._vanishes((g.double().sum(axis), g.double().abs().sum(axis)) for g in gradients):
                rows = Rows.at(name, shape, numbers.movedim(axis, 0).reshape(size, -1))
                return Part(rows, torch.ones(size, 1, dtype=torch.float64))
        return None

    def _equal(self, nodes: Tensor, slopes: Sequence[Tensor]) -> tuple[Tensor, tuple[Gain, ...]] | None:
        """Return u in which slopes (tokens, nodes) have u . slopes = 0: those of nodes over others on the same wire."""
        tried = list[Tensor]()
        own = (q.nodes for p in self._ports(nodes) if p.writes and (q := self._of_nodes(p, nodes)) is not None)
        for of in (nodes, torch.where(nodes > 0, self.frame.nodes.wires[nodes], 0), *own):
            u = self._ratio(0, nodes, of)
            if any(torch.equal(u, each) for each in tried):
                continue
            tried.append(u)
            terms = (d * self._ratio(k, nodes, of) for k, d in enumerate(slopes))
            if self._vanishes((t.sum(1), t.abs().sum(1)) for t in terms):
                with suppress(ValueError):  # of gains that groups cannot read
                    return self.frame.ratio((nodes,), (of,))
        return None

    def _idle(self) -> Iterator[Translation]:
        """Yield what no output depends on: outputs of uses that nothing reads, and inputs that are always 0."""
        uses = {n: self.walk.uses[n] for n in self.lone}
        seen: dict[tuple[int, bool], Tensor] = {}
        k, last, count = 0, 0, -1
        # As many draws show nothing new as have shown the others: of a maximum, each may turn a single unit on.
        while k < max(len(self.drawn) + _CALM, 2 * last) and not (k >= len(self.drawn) and _all(seen.values())):
            sample = self.drawn[k] if k < len(self.drawn) else self.draw()
            for n in uses:
                for writes in (True, False) if uses[n].tokens.place is not None and uses[n].shape[2] == 1 else (True,):
                    t = sample.written[n].slopes if writes else sample.read[n].values
                    if len(t):  # of an expert that no token is given to, nothing is known
                        seen[n, writes] = seen.get((n, writes), torch.zeros(t.shape[1], dtype=torch.bool)) | (
                            t != 0
                        ).any(0)
            k, before, count = k + 1, count, sum(int(each.sum()) for each in seen.values())
            last = k if count > before else last
        for (n, writes), each in seen.items():
            own, other = (torch.nonzero(flags)[:, 0] for flags in (~each, seen[n, True]))
            if len(own) and (writes or len(other)):
                port = self._side(n, writes).at(own, None if writes else other)
                if (rows := self._rows(port)) is not None:
                    yield from self._made("unread" if writes else "unreached", Part(rows))
                if writes and n in self.biases:
                    yield from self._made("unread", Part(self._entries(self.biases[n][own])))

    def _constants(self) -> Iterator[Translation]:
        """Yield W += z / g and c -= z (sum of b / g) behind norms."""
        for n, use in enumerate(self.walk.uses):
            if n not in self.tables and use.shape[2] == 1 and len(use.into) > 1 and n in self.lone:
                yield from self._tried(self._behind(n))

    def _behind(self, n: int) -> Iterator[Translation]:
        use, rows = self.walk.uses[n], self._rows(self._side(n, True))
        into, bases = use.into, self._bases(use.into)
        own = [port for p in self._leaves(into) if (port := self._of_nodes(p, into)) is not None]
        every = product(bases, (None, *own), (None, *own)) if rows is not None else ()
        for base, port, by in every:
            if port is by is not None or not self._sums(n, base, port, by):
                continue
            right = self._over(base, into, by)
            parts = [Part(rows, None, right)]  # type: ignore[arg-type]
            if port is not None:
                b = Matrix(torch.ones(len(into)), torch.ones(1), self.frame.rows(port))
                total = Product((self._over(base, port.nodes, by), b))
                if n in self.biases:
                    parts.append(Part(self._entries(self.biases[n]), None, Product((torch.full((1, 1), -1.0), total))))
                elif base is bases[0]:
                    self.known[n] = Known(right, total, () if by is None else (self._gain(by, 1.0),))
                    return
                else:
                    continue
            yield from self._made("constant", *parts)
            return

    def _bases(self, nodes: Tensor) -> list[Tensor]:
        """Return the eldest nodes of some, and those that a gain makes all of them of, as that of a norm does."""
        wires, up = self.frame.nodes.wires, torch.zeros_like(self.frame.nodes.wires)
        bases = [torch.where(nodes > 0, wires[nodes], 0)]
        for gain in self.walk.gains:
            up[gain.after] = gain.before
            if bool((before := up[nodes]).all()):
                bases.append(before)
            up[gain.after] = 0
        return bases

    def _sums(self, n: int, base: Tensor, bias: Port | None, by: Port | None) -> bool:
        """Return whether (x - b) / w of all tokens of a use have a sum of 0: w are gains of a norm of data."""

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for k, s in enumerate(self.drawn):
                x = s.read[n].values * self._ratio(k, base, self.walk.uses[n].into)
                w = 1.0 if by is None else self.readings[k].at(by.memory, by.places[:, 0])[0]
                b = torch.zeros(1).double() if bias is None else self._bias(k, bias, base)
                yield ((x - b) / w).sum(1), (x / w).abs().sum(1)

        return self._vanishes(pairs())

    def _over(self, above: Tensor, below: Tensor, by: Port | None) -> Matrix:
        """Return the units of nodes over those of others, and over the entries of a port, as a row."""
        constant, gains = self.frame.ratio((above,), (below,))
        return Matrix(torch.ones(1), constant, gains=((), gains if by is None else (*gains, self._gain(by, -1.0))))

    def _gain(self, port: Port, power: float) -> Gain:
        name = self.frame.name_of(port)
        places = port.entries[:, 0] - self.frame.entries.start[name]
        return Gain.of(name, tuple(self.frame.entries.shapes[name]), places, power)

    def _ratio(self, k: int, above: Tensor, below: Tensor) -> Tensor:
        """Return the units of nodes over those of others in sample k."""
        one, other = (torch.where(each > 0, self.units[k][each], 1.0) for each in (above, below))
        return one / other

    def _bias(self, k: int, port: Port, base: Tensor) -> Tensor:
        return self.readings[k].at(port.memory, port.places[:, 0])[0] * self._ratio(k, base, port.nodes)

    def _ports(self, nodes: Tensor) -> list[Port]:
        """Return the ports that have the channel of the first of some nodes."""
        known = len(nodes) > 0 and int(nodes[0]) > 0 and (channel := int(self.frame.channel_of[nodes[0]])) >= 0
        return self.frame.holding(channel) if known else []

    def _leaves(self, nodes: Tensor) -> list[Port]:
        """Return those of them that are activations themselves, one entry for each channel."""
        last = len(self.walk.uses)
        return [p for p in self._ports(nodes) if p.use >= last and len(p.theta.steps) == 1]

    def _of_nodes(self, port: Port, nodes: Tensor) -> Port | None:
        """Return the rows of a port on the channels of nodes, in order, None if it does not have all of these."""
        channels = torch.where(nodes > 0, self.frame.channel_of[nodes], -1)
        if not bool((channels >= 0).all()) or bool((self.frame.nodes.dual[nodes] != port.dual).any()):
            return None
        place = torch.full((len(self.frame.roots),), -1)
        place[port.channels] = torch.arange(len(port.channels))
        rows = place[channels]
        return port.at(rows) if bool((rows >= 0).all()) and len(rows.unique()) == len(rows) else None

    # Maps beside others

    def _beside(self) -> Iterator[Translation]:
        """Yield what one map takes up and another gives back, for maps that read the same."""
        uses, same = self.walk.uses, dict[tuple[object, ...], list[int]]()
        for n, use in enumerate(uses):
            if n not in self.tables and use.shape[2] == 1 and n in self.lone:
                x = self.drawn[0].read[n].values
                same.setdefault((x.shape, float(x.sum()), float(x.square().sum())), []).append(n)
        between = dict[tuple[int, int], list[int]]()
        for n, use in enumerate(uses):
            if n not in self.tables and use.shape[2] == 1:
                between.setdefault(self.sets[n], []).append(n)
        for some in same.values():
            for a, m in product(some, some):
                if a < m and self.sets[a][1] == self.sets[m][1]:
                    yield from self._tried(self._of_two(a, m, self._order(uses[a].out, uses[m].out)))
                for b in between.get((self.sets[a][1], self.sets[m][1]), ()) if a != m else ():
                    if b not in (a, m):
                        yield from self._tried(self._of_three(a, b, m))

    @cached_property
    def sets(self) -> list[tuple[int, int]]:
        """Return numbers of the sets of channels that each use reads and writes; of what is none, one of its own."""
        known: dict[tuple[int, ...], int] = {}

        def number(nodes: Tensor) -> int:
            key = self._key(nodes).sort()[0]
            plain = len(key) > 0 and int(key[0]) >= 0 and bool((key[1:] > key[:-1]).all())
            return known.setdefault(tuple(key.tolist()) if plain else (-1, len(known)), len(known))

        return [(number(use.into), number(use.out)) for use in self.walk.uses]

    def _key(self, nodes: Tensor) -> Tensor:
        return torch.where(nodes > 0, 2 * self.frame.channel_of[nodes] + self.frame.nodes.dual[nodes].long(), -1)

    def _order(self, one: Tensor, other: Tensor) -> Tensor:
        """Return which of some nodes is on the channel of each of others, of the same set."""
        key = self._key(one)
        order = torch.argsort(key)
        return order[torch.searchsorted(key[order], self._key(other))]

    def _of_two(self, a: int, m: int, at: Tensor) -> Iterator[Translation]:
        A, M = (self.walk.uses[n] for n in (a, m))
        pairs = (
            (s.written[m].slopes, s.written[a].slopes[:, at] * self._ratio(k, A.out[at], M.out))
            for k, s in enumerate(self.drawn)
        )
        if self._vanishes((x - y, x.abs()) for x, y in pairs):
            one, other = self._rows(self._side(a, True).at(at)), self._rows(self._side(m, True))
            if one is not None and other is not None:
                constant, gains = self.frame.ratio((A.out[at],), (M.out,))
                yield from self._made("beside", Part(other), Part(one, _diagonal(-constant, gains)))

    def _of_three(self, a: int, b: int, m: int) -> Iterator[Translation]:
        """Yield A += z, W -= B z and B += z, W -= z A, for W beside B A."""
        A, B, W = (self.walk.uses[n] for n in (a, b, m))
        k, j = self._order(A.out, B.into), self._order(B.out, W.out)
        rows = [self._rows(self._side(n, True)) for n in (a, b, m)]
        if any(each is None for each in rows):
            return
        rows_a, _, rows_m = (each for each in rows if each is not None)
        values = (
            B.values(reading)[j, :, 0] * self._ratio(s, W.out, B.out[j])[:, None]
            for s, reading in enumerate(self.readings)
        )
        inner = [self._ratio(s, B.into, A.out[k]) for s in range(len(self.drawn))]
        above, gains_above = self.frame.ratio((W.out,), (B.out[j],))
        beside, gains_beside = self.frame.ratio((B.into,), (A.out[k],))
        dA = [s.written[a].slopes[:, k] for s in self.drawn]
        dW = [s.written[m].slopes for s in self.drawn]
        back = (d @ V * u for d, V, u in zip(dW, values, inner, strict=True))
        if self._vanishes((x - y, x.abs()) for x, y in zip(dA, back, strict=True)):
            V = self._rows(self._side(b, True).at(j))
            M = Matrix(-above, beside, V, gains=(gains_above, gains_beside))
            order = self._rows(self._side(a, True).at(k))
            if order is not None:
                yield from self._made("beside", Part(order), Part(rows_m, M))
        dB = [s.written[b].slopes[:, j] for s in self.drawn]
        read = [s.read[b].values for s in self.drawn]
        made = (s.written[a].values[:, k] * u for s, u in zip(self.drawn, inner, strict=True))
        outer = (d * self._ratio(s, W.out, B.out[j]) for s, d in enumerate(dW))
        if (
            a not in self.walk.biases
            and b in self.lone
            and self._vanishes((x - y, x.abs()) for x, y in zip(read, made, strict=True))
            and self._vanishes((x - y, x.abs()) for x, y in zip(dB, outer, strict=True))
        ):
            M = Matrix(
                beside, torch.ones(rows_a.columns), self._rows(self._side(a, True).at(k)), gains=(gains_beside, ())
            )
            moved = self._rows(self._side(b, True).at(j))
            if moved is not None:
                yield from self._made("beside", Part(moved), Part(rows_m, _diagonal(-above, gains_above), M))

    # Constants along wires

    def _along_wires(self) -> Iterator[Translation]:
        """Yield shifts of all sets of channels that the same ports have, and of what is left of several of these.

        A maximum over tokens, for example, passes constants on, though what is behind it is a wire of its own.
        """
        for dual in (False, True):
            ports = [p for p in self.frame.ports if p.dual == dual]
            left = dict[int, list[tuple[list[Way], float]]]()
            for some, channels in self._sets(ports):
                own = [_of_channels(p, channels) for p in some]
                every = [torch.stack([u[p.nodes] for u in self.units]) for p in own]
                if all(bool(torch.isfinite(u).all() and (u != 0).all()) for u in every):
                    ways, top = self._of_wire(own, every), max(map(self._top, own, every))
                    rest = yield from self._shifts(ways, top)
                    left.setdefault(len(channels), []).append((rest, top))
            for wires in left.values():
                ways = [way for rest, _ in wires for way in rest if way.known is None]
                if len(wires) > 1 and self._enough(ways):
                    yield from self._shifts(ways, max(top for _, top in wires))

    def _sets(self, ports: Sequence[Port]) -> Iterator[tuple[list[Port], Tensor]]:
        """Yield channels that the same ports have, and these."""
        names = torch.randint(1 << 62, (len(ports),), generator=torch.Generator().manual_seed(1))
        pattern = torch.zeros(len(self.frame.roots), dtype=torch.long)  # sums of names are names of sets
        for name, port in zip(names, ports, strict=True):
            pattern[port.channels] += name
        for each in pattern[pattern != 0].unique():
            channels = torch.nonzero(pattern == each)[:, 0]
            yield [p for p in ports if bool((p.channels == channels[0]).any())], channels

    def _of_wire(self, ports: Sequence[Port], units: Sequence[Tensor]) -> list[Way]:
        """Return the ways of some ports, those of single positions if there are enough samples for these."""
        for apart in (True, False):
            ways = [way for p, u in zip(ports, units, strict=True) for way in self._ways(p, u, apart)]
            if self._enough(ways):
                return ways
        return []

    def _enough(self, ways: Sequence[Way]) -> bool:
        """Return whether samples can tell which combinations of ways are free: means may be free of all of them."""
        if not ways:
            return False
        samples, n = ways[0].g.shape
        return samples * max(1, n - 1) >= len(ways) + _SPARE

    def _shifts(self, ways: Sequence[Way], top: float) -> Generator[Translation, None, list[Way]]:
        """Yield what combinations of ways leave free. Return the ways that are in none."""
        ways = [way for k, way in enumerate(ways) if not any(map(way.repeats, ways[:k]))]
        free = self._combined(ways, top) if ways else torch.zeros(0, 0)
        for v in free.T:
            some = [(way, float(c)) for way, c in zip(ways, v, strict=True) if c != 0]
            if some:
                yield from self._tried(self._moved(some, self._varying(some)))
        yield from self._equal_shifts(ways, free, top)
        return [way for way, row in zip(ways, free, strict=True) if not bool(row.any())]

    def _equal_shifts(self, ways: Sequence[Way], free: Tensor, top: float) -> Iterator[Translation]:
        """Yield what combinations of ways leave free of equal constants alone, as behind a norm that takes the mean.

        Each combination that is free for all constants has a way of its own: without it, none of these is left.
        """
        single = (free != 0).sum(1) == 1
        own = {int(torch.nonzero(single & (column != 0))[0]) for column in free.T}
        plain = [way for k, way in enumerate(ways) if k not in own and (way.known is None or way.port.writes)]
        one = torch.ones(len(plain[0].port.rows) if plain else 1, 1, dtype=torch.float64)
        tried = list[Tensor]()
        for of in plain if len(one) > 1 else ():  # equal in the units of one of them
            u = torch.stack([units[of.port.nodes] for units in self.units])
            if any(torch.equal(u, each) for each in tried):
                continue
            tried.append(u)
            sums = [
                replace(way, g=(way.g / u).sum(1)[:, None], size=(way.size / u.abs()).sum(1)[:, None]) for way in plain
            ]
            left = [k for k, way in enumerate(sums) if not self._vanishes([(way.g, way.size)])]
            if len(left) < 2 or not self._enough([sums[k] for k in left]):
                continue
            for v in self._combined([sums[k] for k in left], top).T:
                some = [(plain[k], float(c)) for k, c in zip(left, v, strict=True) if c != 0]
                yield from self._tried(self._moved(some, one, of.port))

    def _varying(self, some: Sequence[tuple[Way, float]]) -> Tensor | None:
        """Return a basis without multiples of 1, or None: if ways write alone and each has them free."""
        n = len(some[0][0].port.rows)
        alone = all(way.bias is None and way.known is None and self._mean_is_free(way) for way, _ in some)
        return null_space(torch.ones(1, n, dtype=torch.float64))[0] if len(some) > 1 < n and alone else None

    def _ways(self, port: Port, u: Tensor, apart: bool) -> Iterator[Way]:
        """Yield the ways of one port, one for each position if they are `apart`."""
        last = len(self.walk.uses)
        if not port.writes:
            yield from self._reader(port, u)
            return
        if port.use not in self.lone and not self._alone(port.entries):
            return
        if port.use < last and port.use not in self.tables:
            if port.use in self.known:
                slopes = [s.written[port.use].slopes[:, port.rows] for s in self.drawn]
                summed = _summed([d * each for d, each in zip(slopes, u, strict=True)])
                yield Way(port, *summed, known=self.known[port.use])
            return
        g = self._gradients(port)
        if bool(self.given[port.entries].all()):
            return
        if g is None:
            if port.use < last:
                slopes = [s.written[port.use].slopes[:, port.rows] for s in self.drawn]
                yield Way(port, *_summed([d * each for d, each in zip(slopes, u, strict=True)]))
            return
        G = torch.stack(g) * u[..., None]  # (samples, n, columns)
        part = _parts_of(G) if apart else torch.zeros(G.shape[2], dtype=torch.long)
        for k in part.unique().tolist():
            columns = torch.nonzero(part == k)[:, 0]
            mine = G[..., columns]
            yield Way(port.at(torch.arange(len(port.rows)), columns), mine.sum(2), mine.abs().sum(2))

    def _reader(self, port: Port, u: Tensor) -> Iterator[Way]:
        """Yield what a reader takes back, by the nearest bias on the channels that it writes, if that is seen."""
        use, known = self.walk.uses[port.use], self.known.get(port.use)
        if known is not None:
            slopes = [-s.read[port.use].slopes[:, port.rows] for s in self.drawn]
            way = Way(port, *_summed([d * each for d, each in zip(slopes, u, strict=True)]), known=known)
            if float(way.g.norm()) > NOISE * float(way.size.norm()):
                yield way
            return
        nearest = self._nearest(port.use)
        if nearest is None or (g := self._gradients(nearest)) is None:
            return
        made, sizes = [], [s.read[port.use].slopes[:, port.rows].abs().sum(0) for s in self.drawn]
        for k, (each, reading) in enumerate(zip(g, self.readings, strict=True)):
            if not k or reading is not self.readings[k - 1]:
                V = use.values(reading).flatten(1)
            back = (each[:, 0] * self._ratio(k, nearest.nodes, use.out)) @ V
            made.append(-back.view(use.shape[1:]).sum(1)[port.rows] * u[k])
        way = Way(port, torch.stack(made), torch.stack(sizes) * u.abs(), nearest)
        if float(way.g.norm()) > NOISE * float(way.size.norm()):
            yield way

    def _nearest(self, n: int) -> Port | None:
        """Return the bias on the channels that a use writes that is added nearest to it, in their order."""
        use, found, last = self.walk.uses[n], dict[int, Port](), len(self.walk.uses)
        if n in self.biases:
            rows, entries = torch.arange(len(use.out)), Table.of(self.biases[n][:, None])
            return Port(last, use.memory, True, False, rows, use.out, rows, entries, entries)
        for p in self._leaves(use.out):
            q = self._of_nodes(p, use.out)
            if q is not None and self._alone(q.entries):
                name = self.frame.name_of(q)
                at = self.walk.taken[name][q.entries[0, 0] - self.frame.entries.start[name]]
                own = n in self.walk.biases and torch.equal(self.walk.biases[n], q.entries[:, 0])  # of other uses, too
                found.setdefault(0 if own else abs(int(at) - use.operation), q)
        return found[min(found)] if found else None

    def _top(self, port: Port, u: Tensor) -> float:
        """Return how large sums over tokens are on this side of a use, before anything cancels."""
        if port.use >= len(self.walk.uses):
            return 0.0
        sides = [(s.written if port.writes else s.read).get(port.use) for s in self.drawn]
        terms = [side.slopes[:, port.rows] * each for side, each in zip(sides, u, strict=True) if side is not None]
        return max((float(d.abs().sum(0).max()) for d in terms), default=0.0)

    def _combined(self, ways: Sequence[Way], top: float) -> Tensor:
        """Return combinations (ways, k) with sum of c g = 0, of few ways each. top: the size of sums on the wire."""
        rows = torch.stack([way.g for way in ways], 2).flatten(0, 1)
        size = torch.stack([way.size for way in ways], 2).amax((0, 1))
        size = size.clamp(min=_FLOOR * max(top, float(size.max())) + 1e-300)
        N, smallest = null_space(rows / size / len(rows) ** 0.5, scale=1.0)
        self.smallest = min(self.smallest, smallest)
        N = N / size[:, None]
        # Each has a way of its own, in which no other moves: one that adds, if there is one, for its constant to be 0.
        adding = torch.tensor([way.bias is None and way.known is None for way in ways])
        for k in range(N.shape[1]):
            left = N[:, k:].abs()
            free = (left.amax(1) > _CLEAR * left.max()) & adding
            row = int(free.int().argmax()) if bool(free.any()) else int(left.amax(1).argmax())
            column = int(left[row].argmax()) + k
            N[:, [k, column]] = N[:, [column, k]]
            N[:, k] = N[:, k] / N[row, k]
            factor = N[row].clone()
            factor[k] = 0
            N = N - N[:, k : k + 1] * factor
        return torch.where(N.abs() > _TINY * N.abs().amax(0, keepdim=True), N, 0.0)

    def _moved(
        self, some: Sequence[tuple[Way, float]], z: Tensor | Factor | None, of: Port | None = None
    ) -> Iterator[Translation]:
        """Yield z -> c u z in each way, for any z of a span, or for all if it is None; u over the units of another."""
        below = () if of is None else (of.nodes,)
        n = len(some[0][0].port.rows)
        known = [way.known for way, _ in some if way.known is not None]
        if any(each.sum != known[0].sum for each in known):
            self.refused.append(f"a translation of {self.frame.name_of(some[0][0].port)}: several sums of inputs")
            return
        if any(way.known is not None and not way.port.writes for way, _ in some):  # of a sum that must stay
            if n < 2:
                return
            below = (self.frame.nodes.wires[some[0][0].port.nodes],)
            z = null_space(torch.ones(1, n, dtype=torch.float64))[0]
            z = Product((_diagonal(torch.ones(n), known[0].of), z)) if known[0].of else z  # type: ignore[arg-type]
        by, parts = (known[0].sum if known and len(some) > 1 else None), list[Part]()
        for way, c in sorted(_merged(some), key=lambda each: each[0].bias is not None):  # first what is added
            constant, gains = self.frame.ratio((way.port.nodes,), below)
            rows = self._rows(way.port)
            if rows is None:
                return
            if way.bias is not None:
                M = self._taken(way, c, rows, below)
                M = M if z is None else Product((M, z))
                parts.append(Part(self._entries(way.bias.entries[:, 0]), M, by))
                continue
            if not way.port.writes and way.known is not None:
                M, whole = self._taken(way, c, rows, below), self._rows(self._side(way.port.use, True))
                if whole is None:
                    return
                parts.append(Part(whole, M if z is None else Product((M, z)), way.known.right))
                continue
            left: Tensor | Factor | None = _diagonal(c * constant, gains)
            if z is not None:
                left = z if left is None else Product((left, z))
            right = by if rows.columns == 1 else torch.ones(1, rows.columns)
            if rows.columns > 1 and by is not None:
                right = Product((by, torch.ones(1, rows.columns)))
            parts.append(Part(rows, left, right if way.known is None else way.known.right))
        if any(way.known is not None for way, _ in some):
            kind = "constant"
        else:
            kind = "shift" if any(bool(way.size.any()) for way, _ in some) else "unread"
        yield from self._made(kind, *_united(parts))

    def _taken(self, way: Way, c: float, rows: Rows, below: Sequence[Tensor]) -> Factor:
        """Return -c V u, u over others' units, in units of the bias of a reader (outputs, n), of all taps and rows."""
        use, n = self.walk.uses[way.port.use], len(way.port.rows)
        constant, gains = self.frame.ratio((way.port.nodes,), below)
        outputs, _, taps = use.shape
        V = Matrix(torch.full((outputs * taps,), -c), constant, rows, True, ((), gains))
        units = None if way.bias is None else _diagonal(*self.frame.ratio((way.bias.nodes,), (use.out,)))
        factors: list[Tensor | Factor] = [V] if units is None else [units, V]
        if taps > 1:
            factors.insert(-1, torch.eye(outputs).repeat_interleave(taps, 1))
        if len(rows) > n:
            factors.append(torch.eye(n).repeat(len(rows) // n, 1))
        return V if len(factors) == 1 else Product(tuple(factors))

    def _mean_is_free(self, way: Way) -> bool:
        """Return whether this way adds nothing by equal constants."""
        return self._vanishes(zip(way.g.sum(1)[:, None], way.size.sum(1)[:, None], strict=True))


def _classes(uses: Sequence[Use]) -> list[list[int]]:
    """Return the numbers of the uses, those of the same entries in one list, as of a layer that is run twice."""
    same = dict[tuple[object, ...], list[int]]()
    for n, use in enumerate(uses):
        theta = use.theta
        if theta.is_meta:
            key: tuple[object, ...] = (type(use.tokens), *theta.shape, *theta.stride(), int(theta.storage_offset()))
        else:
            key = (type(use.tokens), *theta.shape, theta.numpy().tobytes())
        same.setdefault(key, []).append(n)
    return list(same.values())


def _united(parts: Iterable[Part]) -> list[Part]:
    """Return parts of which those of the same entries are one: a bias may add a constant, and take back others."""
    made = list[Part]()
    for part in parts:
        place = part.rows.places[:, :1].flatten()
        for k, other in enumerate(made):
            there = other.rows.places[:, :1].flatten()
            same = other.rows.name == part.rows.name and other.rows.columns == part.rows.columns == 1
            if same and other.right is part.right is None and torch.equal(place.sort()[0], there.sort()[0]):
                eye = torch.eye(len(place), dtype=torch.float64)
                own = eye[place.argsort()[there.argsort().argsort()]]  # in the order of the other
                own = own if part.left is None else Product((own, part.left))  # type: ignore[assignment]
                made[k] = replace(other, left=Sum((eye if other.left is None else other.left, own)))
                break
        else:
            made.append(part)
    return made


def _merged(some: Sequence[tuple[Way, float]]) -> Iterator[tuple[Way, float]]:
    """Yield ways of one use as one, where they add the same: columns of writers, and all rows of a reader."""
    same: dict[tuple[object, ...], list[tuple[Way, float]]] = {}
    for way, c in some:
        port, c = way.port, float(round(c)) if abs(c - round(c)) < _TINY else c
        nodes = tuple(port.nodes.tolist()) if port.writes else ()
        same.setdefault((port.use, port.writes, port.dual, c, nodes), []).append((way, c))
    for pairs in same.values():
        (way, c), *others = pairs
        if not others:
            yield way, c
            continue
        ports, axis = [way.port for way, _ in pairs], int(way.port.writes)
        theta, spots = (
            Table.of(torch.cat(each, axis)) for each in ([p.entries for p in ports], [p.places for p in ports])
        )
        port = replace(ports[0], theta=theta, spots=spots)
        if not axis:
            every = zip(*((p.rows, p.nodes, p.channels) for p in ports), strict=True)
            rows, at, channels = (torch.cat(each) for each in every)
            port = replace(port, rows=rows, nodes=at, channels=channels)
        yield replace(way, port=port), c


def _diagonal(constant: Tensor, gains: Sequence[object]) -> Sparse | None:
    """Return a diagonal matrix of units, None if it is 1."""
    if bool((constant == 1).all()) and not gains:
        return None
    at = torch.arange(len(constant))
    return Sparse((len(at), len(at)), (Terms(torch.stack([at, at]), constant, tuple(gains)),))  # type: ignore[arg-type]


def _of_channels(port: Port, channels: Tensor) -> Port:
    """Return the rows of a port that have these channels, in their order."""
    order = torch.argsort(port.channels)
    return port.at(order[torch.searchsorted(port.channels[order], channels)])


def _all(flags: Iterable[Tensor]) -> bool:
    return all(bool(each.all()) for each in flags)


def _summed(tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.stack([t.sum(0) for t in tokens]), torch.stack([t.abs().sum(0) for t in tokens])


def _parts_of(g: Tensor) -> Tensor:
    """Return the number of the part of each column of g (samples, n, columns).

    Each column that all samples have is a part if there are few; others, as of longer inputs, or words of which one
    sample alone says at which positions they are, are of the same as the last before.
    """
    if g.shape[2] > _APART:
        return torch.zeros(g.shape[2], dtype=torch.long)
    return (g != 0).any(1).all(0).long().cumsum(0).clamp(min=1)
