"""Find shifts: constants that some biases add to a wire and others take back.

Each way to add a constant z to the channels of a wire changes the loss by z . g, to first order. Here g is the gradient
of a bias, the sum over tokens of dy of a table, or minus the sum of dx of a reader, whose bias takes V z back.
Combinations of ways with sum of c g = 0 are shifts, for any z.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.evidence import MOST_APART, Evidence
from quotient_manifolds.symmetries.charges.frame import Port, Table
from quotient_manifolds.symmetries.charges.kernel import NOISE, null_space
from quotient_manifolds.symmetries.charges.single_uses import Known
from quotient_manifolds.symmetries.groups import Factor, Matrix, Part, Product, Rows, Sum, Translation
from quotient_manifolds.symmetries.groups.factors import diagonal

_FLOOR, _SPARE, _TINY, _CLEAR = 1e-3, 2, 1e-7, 1e-3


@dataclass(frozen=True, eq=False)
class Way:
    """Hold one way to add constants to n channels: g (samples, n), and `size`, the sums of its absolute summands.

    port: the entries, one row per channel; for a reader, the entries of its matrix. bias: for a reader, the entries
    that take constants back, in the order of its outputs and in their units. known: for a weight behind a norm, the
    known sum of its inputs; all other ways are multiplied by this sum.
    """

    port: Port
    g: Tensor
    size: Tensor
    bias: Port | None = None
    known: Known | None = None

    def repeats(self, other: Way) -> bool:
        """Return whether the other way has the same matrix and bias, as for a map that is used twice."""
        if self.bias is None or other.bias is None:
            return False
        pairs = ((self.bias.theta, other.bias.theta), (self.port.theta, other.port.theta))
        return all(torch.equal(a.starts, b.starts) and torch.equal(a.steps, b.steps) for a, b in pairs)


class Shifts:
    """Find shifts of constants along wires."""

    def __init__(self, evidence: Evidence, known: Mapping[int, Known], given: Tensor) -> None:
        """Take known sums of inputs by use, and flags of redundant entries, which `spans.alike` has translated."""
        self.evidence, self.known, self.given = evidence, known, given

    def every(self) -> Iterator[Translation]:
        """Yield the shifts of each set of channels with the same ports, then shifts across sets of the same size.

        The latter combine the remaining ways: a maximum over tokens, for example, passes constants on to another wire.
        """
        for dual in (False, True):
            ports = [p for p in self.evidence.frame.ports if p.dual == dual]
            left = dict[int, list[tuple[list[Way], float]]]()
            for some, channels in self._sets(ports):
                own = [_of_channels(p, channels) for p in some]
                every = [torch.stack([u[p.nodes] for u in self.evidence.units]) for p in own]
                if all(bool(torch.isfinite(u).all() and (u != 0).all()) for u in every):
                    ways, top = self._of_wire(own, every), max(map(self._top, own, every))
                    rest = yield from self._shifts(ways, top)
                    left.setdefault(len(channels), []).append((rest, top))
            for wires in left.values():
                ways = [way for rest, _ in wires for way in rest if way.known is None]
                if len(wires) > 1 and self._enough(ways):
                    yield from self._shifts(ways, max(top for _, top in wires))

    def _sets(self, ports: Sequence[Port]) -> Iterator[tuple[list[Port], Tensor]]:
        """Yield (ports, channels) for each set of channels that have the same ports."""
        names = torch.randint(1 << 62, (len(ports),), generator=torch.Generator().manual_seed(1))
        pattern = torch.zeros(len(self.evidence.frame.roots), dtype=torch.long)  # a sum of names identifies a set
        for name, port in zip(names, ports, strict=True):
            pattern[port.channels] += name
        for each in pattern[pattern != 0].unique():
            channels = torch.nonzero(pattern == each)[:, 0]
            yield [p for p in ports if bool((p.channels == channels[0]).any())], channels

    def _of_wire(self, ports: Sequence[Port], units: Sequence[Tensor]) -> list[Way]:
        """Return the ways of these ports, separate for each position if samples suffice; empty if they never do."""
        for apart in (True, False):
            ways = [way for p, u in zip(ports, units, strict=True) for way in self._ways(p, u, apart)]
            if self._enough(ways):
                return ways
        return []

    def _enough(self, ways: Sequence[Way]) -> bool:
        """Return whether samples suffice to tell which combinations are free; means may be free in all of them."""
        if not ways:
            return False
        samples, n = ways[0].g.shape
        return samples * max(1, n - 1) >= len(ways) + _SPARE

    def _shifts(self, ways: Sequence[Way], top: float) -> Generator[Translation, None, list[Way]]:
        """Yield the translations of the free combinations of ways. Return the ways that no combination contains."""
        ways = [way for k, way in enumerate(ways) if not any(map(way.repeats, ways[:k]))]
        free = self._combined(ways, top) if ways else torch.zeros(0, 0)
        for v in free.T:
            some = [(way, float(c)) for way, c in zip(ways, v, strict=True) if c != 0]
            if some:
                yield from self.evidence.tried(self._moved(some, self._varying(some)))
        return [way for way, row in zip(ways, free, strict=True) if not bool(row.any())]

    def _varying(self, some: Sequence[tuple[Way, float]]) -> Tensor | None:
        """Return a basis of constants with mean 0 if all ways just add, and leave equal constants free; else None."""
        n = len(some[0][0].port.rows)
        alone = all(way.bias is None and way.known is None and self._mean_is_free(way) for way, _ in some)
        return null_space(torch.ones(1, n, dtype=torch.float64))[0] if len(some) > 1 < n and alone else None

    def _ways(self, port: Port, u: Tensor, apart: bool) -> Iterator[Way]:
        """Yield the ways of one port, a separate one for each position if `apart`."""
        last = len(self.evidence.walk.uses)
        if not port.writes:
            yield from self._reader(port, u)
            return
        if port.use not in self.evidence.lone and not self.evidence.alone(port.entries):
            return
        if port.use < last and port.use not in self.evidence.tables:
            if port.use in self.known:
                slopes = [s.written[port.use].slopes[:, port.rows] for s in self.evidence.drawn]
                summed = _summed([d * each for d, each in zip(slopes, u, strict=True)])
                yield Way(port, *summed, known=self.known[port.use])
            return
        g = self.evidence.gradients(port)
        if bool(self.given[port.entries].all()):
            return
        if g is None:
            if port.use < last:
                slopes = [s.written[port.use].slopes[:, port.rows] for s in self.evidence.drawn]
                yield Way(port, *_summed([d * each for d, each in zip(slopes, u, strict=True)]))
            return
        G = torch.stack(g) * u[..., None]  # (samples, n, columns)
        part = _parts_of(G) if apart else torch.zeros(G.shape[2], dtype=torch.long)
        for k in part.unique().tolist():
            columns = torch.nonzero(part == k)[:, 0]
            mine = G[..., columns]
            yield Way(port.at(torch.arange(len(port.rows)), columns), mine.sum(2), mine.abs().sum(2))

    def _reader(self, port: Port, u: Tensor) -> Iterator[Way]:
        """Yield the way in which a reader's nearest bias takes constants back, unless its g is a rounding error."""
        use, known = self.evidence.walk.uses[port.use], self.known.get(port.use)
        if known is not None:
            slopes = [-s.read[port.use].slopes[:, port.rows] for s in self.evidence.drawn]
            way = Way(port, *_summed([d * each for d, each in zip(slopes, u, strict=True)]), known=known)
            if float(way.g.norm()) > NOISE * float(way.size.norm()):
                yield way
            return
        nearest = self._nearest(port.use)
        if nearest is None or (g := self.evidence.gradients(nearest)) is None:
            return
        made, sizes = [], [s.read[port.use].slopes[:, port.rows].abs().sum(0) for s in self.evidence.drawn]
        for k, (each, reading) in enumerate(zip(g, self.evidence.readings, strict=True)):
            if not k or reading is not self.evidence.readings[k - 1]:
                V = use.values(reading).flatten(1)
            back = (each[:, 0] * self.evidence.ratio(k, nearest.nodes, use.out)) @ V
            made.append(-back.view(use.shape[1:]).sum(1)[port.rows] * u[k])
        way = Way(port, torch.stack(made), torch.stack(sizes) * u.abs(), nearest)
        if float(way.g.norm()) > NOISE * float(way.size.norm()):
            yield way

    def _nearest(self, n: int) -> Port | None:
        """Return the bias that is added nearest to a use, on the channels that it writes, in their order, or None."""
        use, found, last = self.evidence.walk.uses[n], dict[int, Port](), len(self.evidence.walk.uses)
        if n in self.evidence.biases:
            rows, entries = torch.arange(len(use.out)), Table.of(self.evidence.biases[n][:, None])
            return Port(last, use.memory, True, False, rows, use.out, rows, entries, entries)
        for p in self.evidence.leaves(use.out):
            q = self.evidence.of_nodes(p, use.out)
            if q is not None and self.evidence.alone(q.entries):
                name = self.evidence.frame.name_of(q)
                at = self.evidence.walk.taken[name][q.entries[0, 0] - self.evidence.frame.entries.start[name]]
                own = n in self.evidence.walk.biases and torch.equal(
                    self.evidence.walk.biases[n], q.entries[:, 0]
                )  # other uses share this bias
                found.setdefault(0 if own else abs(int(at) - use.operation), q)
        return found[min(found)] if found else None

    def _top(self, port: Port, u: Tensor) -> float:
        """Return the largest sum over tokens of absolute slopes on this side of a use, before anything cancels."""
        if port.use >= len(self.evidence.walk.uses):
            return 0.0
        sides = [(s.written if port.writes else s.read).get(port.use) for s in self.evidence.drawn]
        terms = [side.slopes[:, port.rows] * each for side, each in zip(sides, u, strict=True) if side is not None]
        return max((float(d.abs().sum(0).max()) for d in terms), default=0.0)

    def _combined(self, ways: Sequence[Way], top: float) -> Tensor:
        """Return sparse combinations c (ways, k) with sum of c g = 0. top: the largest `_top` on the wire."""
        rows = torch.stack([way.g for way in ways], 2).flatten(0, 1)
        size = torch.stack([way.size for way in ways], 2).amax((0, 1))
        size = size.clamp(min=_FLOOR * max(top, float(size.max())) + 1e-300)
        N, smallest = null_space(rows / size / len(rows) ** 0.5, scale=1.0)
        self.evidence.smallest = min(self.evidence.smallest, smallest)
        N = N / size[:, None]
        # Each combination gets a way that no other contains, preferably one that adds, so that its constant can be 0.
        # The next choice is a way of a sum that must stay, because it takes no constant along that sum.
        adding = torch.tensor([way.bias is None and way.known is None for way in ways])
        summing = torch.tensor([way.known is not None for way in ways])
        for k in range(N.shape[1]):
            left = N[:, k:].abs()
            some = left.amax(1) > _CLEAR * left.max()
            first = next((own for own in (some & adding, some & summing) if bool(own.any())), None)
            row = int(left.amax(1).argmax()) if first is None else int(first.int().argmax())
            column = int(left[row].argmax()) + k
            N[:, [k, column]] = N[:, [column, k]]
            N[:, k] = N[:, k] / N[row, k]
            factor = N[row].clone()
            factor[k] = 0
            N = N - N[:, k : k + 1] * factor
        return torch.where(N.abs() > _TINY * N.abs().amax(0, keepdim=True), N, 0.0)

    def _moved(self, some: Sequence[tuple[Way, float]], z: Tensor | Factor | None) -> Iterator[Translation]:
        """Yield the translation by c u z in each way, for all vectors in the span of `z`, or all if it is None."""
        below: tuple[Tensor, ...] = ()
        n = len(some[0][0].port.rows)
        known = [way.known for way, _ in some if way.known is not None]
        if any(each.sum != known[0].sum for each in known):
            self.evidence.refused.append(
                f"a translation of {self.evidence.frame.name_of(some[0][0].port)}: several sums of inputs"
            )
            return
        if any(way.known is not None and not way.port.writes for way, _ in some):  # the sum must stay
            if n < 2:
                return
            below = (self.evidence.frame.nodes.wires[some[0][0].port.nodes],)
            z = null_space(torch.ones(1, n, dtype=torch.float64))[0]
            z = Product((diagonal(torch.ones(n), known[0].of), z)) if known[0].of else z  # type: ignore[arg-type]
        by, parts = (known[0].sum if known and len(some) > 1 else None), list[Part]()
        for way, c in sorted(_merged(some), key=lambda each: each[0].bias is not None):  # ways that add come first
            constant, gains = self.evidence.frame.ratio((way.port.nodes,), below)
            rows = self.evidence.rows(way.port)
            if rows is None:
                return
            if way.bias is not None:
                M = self._taken(way, c, rows, n, below)
                M = M if z is None else Product((M, z))
                parts.append(Part(self.evidence.entries(way.bias.entries[:, 0]), M, by))
                continue
            if not way.port.writes and way.known is not None:
                M = self._taken(way, c, rows, n, below)
                whole = self.evidence.rows(self.evidence.side(way.port.use, True))
                if whole is None:
                    return
                parts.append(Part(whole, M if z is None else Product((M, z)), way.known.right))
                continue
            left: Tensor | Factor | None = diagonal(c * constant, gains)
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
        yield from self.evidence.made(kind, *_united(parts))

    def _taken(self, way: Way, c: float, rows: Rows, n: int, below: Sequence[Tensor]) -> Factor:
        """Return -c V u (outputs, n) of a reader, for all taps and rows, in units of its bias over units of `below`."""
        use = self.evidence.walk.uses[way.port.use]
        constant, gains = self.evidence.frame.ratio((way.port.nodes,), below)
        outputs, _, taps = use.shape
        V = Matrix(torch.full((outputs * taps,), -c), constant, rows, True, ((), gains))
        units = None if way.bias is None else diagonal(*self.evidence.frame.ratio((way.bias.nodes,), (use.out,)))
        factors: list[Tensor | Factor] = [V] if units is None else [units, V]
        if taps > 1:
            factors.insert(-1, torch.eye(outputs).repeat_interleave(taps, 1))
        if len(rows) > n:
            factors.append(torch.eye(n).repeat(len(rows) // n, 1))
        return V if len(factors) == 1 else Product(tuple(factors))

    def _mean_is_free(self, way: Way) -> bool:
        """Return whether equal constants on all channels have no charge in this way."""
        return self.evidence.vanishes(zip(way.g.sum(1)[:, None], way.size.sum(1)[:, None], strict=True))


def _united(parts: Iterable[Part]) -> list[Part]:
    """Merge parts with the same entries: a bias may add one constant and take back others."""
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
    """Merge the ways of one use with the same c: columns of writers on the same nodes, and all rows of a reader."""
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


def _of_channels(port: Port, channels: Tensor) -> Port:
    """Return the rows of a port that have these channels, in their order."""
    order = torch.argsort(port.channels)
    return port.at(order[torch.searchsorted(port.channels[order], channels)])


def _summed(tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.stack([t.sum(0) for t in tokens]), torch.stack([t.abs().sum(0) for t in tokens])


def _parts_of(g: Tensor) -> Tensor:
    """Return the number of the part of each column of g (samples, n, columns).

    If there are few columns, each one that is nonzero in all samples begins a part. The others, such as positions of
    longer inputs or words that some samples lack, belong to the part before them.
    """
    if g.shape[2] > MOST_APART:
        return torch.zeros(g.shape[2], dtype=torch.long)
    return (g != 0).any(1).all(0).long().cumsum(0).clamp(min=1)
