"""Find translations, from token vectors, by which maps with the same input compensate for one another.

For uses y = W x of several weights, and any z:

| vanishes at all tokens | translation |
|---|---|
| dy of V minus dy of W | V += z, W -= z |
| dy of A minus (B^T dy of W) | A += z, W -= B z |
| (x of B minus A x), and dy of B minus dy of W | B += z, W -= z A |
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.evidence import Evidence
from quotient_manifolds.symmetries.groups import Matrix, Part, Translation
from quotient_manifolds.symmetries.groups.factors import diagonal


class Beside:
    """Compare parallel maps, and a map parallel to the product of two."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence

    def every(self) -> Iterator[Translation]:
        """Yield the translations by which maps with the same input compensate for one another."""
        uses, same = self.evidence.walk.uses, dict[tuple[object, ...], list[int]]()
        for n, use in enumerate(uses):
            if n not in self.evidence.tables and use.shape[2] == 1 and n in self.evidence.lone:
                x = self.evidence.drawn[0].read[n].values
                same.setdefault((x.shape, float(x.sum()), float(x.square().sum())), []).append(n)
        between = dict[tuple[int, int], list[int]]()
        for n, use in enumerate(uses):
            if n not in self.evidence.tables and use.shape[2] == 1:
                between.setdefault(self.sets[n], []).append(n)
        for some in same.values():
            for a, m in product(some, some):
                if a < m and self.sets[a][1] == self.sets[m][1]:
                    yield from self.evidence.tried(self._of_two(a, m, self._order(uses[a].out, uses[m].out)))
                for b in between.get((self.sets[a][1], self.sets[m][1]), ()) if a != m else ():
                    if b not in (a, m):
                        yield from self.evidence.tried(self._of_three(a, b, m))

    @cached_property
    def sets(self) -> list[tuple[int, int]]:
        """Return numbers of the sets of channels that each use reads and writes.

        Nodes with a repeated channel, or without one, get a number of their own.
        """
        known: dict[tuple[int, ...], int] = {}

        def number(nodes: Tensor) -> int:
            key = self._key(nodes).sort()[0]
            plain = len(key) > 0 and int(key[0]) >= 0 and bool((key[1:] > key[:-1]).all())
            return known.setdefault(tuple(key.tolist()) if plain else (-1, len(known)), len(known))

        return [(number(use.into), number(use.out)) for use in self.evidence.walk.uses]

    def _key(self, nodes: Tensor) -> Tensor:
        return torch.where(
            nodes > 0, 2 * self.evidence.frame.channel_of[nodes] + self.evidence.frame.nodes.dual[nodes].long(), -1
        )

    def _order(self, one: Tensor, other: Tensor) -> Tensor:
        """Return, for each node of `other`, the index of the node of `one` on its channel; both are of one set."""
        key = self._key(one)
        order = torch.argsort(key)
        return order[torch.searchsorted(key[order], self._key(other))]

    def _of_two(self, a: int, m: int, at: Tensor) -> Iterator[Translation]:
        A, M = (self.evidence.walk.uses[n] for n in (a, m))
        pairs = (
            (s.written[m].slopes, s.written[a].slopes[:, at] * self.evidence.ratio(k, A.out[at], M.out))
            for k, s in enumerate(self.evidence.drawn)
        )
        if self.evidence.vanishes((x - y, x.abs()) for x, y in pairs):
            one, other = (
                self.evidence.rows(self.evidence.side(a, True).at(at)),
                self.evidence.rows(self.evidence.side(m, True)),
            )
            if one is not None and other is not None:
                constant, gains = self.evidence.frame.ratio((A.out[at],), (M.out,))
                yield from self.evidence.made("beside", Part(other), Part(one, diagonal(-constant, gains)))

    def _of_three(self, a: int, b: int, m: int) -> Iterator[Translation]:
        """Yield A += z, W -= B z and B += z, W -= z A, for W parallel to B A."""
        A, B, W = (self.evidence.walk.uses[n] for n in (a, b, m))
        k, j = self._order(A.out, B.into), self._order(B.out, W.out)
        rows = [self.evidence.rows(self.evidence.side(n, True)) for n in (a, b, m)]
        if any(each is None for each in rows):
            return
        rows_a, _, rows_m = (each for each in rows if each is not None)
        values = (
            B.values(reading)[j, :, 0] * self.evidence.ratio(s, W.out, B.out[j])[:, None]
            for s, reading in enumerate(self.evidence.readings)
        )
        inner = [self.evidence.ratio(s, B.into, A.out[k]) for s in range(len(self.evidence.drawn))]
        above, gains_above = self.evidence.frame.ratio((W.out,), (B.out[j],))
        beside, gains_beside = self.evidence.frame.ratio((B.into,), (A.out[k],))
        dA = [s.written[a].slopes[:, k] for s in self.evidence.drawn]
        dW = [s.written[m].slopes for s in self.evidence.drawn]
        back = (d @ V * u for d, V, u in zip(dW, values, inner, strict=True))
        if self.evidence.vanishes((x - y, x.abs()) for x, y in zip(dA, back, strict=True)):
            V = self.evidence.rows(self.evidence.side(b, True).at(j))
            M = Matrix(-above, beside, V, gains=(gains_above, gains_beside))
            order = self.evidence.rows(self.evidence.side(a, True).at(k))
            if order is not None:
                yield from self.evidence.made("beside", Part(order), Part(rows_m, M))
        dB = [s.written[b].slopes[:, j] for s in self.evidence.drawn]
        read = [s.read[b].values for s in self.evidence.drawn]
        made = (s.written[a].values[:, k] * u for s, u in zip(self.evidence.drawn, inner, strict=True))
        outer = (d * self.evidence.ratio(s, W.out, B.out[j]) for s, d in enumerate(dW))
        if (
            a not in self.evidence.walk.biases
            and b in self.evidence.lone
            and self.evidence.vanishes((x - y, x.abs()) for x, y in zip(read, made, strict=True))
            and self.evidence.vanishes((x - y, x.abs()) for x, y in zip(dB, outer, strict=True))
        ):
            M = Matrix(
                beside,
                torch.ones(rows_a.columns),
                self.evidence.rows(self.evidence.side(a, True).at(k)),
                gains=(gains_beside, ()),
            )
            moved = self.evidence.rows(self.evidence.side(b, True).at(j))
            if moved is not None:
                yield from self.evidence.made("beside", Part(moved), Part(rows_m, diagonal(-above, gains_above), M))
