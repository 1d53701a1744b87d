"""Find translations from vectors in a small span: of the rows or columns of a narrow map, or of another gradient.

| vector in a span | translation |
|---|---|
| dy of W, in the row space of V, which reads y | W += (1 - V^+ V) z |
| x - b of W, in the column space of U, which writes x | W += z (1 - U U^+), and its bias -= z (1 - U U^+) b |
| the gradient g of an entry b, a multiple of the gradient g' of b': g = c g' | b += z, b' -= c z |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import scipy.linalg
import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.beside import Beside
from quotient_manifolds.symmetries.charges.evidence import Evidence
from quotient_manifolds.symmetries.charges.frame import Port
from quotient_manifolds.symmetries.charges.kernel import NOISE, null_space
from quotient_manifolds.symmetries.charges.readings import Readings
from quotient_manifolds.symmetries.charges.shifts import Shifts
from quotient_manifolds.symmetries.charges.single_uses import SingleUses
from quotient_manifolds.symmetries.groups import Beyond, Factor, Matrix, Part, Product, Sparse, Terms, Translation
from quotient_manifolds.symmetries.groups.factors import basis

_FEW = 256
"""Maximum number of outputs whose gradients are tested for a proper subspace."""
_TINY = 1e-7
_FAINT = 1e-6
"""Relative to the largest gradient: smaller ones, such as behind a saturated softmax, are rounding errors."""


def translations(evidence: Evidence) -> Readings:
    """Return all translations that the evidence supports."""
    given, same = alike(evidence)
    single = SingleUses(evidence)
    found = [*same, *single.every(), *Beside(evidence).every()]
    found += [*Shifts(evidence, single.known, given).every(), *Spans(evidence).every()]
    return Readings(tuple(found), tuple(evidence.refused), evidence.largest, evidence.smallest)


def alike(evidence: Evidence) -> tuple[Tensor, list[Translation]]:
    """Return which entries of biases are redundant with earlier ones, bool (P,), and the translations between them.

    Only proportional gradients show this: biases of one sum, as in a recurrent net, need not be on a channel of a wire.
    """
    first, start = evidence.drawn[0].gradients, evidence.frame.entries.start
    given, found = torch.zeros(evidence.frame.entries.size, dtype=torch.bool), list[Translation]()
    names = [name for name in evidence.walk.leaves if name in first and first[name].ndim == 1]
    if not names:
        return given, found
    at = torch.cat([start[n] + torch.arange(len(first[n])) for n in names])
    G = torch.stack([torch.cat([s.gradients[n].double() for n in names]) for s in evidence.drawn])
    for pairs in _pairs(G, evidence.frame.owners(at)):
        e, f, c = at[pairs[0]], at[pairs[1]], _ratios(G, *pairs)
        k, given[f] = torch.arange(len(c)), True
        left = Sparse((len(c), len(c)), (Terms(torch.stack([k, k]), -c),))
        found += evidence.made("shift", Part(evidence.entries(e)), Part(evidence.entries(f), left))
    return given, found


def _pairs(G: Tensor, owner: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (earlier, later) columns of G that are multiples of each other, for two parameters, each once at a time.

    Columns that are nonzero in one sample only are left out: any two of the same sample are multiples.
    """
    G = G * ((G != 0).sum(0) > 1)
    norm, every = G.norm(dim=0), torch.arange(G.shape[1])
    key = torch.randn(len(G), generator=torch.Generator().manual_seed(1), dtype=G.dtype) @ (G / norm.clamp(1e-300))
    unit, (key, order) = G / norm.clamp(1e-300) * key.sign(), key.abs().sort(stable=True)
    new = torch.ones(len(key), dtype=torch.bool)
    new[1:] = (key.diff() > NOISE) | ((unit[:, order[1:]] - unit[:, order[:-1]]).abs().amax(0) > NOISE)
    group = torch.empty_like(order).index_copy_(0, order, new.cumsum(0) - 1)
    _, size = (inside := group.sort(stable=True))[0].unique_consecutive(return_counts=True)
    turn = torch.empty_like(order).index_copy_(0, inside[1], every - (size.cumsum(0) - size).repeat_interleave(size))
    eldest = inside[1][size.cumsum(0) - size][group]
    more = torch.nonzero((turn > 0) & (norm > 0))[:, 0]
    several = torch.stack([turn[more], owner[eldest[more]], owner[more]], 1)
    for one in several.unique(dim=0):
        f = more[(several == one).all(1)]
        yield eldest[f], f


def _ratios(G: Tensor, e: Tensor, f: Tensor) -> Tensor:
    """Return c with g_e = c g_f for columns of G, rounded to integers if near them."""
    c = (G[:, e] * G[:, f]).sum(0) / G[:, f].square().sum(0)
    return torch.where((c - c.round()).abs() < _TINY, c.round(), c)


def _whole(free: Tensor) -> Tensor:
    """Return a basis (n, k) of the same span with k rows of the identity, and other entries rounded if near integers.

    Exact rows are free of the rounding errors of slopes; small slopes are remainders of sums of larger numbers.
    """
    rows = torch.from_numpy(scipy.linalg.qr(free.mT.numpy(), mode="r", pivoting=True)[1])[: free.shape[1]].long()
    found = torch.linalg.solve(free[rows].mT, free.mT).mT
    return torch.where((found - found.round()).abs() < _TINY, found.round(), found)


class Spans:
    """Find the part of a wide map's output that narrow readers ignore, or of its input that a narrow writer misses."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence, self.frame, self.uses = evidence, evidence.frame, evidence.walk.uses
        self._spans = dict[int, Tensor | None]()

    def every(self) -> Iterator[Translation]:
        """Yield all translations."""
        for n, use in enumerate(self.uses):
            if self.evidence.alone(use.entries):
                yield from self.evidence.tried(self._unread(n))
                if n not in self.evidence.tables and use.shape[2] == 1:
                    yield from self.evidence.tried(self._unreached(n))

    def _unread(self, n: int) -> Iterator[Translation]:
        out, slopes = self.uses[n].out, [s.written[n].slopes for s in self.evidence.drawn]
        readers = list[tuple[Factor, list[Tensor]]]()
        for port in self._narrow(n, out, writes=False):
            span, (V, numbers) = self._span(port.use), self._rows(port, port.nodes, out)
            readers.append((V, numbers) if span is None else (Product((span, V)), [span @ v for v in numbers]))
        for some in (*([each] for each in readers), *([readers] if len(readers) > 1 else ())):
            spans = [torch.cat(each) for each in zip(*(numbers for _, numbers in some), strict=True)]
            if len(spans[0]) < len(out) and self._within(slopes, spans):
                rows = self.evidence.rows(self.evidence.side(n, True))
                beyond = Beyond(tuple(V for V, _ in some))
                yield from self.evidence.made("unread", Part(rows, beyond)) if rows is not None else ()
                return

    def _unreached(self, n: int) -> Iterator[Translation]:
        into, x = self.uses[n].into, [s.read[n].values for s in self.evidence.drawn]
        leaves = [p for p in self._ports(into, True) if p.use >= len(self.uses) and len(p.theta.steps) == 1]
        for port in self._narrow(n, into, writes=True):
            U, numbers = self._rows(port, into, port.nodes)
            if self._within(x, numbers):
                yield from self._beside(n, U)
                return
            for bias in leaves:
                _, values = self._rows(bias, into, bias.nodes)
                if self._within([each - b for each, b in zip(x, values, strict=True)], numbers):
                    yield from self._beside(n, U, bias)
                    return

    def _beside(self, n: int, U: Factor, bias: Port | None = None) -> Iterator[Translation]:
        """Yield translations of a map that reads U h + b, outside the column space of U; its bias compensates for b."""
        into, rows = self.uses[n].into, self.evidence.rows(self.evidence.side(n, True))
        if rows is None:
            return
        if bias is None:
            yield from self.evidence.made("unreached", Part(rows, None, Beyond((U,))))
        elif n not in self.evidence.biases:
            if U.shape[0] + 1 < len(into):  # only rounding errors are left of a square matrix
                both = U, self._rows(bias, into, bias.nodes)[0]
                yield from self.evidence.made("unreached", Part(rows, None, Beyond(both)))
        else:
            constant, gains = self.frame.ratio((into,), (bias.nodes,))
            column = Matrix(-constant, torch.ones(1), self.frame.rows(bias), gains=(gains, ()))
            given = Part(self.evidence.entries(self.evidence.biases[n]), None, Product((Beyond((U,)), column)))
            yield from self.evidence.made("unreached", Part(rows, None, Beyond((U,))), given)

    def _ports(self, nodes: Tensor, writes: bool) -> Iterator[Port]:
        """Yield the ports that write (or read) the channels of these nodes, with rows in the order of the nodes."""
        for p in self.frame.ports:
            if p.writes == writes and (port := self.evidence.of_nodes(p, nodes)) is not None:
                yield port

    def _narrow(self, n: int, nodes: Tensor, writes: bool) -> Iterator[Port]:
        """Yield the ports of other weights than use n's with fewer entries (or spanning gradients) than channels."""
        for port in self._ports(nodes, writes) if len(nodes) > 1 else ():
            if port.use >= len(self.uses) or port.memory == self.uses[n].memory:
                continue
            span = None if writes else self._span(port.use)
            if (len(port.theta.steps) if span is None else len(span)) < len(nodes):
                yield port

    def _span(self, n: int) -> Tensor | None:
        """Return rows that span the gradients of a use's outputs at all weights; None without a proper subspace."""
        if n not in self._spans:
            self._spans[n], use = None, self.uses[n]
            d = torch.cat([s.written[n].slopes for s in self.evidence.drawn])
            if use.shape[2] == 1 and 1 < d.shape[1] <= min(_FEW, len(d)):
                size = d.norm(dim=1, keepdim=True)
                free = null_space(d / size.clamp(min=max(_FAINT * float(size.max()), 1e-300)))[0]
                if free.shape[1]:
                    self._spans[n] = null_space(_whole(free).mT)[0].mT
        return self._spans[n]

    def _rows(self, port: Port, above: Tensor, below: Tensor) -> tuple[Factor, list[Tensor]]:
        """Return a port with channels as columns, in units of `above` over `below`, and its values by sample."""
        constant, gains = self.frame.ratio((above,), (below,))
        rows = self.frame.rows(port)  # of one parameter
        numbers = [
            (reading.at(port.memory, port.places)[0] * self.evidence.ratio(k, above, below)[:, None]).mT
            for k, reading in enumerate(self.evidence.readings)
        ]
        return Matrix(torch.ones(rows.columns), constant, rows, True, ((), gains)), numbers

    def _within(self, vectors: Sequence[Tensor], spans: Sequence[Tensor]) -> bool:
        """Return whether vectors (tokens, n) are in the span of rows (r, n), sample by sample."""
        pairs = zip(vectors, map(basis, spans), strict=True)
        return self.evidence.vanishes((d - (d @ Q.mT) @ Q, d.abs()) for d, Q in pairs)
