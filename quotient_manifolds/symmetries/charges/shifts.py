"""Find constants along wide wires that biases and tables may take and readers' biases take back, by token vectors.

For each set of channels that the same uses have: what a constant z adds to the loss is z . g for each way to add it,
with g the gradient of a bias, the sum over tokens of dy of a table, or of dx of a reader. Combinations of ways with
sum of c g = 0 are shifts, for any z.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.blocks import Layout, Map
from quotient_manifolds.symmetries.charges.frame import Port
from quotient_manifolds.symmetries.charges.kernel import NOISE, null_space
from quotient_manifolds.symmetries.charges.samples import Sample
from quotient_manifolds.symmetries.charges.stacks import TINY, Stack, within
from quotient_manifolds.symmetries.groups.rows import Rows
from quotient_manifolds.symmetries.groups.translation import Part, Translation

_APART = 1024
"""Columns of a bias or a table, as positions, up to which each is a way of its own if there are enough samples."""
_FLOOR, _SPARE, _PIVOT = 1e-3, 2, 1e-3


@dataclass(frozen=True, eq=False)
class Way:
    """Hold one way to add constants to channels: g (n,) of each sample, and the sum of its absolute summands.

    port: the entries, one row per channel; of a reader those of its matrix, and `bias` those that take constants back.
    right: c with c . x = 1 for the inputs of a weight that acts as a bias, or as that of a reader which has none; else
    1. free: z of which this way alone makes nothing.
    """

    port: Port
    units: Tensor
    g: Tensor
    size: Tensor
    bias: Tensor | None = None
    right: Tensor | None = None
    free: Tensor | None = None


class WideShifts:
    """List the ways of a layout and what combines them.

    unread: by use, null vectors of outputs; constants: by use without a bias, c with c . x = 1 for all inputs x.
    """

    def __init__(
        self,
        layout: Layout,
        unread: Mapping[int, Tensor],
        constants: Mapping[int, Tensor],
        biases: Mapping[int, Tensor],
        drawn: Sequence[Sample],
    ) -> None:
        self.layout, self.walk, self.drawn = layout, layout.walk, drawn
        self.unread, self.constants, self.biases = unread, constants, biases
        self.free: dict[int, tuple[Port, Tensor, Tensor]] = {}
        """By use of biases and small tables: a port, its units, and which z alone nothing depends on."""

    def stacks(self) -> Iterator[Stack]:
        """Yield shifts of all sets of channels, and biases that are unread where another writer is."""
        every, found = self.layout.frame.ports, []
        sides = [[p for p in every if p.dual == dual] for dual in (False, True)]
        for ports, channels in (each for side in sides for each in self.layout.sets(side, 1)):
            ports = [self.layout.of_channels(p, channels) for p in ports]
            units = [self.layout.units[p.nodes] for p in ports]
            if all(bool(torch.isfinite(u).all() and (u != 0).all()) for u in units):
                found.append(self._of_channels(ports, units))
        for port, u, free in self.free.values():
            yield Stack(Translation((Part(self._map(port, u).rows, free),)), "unread", True)
        combined = [(ways, v) for ways, shifts in found for v in shifts.T]
        relied = {way.port.use for ways, v in combined if not _still(ways, v) for way in _known_sums(ways, v)}
        for ways, v in combined:
            sums = bool(_known_sums(ways, v))
            if (made := self._translation(ways, v, relied if sums else frozenset())) is not None:
                still = sums and _still(ways, v)
                yield Stack(made, "constant" if still else "shift", not still, int(sums and not still))

    def _of_channels(self, ports: Sequence[Port], units: Sequence[Tensor]) -> tuple[list[Way], Tensor]:
        """Return ways and what combines them, and take note of biases of which something is unread, but not all."""
        known = [k for p, u in zip(ports, units, strict=True) if (k := self._known(p, u)) is not None]
        for apart in (True, False):
            ways = [way for p, u in zip(ports, units, strict=True) for way in self._ways(p, u, known, apart)]
            if ways and len(self.drawn) * len(units[0]) >= len(ways) + _SPARE:
                break
        else:
            return [], torch.zeros(0, 0, dtype=torch.float64)
        shifts = _combined(ways, max(self._top(p, u) for p, u in zip(ports, units, strict=True)))
        alone = {ways[int(v.abs().argmax())].port.use for v in shifts.T if int((v != 0).sum()) == 1}
        for n in alone:
            self.free.pop(n, None)
        return ways, shifts

    def _known(self, port: Port, u: Tensor) -> Tensor | None:
        """Return what is unread of a use, in the units of its channels."""
        K = self.unread.get(port.use) if port.writes else None
        if K is None or not K.shape[1]:
            return None
        some = torch.zeros(len(K), dtype=torch.bool)
        some[port.rows] = True
        return within(K, some)[port.rows] / u[:, None]

    def _ways(self, port: Port, u: Tensor, known: Sequence[Tensor], apart: bool) -> list[Way]:
        """Return the ways of one port, one for each position if they are `apart`; take note of what is unread of it."""
        uses, layout = self.walk.uses, self.layout
        if not port.writes:
            made = self._reader(port, u)
            return [] if made is None else [made]
        if port.use < len(uses) and port.use not in layout.tables:
            c = self.constants.get(port.use)
            if c is None or uses[port.use].shape[2] > 1:
                return []
            g, size = self._summed([s.written[port.use].slopes[:, port.rows] * u for s in self.drawn])
            return [Way(port, u, g, size, right=c[None], free=self._known(port, u))]
        if float(layout.frame.shares[port.entries].max()) > 1 or (
            port.use < len(uses) and port.use not in layout.outputs
        ):
            return []
        name, own = layout.frame.name_of(port), self._known(port, u)
        if name not in self.drawn[0].gradients:
            if own is None:
                return []
            g, size = self._summed([s.written[port.use].slopes[:, port.rows] * u for s in self.drawn])
            return [Way(port, u, g, size, free=own)]
        at = port.entries - layout.frame.entries.start[name]
        g = torch.stack([s.gradients[name].reshape(-1)[at] * u[:, None] for s in self.drawn])  # (samples, n, columns)
        rows = g.transpose(1, 2).flatten(0, 1)
        spaces = [K for K in known if float((rows @ K).norm()) <= NOISE * float(rows.norm() * K.norm())]
        if spaces and own is None:
            both = torch.cat(spaces, 1)
            free = torch.linalg.qr(both @ null_space(null_space(both)[0].T)[0])[0]
            self.free[port.use] = port, u, free
        part = _parts_of(g) if apart else torch.zeros(g.shape[2], dtype=torch.long)
        columns = [torch.nonzero(part == k)[:, 0] for k in part.unique().tolist()]
        every = torch.arange(len(u))
        return [Way(port.at(every, k), u, g[..., k].sum(2), g[..., k].abs().sum(2), free=own) for k in columns]

    def _reader(self, port: Port, u: Tensor) -> Way | None:
        """Return a reader of one tap that takes constants back: by a bias of its own, or by inputs of a known sum."""
        bias, c, use = self.biases.get(port.use), self.constants.get(port.use), self.walk.uses[port.use]
        if use.shape[2] > 1 or (bias is None and c is None):
            return None
        g, size = self._summed([s.read[port.use].slopes[:, port.rows] * u for s in self.drawn])
        if float(g.norm()) <= NOISE * float(size.norm()):
            return None
        return Way(port, u, g, size, bias=bias, right=c[None] if bias is None else None)  # type: ignore[index]

    def _top(self, port: Port, u: Tensor) -> float:
        """Return how large sums over tokens are on this side of a use, before anything cancels."""
        if port.use >= len(self.walk.uses):
            return 0.0
        sides = [(s.written if port.writes else s.read).get(port.use) for s in self.drawn]
        return max(float((d.slopes[:, port.rows] * u).abs().sum(0).max()) if d else 0.0 for d in sides)

    @staticmethod
    def _summed(tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return torch.stack([t.sum(0) for t in tokens]), torch.stack([t.abs().sum(0) for t in tokens])

    def _map(self, port: Port, u: Tensor) -> Map:
        slopes = self.layout.frame.slopes(port)
        return Map(self.layout.frame, port, slopes / u[:, None], torch.arange(len(port.theta.steps)), u)

    def _translation(self, ways: Sequence[Way], v: Tensor, relied: Collection[int]) -> Translation | None:
        """Return z -> c u z in each way, without z of which each way alone makes nothing.

        Nor such as change a known sum of inputs of uses that are `relied` on.
        """
        some = [(way, float(c)) for way, c in zip(ways, v, strict=True) if c != 0]
        matrices = {k: self._matrix(way) for k, (way, _) in enumerate(some) if not way.port.writes}
        idle: Tensor | None = None
        for way, _ in some:
            if way.port.writes:
                free = self.free[way.port.use][2] if way.port.use in self.free else way.free
                free = torch.zeros(len(way.units), 0, dtype=torch.float64) if free is None else free
                idle = free if idle is None else _both(idle, free)
        for k, M in matrices.items():
            if idle is not None and idle.shape[1]:
                K = self._of_bias(some[k][0].bias)
                taken = M @ idle
                taken = taken - K @ (K.T @ taken) if K.shape[1] else taken
                idle = idle @ null_space(taken, TINY, scale=float(M.norm()))[0]
        kept = [some[k][0] for k in matrices if some[k][0].port.use in relied]
        sums = [(self.constants[way.port.use][way.port.rows] * way.units)[None] for way in kept]
        left = torch.cat([torch.zeros(0, len(some[0][0].units), dtype=torch.float64), *sums])
        if idle is not None and idle.shape[1]:  # of what nothing depends on, only such as may be moved here
            left = torch.cat([left, (idle @ null_space(left @ idle, TINY, scale=float(left.norm()))[0]).T])
        z = null_space(left)[0] if len(left) else None
        parts, back = [], dict[tuple[int, ...], Tensor]()
        for k, (way, c) in enumerate(some):
            if way.port.writes:
                one = torch.ones(1, len(way.port.theta.steps), dtype=torch.float64)
                one = one if way.right is None else way.right
                parts.append(Part(self._map(way.port, c * way.units).rows, z, one))
                continue
            left = c * (matrices[k] if z is None else matrices[k] @ z)
            if way.bias is None:
                name, at = self.layout.owner(self.walk.uses[way.port.use].entries[..., 0])
                parts.append(Part(Rows.at(name, tuple(self.layout.frame.entries.shapes[name]), at), left, way.right))
            else:
                key = tuple(way.bias.tolist())
                back[key] = back[key] + left if key in back else left
        for key, left in back.items():
            name, at = self.layout.owner(torch.tensor(key))
            parts.append(Part(Rows.at(name, tuple(self.layout.frame.entries.shapes[name]), at[:, None]), left))
        apart = not any(a.rows.meets(b.rows) for i, a in enumerate(parts) for b in parts[:i])
        return Translation(tuple(parts)) if apart and (z is None or z.shape[1]) else None

    def _of_bias(self, bias: Tensor | None) -> Tensor:
        """Return what is unread of a bias, orthonormal, by its entries; nothing of none."""
        if bias is None:
            return torch.zeros(0, 0, dtype=torch.float64)
        for port, u, free in self.free.values():
            at = torch.searchsorted(bias, port.entries[:, 0]).clamp(max=len(bias) - 1)
            if port.entries.shape[1] == 1 and torch.equal(bias[at], port.entries[:, 0]):
                K = torch.zeros(len(bias), free.shape[1], dtype=torch.float64)
                K[at] = free * u[:, None]
                return torch.linalg.qr(K)[0]
        return torch.zeros(len(bias), 0, dtype=torch.float64)

    def _matrix(self, way: Way) -> Tensor:
        """Return the matrix of a reader in units of the channels (outputs, n)."""
        use = self.walk.uses[way.port.use]
        return self.layout.reading.at(use.memory, use.places[:, way.port.rows, 0])[0] * way.units


def _known_sums(ways: Sequence[Way], v: Tensor) -> list[Way]:
    """Return the ways of a combination that rely on known sums of inputs."""
    return [way for way, c in zip(ways, v, strict=True) if c != 0 and way.right is not None]


def _still(ways: Sequence[Way], v: Tensor) -> bool:
    """Return whether a combination leaves its channels as they are: several ways write, and no reader takes back."""
    some = [way for way, c in zip(ways, v, strict=True) if c != 0]
    return len(some) > 1 and all(way.port.writes for way in some)


def _parts_of(g: Tensor) -> Tensor:
    """Return the number of the part of each column of g (samples, n, columns).

    Each column that all samples have is a part if there are few; others, as of longer inputs, or words of which one
    sample alone says at which positions they are, are of the same as the last before.
    """
    if g.shape[2] > _APART:
        return torch.zeros(g.shape[2], dtype=torch.long)
    return (g != 0).any(1).all(0).long().cumsum(0).clamp(min=1)


def _combined(ways: Sequence[Way], top: float) -> Tensor:
    """Return combinations (ways, k) with sum of c g = 0, of few ways each. top: the size of sums on the wire.

    Each weight that acts as a bias is in one of them: it does so for inputs that shifts of others change.
    """
    rows = torch.stack([way.g for way in ways], 2).flatten(0, 1)
    size = torch.stack([way.size for way in ways], 2).amax((0, 1))
    size = size.clamp(min=_FLOOR * max(top, float(size.max())) + 1e-300)
    N = null_space(rows / size / len(rows) ** 0.5, scale=1.0)[0] / size[:, None]
    weights = torch.tensor([way.right is not None for way in ways])
    for k in range(N.shape[1]):
        left = (N / N.norm(dim=1, keepdim=True).amax().clamp(min=1e-300))[:, k:].abs()
        of_weights = left * weights[:, None]
        at = int((of_weights if float(of_weights.max()) > _PIVOT else left).argmax())
        row, column = at // (N.shape[1] - k), at % (N.shape[1] - k) + k
        N[:, [k, column]] = N[:, [column, k]]
        N[:, k] = N[:, k] / N[row, k]
        factor = N[row].clone()
        factor[k] = 0
        N = N - N[:, k : k + 1] * factor
    return torch.where(N.abs() > TINY * N.abs().amax(0, keepdim=True), N, 0.0)


def _both(A: Tensor, B: Tensor) -> Tensor:
    """Return the intersection of two spaces, given by columns."""
    if not (A.shape[1] and B.shape[1]):
        return A[:, :0]
    apart = null_space(B.T)[0]
    return A @ null_space(apart.T @ A, TINY, scale=1.0)[0]
