"""Find translations from the token vectors of single uses: free means, idle units, and constants behind a norm.

For y = W x, with dy the derivative of a loss by y, and any z:

| vanishes at all tokens | translation |
|---|---|
| sum of dy | W += 1 z^T: the mean of y is free |
| dy, or x, of a channel | W += z in its row, or column |
| sum of (x - b) / g | W += z / g, and its bias -= z (sum of b / g), behind a norm with gains g and biases b |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.evidence import MOST_APART, Evidence
from quotient_manifolds.symmetries.charges.frame import Port
from quotient_manifolds.symmetries.groups import Gain, Matrix, Part, Product, Rows, Translation

_CALM = 12
"""Minimum number of fresh draws before units that were never active count as idle."""


@dataclass(frozen=True, eq=False)
class Known:
    """Hold a known sum of inputs: x . (1 / g) = sum of b / g at all tokens.

    right: 1 / g (1, inputs). sum: the sum of b / g (1, 1). of: the gains g if they are of a norm of data.
    """

    right: Matrix
    sum: Product
    of: tuple[Gain, ...] = ()


class SingleUses:
    """Find translations of one weight and its bias."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.known = dict[int, Known]()
        """By use, if it has no bias of its own."""

    def every(self) -> Iterator[Translation]:
        """Yield all translations."""
        yield from self._means()
        yield from self._idle()
        yield from self._constants()

    def _means(self) -> Iterator[Translation]:
        """Yield translations of the mean: equal numbers for all channels, in the units of some nodes of their wire."""
        for n, use in enumerate(self.evidence.walk.uses):
            slopes = [s.written[n].slopes for s in self.evidence.drawn]
            if len(use.out) < 2 or n not in self.evidence.lone or (equal := self._equal(use.out, slopes)) is None:
                continue
            if (rows := self.evidence.rows(self.evidence.side(n, False))) is not None:
                one = torch.ones(1)
                yield from self.evidence.made("mean", Part(rows, None, Matrix(one, equal[0], gains=((), equal[1]))))
        for port in self.evidence.frame.ports:
            of_itself = port.use >= len(self.evidence.walk.uses) and self.evidence.alone(port.entries)
            if len(port.rows) < 2 or not of_itself or (g := self.evidence.gradients(port)) is None:
                continue
            if (axis := self._axis(port)) is not None:
                yield from self.evidence.made("mean", axis)
                continue
            every = torch.arange(g[0].shape[1])
            columns, equal = every, self._equal(port.nodes, [d.mT for d in g])
            if equal is None and 1 < len(every) <= MOST_APART:  # some positions may be free, e.g. if one token is read
                free = [self._equal(port.nodes, [d[:, k : k + 1].mT for d in g]) is not None for k in every]
                columns = every[torch.tensor(free)]
                equal = self._equal(port.nodes, [d[:, columns].mT for d in g])
            if (
                equal is not None
                and (rows := self.evidence.rows(port.at(torch.arange(len(port.rows)), columns))) is not None
            ):
                yield from self.evidence.made("mean", Part(rows, Matrix(equal[0], torch.ones(1), gains=(equal[1], ()))))

    def _axis(self, port: Port) -> Part | None:
        """Return a part that adds equal numbers along one axis of a parameter, as to all keys of a query, or None."""
        name = self.evidence.frame.name_of(port)
        shape = tuple(self.evidence.frame.entries.shapes[name])
        if torch.Size(shape).numel() != port.entries.numel() or sum(size > 1 for size in shape) < 2:
            return None
        numbers, gradients = (
            torch.arange(port.entries.numel()).view(shape),
            [s.gradients[name] for s in self.evidence.drawn],
        )
        for axis, size in reversed([*enumerate(shape)]):
            if size > 1 and self.evidence.vanishes(
                (g.double().sum(axis), g.double().abs().sum(axis)) for g in gradients
            ):
                rows = Rows.at(name, shape, numbers.movedim(axis, 0).reshape(size, -1))
                return Part(rows, torch.ones(size, 1, dtype=torch.float64))
        return None

    def _equal(self, nodes: Tensor, slopes: Sequence[Tensor]) -> tuple[Tensor, tuple[Gain, ...]] | None:
        """Return units u of nodes over other nodes of the same wire with u . slopes = 0 at all tokens, or None.

        slopes: (tokens, nodes), by sample.
        """
        tried = list[Tensor]()
        own = (
            q.nodes
            for p in self.evidence.ports(nodes)
            if p.writes and (q := self.evidence.of_nodes(p, nodes)) is not None
        )
        for of in (nodes, torch.where(nodes > 0, self.evidence.frame.nodes.wires[nodes], 0), *own):
            u = self.evidence.ratio(0, nodes, of)
            if any(torch.equal(u, each) for each in tried):
                continue
            tried.append(u)
            terms = (d * self.evidence.ratio(k, nodes, of) for k, d in enumerate(slopes))
            if self.evidence.vanishes((t.sum(1), t.abs().sum(1)) for t in terms):
                with suppress(ValueError):  # groups cannot read some gains
                    return self.evidence.frame.ratio((nodes,), (of,))
        return None

    def _idle(self) -> Iterator[Translation]:
        """Yield translations without effect: for outputs of uses that nothing reads, and inputs that are always 0."""
        uses = {n: self.evidence.walk.uses[n] for n in self.evidence.lone}
        seen: dict[tuple[int, bool], Tensor] = {}
        k, last, count = 0, 0, -1
        # At least as many draws show nothing new as came before: each may activate a single unit behind a maximum.
        while k < max(len(self.evidence.drawn) + _CALM, 2 * last) and not (
            k >= len(self.evidence.drawn) and _all(seen.values())
        ):
            sample = self.evidence.drawn[k] if k < len(self.evidence.drawn) else self.evidence.draw()
            for n in uses:
                for writes in (True, False) if uses[n].tokens.place is not None and uses[n].shape[2] == 1 else (True,):
                    t = sample.written[n].slopes if writes else sample.read[n].values
                    if len(t):  # an expert without tokens is no evidence
                        seen[n, writes] = seen.get((n, writes), torch.zeros(t.shape[1], dtype=torch.bool)) | (
                            t != 0
                        ).any(0)
            k, before, count = k + 1, count, sum(int(each.sum()) for each in seen.values())
            last = k if count > before else last
        for (n, writes), each in seen.items():
            own, other = (torch.nonzero(flags)[:, 0] for flags in (~each, seen[n, True]))
            if len(own) and (writes or len(other)):
                port = self.evidence.side(n, writes).at(own, None if writes else other)
                if (rows := self.evidence.rows(port)) is not None:
                    yield from self.evidence.made("unread" if writes else "unreached", Part(rows))
                if writes and n in self.evidence.biases:
                    yield from self.evidence.made("unread", Part(self.evidence.entries(self.evidence.biases[n][own])))

    def _constants(self) -> Iterator[Translation]:
        """Yield W += z / g and c -= z (sum of b / g) for weights W with bias c behind norms."""
        for n, use in enumerate(self.evidence.walk.uses):
            if n not in self.evidence.tables and use.shape[2] == 1 and len(use.into) > 1 and n in self.evidence.lone:
                yield from self.evidence.tried(self._behind(n))

    def _behind(self, n: int) -> Iterator[Translation]:
        use, rows = self.evidence.walk.uses[n], self.evidence.rows(self.evidence.side(n, True))
        into, bases = use.into, self._bases(use.into)
        own = [port for p in self.evidence.leaves(into) if (port := self.evidence.of_nodes(p, into)) is not None]
        every = product(bases, (None, *own), (None, *own)) if rows is not None else ()
        for base, port, by in every:
            if port is by is not None or not self._sums(n, base, port, by):
                continue
            right = self._over(base, into, by)
            parts = [Part(rows, None, right)]  # type: ignore[arg-type]
            if port is not None:
                b = Matrix(torch.ones(len(into)), torch.ones(1), self.evidence.frame.rows(port))
                total = Product((self._over(base, port.nodes, by), b))
                if n in self.evidence.biases:
                    parts.append(
                        Part(
                            self.evidence.entries(self.evidence.biases[n]),
                            None,
                            Product((torch.full((1, 1), -1.0), total)),
                        )
                    )
                elif base is bases[0]:
                    self.known[n] = Known(right, total, () if by is None else (self._gain(by, 1.0),))
                    return
                else:
                    continue
            yield from self.evidence.made("constant", *parts)
            return

    def _bases(self, nodes: Tensor) -> list[Tensor]:
        """Return the eldest nodes of these channels, and the nodes before each gain that yields all of them."""
        wires, up = self.evidence.frame.nodes.wires, torch.zeros_like(self.evidence.frame.nodes.wires)
        bases = [torch.where(nodes > 0, wires[nodes], 0)]
        for gain in self.evidence.walk.gains:
            up[gain.after] = gain.before
            if bool((before := up[nodes]).all()):
                bases.append(before)
            up[gain.after] = 0
        return bases

    def _sums(self, n: int, base: Tensor, bias: Port | None, by: Port | None) -> bool:
        """Return whether (x - b) / w sums to 0 over channels at all tokens of a use, with gains w of a norm of data."""

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for k, s in enumerate(self.evidence.drawn):
                x = s.read[n].values * self.evidence.ratio(k, base, self.evidence.walk.uses[n].into)
                w = 1.0 if by is None else self.evidence.readings[k].at(by.memory, by.places[:, 0])[0]
                b = torch.zeros(1).double() if bias is None else self._bias(k, bias, base)
                yield ((x - b) / w).sum(1), (x / w).abs().sum(1)

        return self.evidence.vanishes(pairs())

    def _over(self, above: Tensor, below: Tensor, by: Port | None) -> Matrix:
        """Return the units of `above` over the units of `below` and, if given, over the entries of a port, as a row."""
        constant, gains = self.evidence.frame.ratio((above,), (below,))
        return Matrix(torch.ones(1), constant, gains=((), gains if by is None else (*gains, self._gain(by, -1.0))))

    def _gain(self, port: Port, power: float) -> Gain:
        name = self.evidence.frame.name_of(port)
        places = port.entries[:, 0] - self.evidence.frame.entries.start[name]
        return Gain.of(name, tuple(self.evidence.frame.entries.shapes[name]), places, power)

    def _bias(self, k: int, port: Port, base: Tensor) -> Tensor:
        return self.evidence.readings[k].at(port.memory, port.places[:, 0])[0] * self.evidence.ratio(
            k, base, port.nodes
        )


def _all(flags: Iterable[Tensor]) -> bool:
    return all(bool(each.all()) for each in flags)
