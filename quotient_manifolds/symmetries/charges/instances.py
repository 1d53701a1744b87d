"""Solve for log-scales, and for generators between channels that functions tie, by one small null space per kind.

An instance is a channel with all channels and scales aligned with it: the scales of its units, functions of it, and the
other channel of its plane. Instances with the same uses form a kind. Its null space has one equation for each instance
and sample. So the symmetries of a gate, a norm or a rotary embedding are found without a template.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import scipy.linalg
import torch
from scipy.sparse import coo_matrix, csr_matrix
from torch import Tensor

from quotient_manifolds.symmetries.charges.frame import Port, Table
from quotient_manifolds.symmetries.charges.kernel import NOISE, connected, null_space, relative
from quotient_manifolds.symmetries.charges.nodes import distinct_columns
from quotient_manifolds.symmetries.charges.positions import Positions, Vectors, components, names
from quotient_manifolds.symmetries.charges.uses import Gain
from quotient_manifolds.symmetries.groups import Complex, DirectSum, Gauge, Slices, Span, Symmetry, Torus

_MOST = 400
"""Maximum number of unknowns of an instance that are solved for one by one."""
_LARGEST = 16
"""Maximum number of channels of one wire in an instance for which entries between them are unknowns."""
_PARTS = 8
"""Maximum number of null spaces computed for one kind, which is split if its instances differ."""
_SAMPLES = 64
"""Maximum number of samples drawn for one kind."""
_PATIENCE = 4
"""Maximum number of times that points are drawn for idle unknowns, whose summands are all 0."""
_MARGIN = 10.0
_ZERO = 1e-9


@dataclass(frozen=True, eq=False)
class Kind:
    """Hold n instances, as numbers (n, u) of their unknowns, and the generators (u, k) that they share."""

    instances: Tensor
    basis: Tensor


class Instances:
    """Number the unknowns (log-scales, and entries X_ij between positions of one instance) and solve for groups.

    free: positions (i, j) of entries that are free on their own, (n, 2). blocks: for each position, the number of the
    diagonal generator of another group that contains it, or 0; negative if the position is its contragredient.
    """

    def __init__(self, positions: Positions, free: Tensor, blocks: Tensor) -> None:
        self.positions, self.frame = positions, positions.frame
        self.blocks = blocks
        frame, nodes = self.frame, self.frame.nodes
        channel = frame.channel_of[frame.scales]
        at = torch.where(channel >= 0, positions.of[channel.clamp(0)], -1)
        solved = nodes.solved[frame.roots[positions.channels]].unique()
        mine = (at >= 0) | ((channel < 0) & torch.isin(nodes.solved[frame.scales], solved))
        self.scales = torch.nonzero(mine)[:, 0]
        self.local = torch.full((len(frame.scales),), -1)
        self.local[self.scales] = torch.arange(len(self.scales))
        self.position = at[self.scales]
        flipped = torch.zeros(len(frame.roots), dtype=torch.bool)
        flipped[positions.channels] = positions.flipped
        turned = nodes.dual[frame.scales[self.scales]] ^ (flipped[channel.clamp(0)] & (channel >= 0))[self.scales]
        self.sign = 1 - 2 * turned.double()
        """By log-scale: its sign in the generator X_ii of its position."""
        self.entries = self._entries(free)
        self.gains = [self._gain(gain) for gain in frame.walk.gains]
        self.count = len(self.scales) + len(self.entries)
        self._by_wire = self._of_wires()

    def _entries(self, free: Tensor) -> Tensor:
        """Return the pairs (n, 2) of positions of one wire and one instance whose entries are not free on their own."""
        p, count = self.positions, len(self.positions.held)
        order = torch.argsort(p.wire_of, stable=True)
        order = order[torch.argsort(p.component[order], stable=True)]
        key = torch.stack([p.component[order], p.wire_of[order]])
        _, group, size = torch.unique_consecutive(key, dim=1, return_inverse=True, return_counts=True)
        start = (size.cumsum(0) - size)[group]
        size = torch.where(size[group] > _LARGEST, 1, size[group])
        first = torch.repeat_interleave(torch.arange(count), size)
        within = torch.arange(len(first)) - torch.repeat_interleave(size.cumsum(0) - size, size)
        pairs = torch.stack([order[first], order[(start[first] + within).clamp(max=count - 1)]], 1)
        keep = (pairs[:, 0] != pairs[:, 1]) & ~p.mixed[pairs].any(1)
        keep &= ~torch.isin(pairs @ torch.tensor([count, 1]), free @ torch.tensor([count, 1]))
        return pairs[keep & (p.component[pairs[:, 0]] == p.component[pairs[:, 1]])]

    def look(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number and sign of each node's unknown log-scale, both 0 for nodes without one."""
        at, turn = self.frame.scale_of(nodes.clamp(0))
        at = self.local[at.clamp(max=len(self.local) - 1)]
        known = (nodes > 0) & (at >= 0)
        return torch.where(known, at, 0), torch.where(known, turn, 0.0)

    def _gain(self, gain: Gain) -> tuple[Tensor, Tensor]:
        """Return the log-scales (n, 2) after and before each gain, and their coefficients in the gain's logarithm."""
        (after, a), (before, b) = self.look(gain.after), self.look(gain.before)
        return torch.stack([after, before], 1), gain.power * torch.stack([a, -b], 1)

    def _of_wires(self) -> list[tuple[int, Tensor, Tensor, Tensor]]:
        p, first = self.positions, len(self.scales)
        wire = p.wire_of[self.entries[:, 0]]
        found = []
        for number in wire.unique().tolist():
            ids = torch.nonzero(wire == number)[:, 0]
            i, j = p.place_of[self.entries[ids]].T
            found.append((number, i, j, first + ids))
        return found

    # Charges

    def charges(self, data: Sequence[Vectors]) -> tuple[Tensor, Tensor]:
        """Return the charges of all unknowns, (samples, unknowns), and the sums of their absolute summands."""
        R, Z = torch.zeros(2, len(data), self.count, dtype=torch.float64)
        ports = [(*self.look(port.nodes), -1.0 if port.dual else 1.0) for port in self.positions.ports]
        for r, z, sample in zip(R, Z, data, strict=True):
            for (at, turn, dual), (a, b) in zip(ports, sample.ports, strict=True):
                terms = a * b  # for X_ii; a contragredient has minus its log-scale
                r.index_add_(0, at, dual * turn * terms.sum(0))
                z.index_add_(0, at, turn.abs() * terms.abs().sum(0))
            for (ids, ways), q in zip(self.gains, sample.gains, strict=True):
                r.index_add_(0, ids.reshape(-1), (ways * q[:, None]).reshape(-1))
                z.index_add_(0, ids.reshape(-1), (ways * q[:, None]).abs().reshape(-1))
            for number, i, j, ids in self._by_wire:
                wire = self.positions.wires[number]
                a, b = self.positions.stacked(wire, sample, list(wire.rows))
                terms = a[:, i] * b[:, j]
                r[ids], z[ids] = terms.sum(0), terms.abs().sum(0)
        return R, Z

    @cached_property
    def equations(self) -> list[tuple[Tensor, Tensor]]:
        """Return the linear equations that ties and shared gains impose, as unknowns (n, m) and their coefficients."""
        p, gains = self.positions, self.frame.walk.gains
        found = []
        if len(p.fixed):
            at, turn = self.look(p.fixed)
            found.append((at[:, None], turn[:, None]))
        if p.ties.nodes.shape[1]:
            at, turn = self.look(p.ties.nodes.reshape(-1))
            at, turn = at.view(2, -1).T, turn.view(2, -1).T
            found.append((at, turn * p.ties.way.T * torch.tensor([1.0, -1.0])))
        if gains:
            ids, ways = (torch.cat(each) for each in zip(*self.gains, strict=True))
            entries = torch.cat([gain.entries for gain in gains])
            first, which = distinct_columns(entries[None])
            lead = first[which]
            uses = torch.bincount(which)[which].double()
            still = (entries < 0) | (uses != self.frame.shares[entries.clamp(0)])
            found.append((ids[still], ways[still]))
            later = (lead != torch.arange(len(lead))) & ~still
            found.append((torch.cat([ids[lead], ids], 1)[later], torch.cat([ways[lead], -ways], 1)[later]))
        return found

    # Kinds

    @cached_property
    def name(self) -> Tensor:
        """Return an integer for each unknown that identifies its set of uses; it is the same in other instances."""
        p, generator, S = self.positions, self.positions.generator, len(self.scales)
        name = torch.zeros(self.count, dtype=torch.long)
        for port in p.ports:
            at, turn = self.look(port.nodes)
            name.index_add_(0, at, names(1, generator) * (turn != 0) * torch.where(turn > 0, 1, 3))
        for ids, ways in self.gains:
            for at, way in zip(ids.T, ways.T, strict=True):
                name.index_add_(0, at, names(1, generator) * (way != 0) * torch.where(way > 0, 1, 3))
        own = torch.where(self.position >= 0, p.wire_of[self.position.clamp(0)], len(p.wires))
        name[:S] += names(len(p.wires) + 1, generator)[own]
        block = torch.where(self.position >= 0, self.blocks[self.position.clamp(0)], 0)
        name[:S] += names(1, generator) * block.sign()
        if len(self.entries):
            i, j = self.entries.T
            name[S:] = names(len(p.wires), generator)[p.wire_of[i]] + names(2, generator)[(i < j).long()]
        return name

    @cached_property
    def kinds(self) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return the instances (n, u) of each kind, and for each unknown its instance and its column there."""
        p, name = self.positions, self.name
        component = p.components[self.frame.scales[self.scales]]
        component = torch.cat([component, p.component[self.entries[:, 0]]])
        kind = torch.unique(name, return_inverse=True)[1]
        order = torch.argsort(kind, stable=True)
        order = order[torch.argsort(component[order], stable=True)]
        _, which, count = torch.unique_consecutive(component[order], return_inverse=True, return_counts=True)
        start = count.cumsum(0) - count
        instance, column = torch.empty(2, self.count, dtype=torch.long)
        instance[order], column[order] = which, torch.arange(self.count) - start[which]
        signature = torch.zeros(len(count), dtype=torch.long).index_add(0, instance, name)
        found = []
        for one in signature.unique().tolist():
            same = torch.nonzero(signature == one)[:, 0]
            I = order[start[same][:, None] + torch.arange(int(count[same[0]]))]
            small = I.shape[1] <= _MOST
            pattern = torch.unique(self._pattern(I if small else I[:, :1]), dim=0, return_inverse=True)[1]
            found += [I[pattern == k] for k in range(int(pattern.max()) + 1)]
        return found, instance, column

    def _pattern(self, I: Tensor) -> Tensor:
        """Return the two positions of each column's unknown, numbered within the instance."""
        S = len(self.scales)
        both = torch.full((*I.shape, 2), -1)
        scale = I < S
        both[scale] = self.position[I[scale]][:, None].expand(-1, 2)
        both[~scale] = self.entries[I[~scale] - S]
        flat = both.flatten(1)
        return (flat[:, :, None] == flat[:, None, :]).long().argmax(2)

    def solve(self, data: Sequence[Vectors]) -> tuple[list[Kind], list[str], float, float]:
        """Return the generators of all kinds, undecided cases, the largest relative charge and the smallest pivot."""
        R, Z = self.charges(data)
        found, refused, largest, smallest = [], [], 0.0, float("inf")
        for I, (A, same, whole) in zip(self.kinds[0], self._bases, strict=True):
            n = len(I)
            if not whole:
                where = self.positions.parameters(self._touched(I))
                refused.append(f"{n} sets of {I.shape[1]} log-scales and entries of {where}: solved for by kind alone")
            R_I, Z_I = (R[:, I], Z[:, I]) if A is None else (R[:, I] @ A, Z[:, I] @ A.abs())
            u = Z_I.shape[2]
            if self.needed(n, u) > len(data):
                continue
            alive = Z_I.amax(0) > 0
            size = Z_I.square().mean((0, 1)).sqrt()
            size = size.clamp(min=1e-9 * max(float(size.max()), 1e-300))
            M, sizes = (each.permute(1, 0, 2) / size for each in (R_I, Z_I))
            same = same / size
            same = same / same.norm(dim=1, keepdim=True).clamp(min=1e-300)
            same = torch.cat([same, torch.diag_embed((~alive.any(0)).double())])
            lead = left = torch.arange(n)
            for part in range(_PARTS):  # first all instances, then one and those like it
                N, pivot = null_space(torch.cat([M[lead].reshape(-1, u), same]), scale=1.0)
                smallest = min(smallest, pivot)
                good = torch.zeros(len(left), dtype=torch.bool)
                if N.shape[1]:
                    charge = relative(M[left] @ N, sizes[left] @ N.abs()).amax((1, 2))
                    exercised = (alive[left] | (N.abs().amax(1) < _ZERO)).all(1)
                    good = (charge < _MARGIN * NOISE) & exercised
                    if not part and not bool(exercised.all()):
                        where = self.positions.parameters(self._touched(I[~exercised]))
                        refused.append(f"{int((~exercised).sum())} of {n} sets of log-scales of {where}: not exercised")
                if bool(good.any()):
                    largest = max(largest, float(charge[good].max()))
                    found.append(Kind(I[left[good]], N / size[:, None] if A is None else A @ (N / size[:, None])))
                left = left[~good] if not part else left[1:][~good[1:]]
                if not part and len(left) and len(data) >= u + 2:
                    left = left[torch.linalg.svdvals(M[left])[:, -1] < NOISE]
                elif not part:
                    break
                lead = left[:1]
                if not len(lead):
                    break
        return found, refused, largest, smallest

    @cached_property
    def _bases(self) -> list[tuple[Tensor | None, Tensor, bool]]:
        """Return `_basis` of each kind."""
        return [self._basis(I) for I in self.kinds[0]]

    def _basis(self, I: Tensor) -> tuple[Tensor | None, Tensor, bool]:
        """Return a basis (u, k) to solve in (None for all unknowns), its equations, and whether it is complete.

        If there are too many unknowns, the basis is the null space of their equations. If that is too large as well,
        all log-scales with the same name become one unknown, and the basis is incomplete.
        """
        (n, u), same = I.shape, self._dense(I)
        if self.needed(n, u) <= _SAMPLES:
            return None, same, True
        if u <= _MOST:
            A = null_space(same, scale=1.0)[0]
            if self.needed(n, A.shape[1]) <= _SAMPLES:
                return A, same.new_zeros(0, A.shape[1]), True
        scale = I[0] < len(self.scales)
        kind = torch.unique(self.name[I[0]], return_inverse=True)[1]
        A = torch.nn.functional.one_hot(kind).double() * scale[:, None]
        A = A[:, A.any(0)]
        return A, same @ A, False

    def _touched(self, I: Tensor) -> Tensor:
        """Return the positions of the unknowns of instances."""
        S, flat = len(self.scales), I.reshape(-1)
        own = self.position[flat[flat < S]]
        return torch.cat([own[own >= 0], self.entries[flat[flat >= S] - S].reshape(-1)])

    def wanted(self, data: Sequence[Vectors]) -> Iterator[tuple[int, int]]:
        """Yield how many more points and losses are needed, for kinds with many unknowns, then for idle unknowns."""
        kinds = (self.needed(len(I), same.shape[1]) for I, (_, same, _) in zip(self.kinds[0], self._bases, strict=True))
        more = max((need for need in kinds if need <= _SAMPLES), default=0) - len(data)
        if more > 0:
            yield -(-more // 8), 8
        for _ in range(_PATIENCE):
            idle = self.charges(data)[1].amax(0) == 0
            own = torch.zeros(self.count, dtype=torch.bool)
            for I in self.kinds[0]:
                some = I[idle[I].any(1) & ~idle[I].all(0).any()]
                own[some] = True
            if not bool(own.any()):
                return
            yield 4, 1

    @staticmethod
    def needed(n: int, u: int) -> int:
        """Return how many samples n instances of u unknowns need."""
        return -(-(u + 8) // n) if u <= _MOST else 1 << 30

    def _dense(self, I: Tensor) -> Tensor:
        """Return the equations of the instances of one kind as rows (n, u)."""
        _, instance, column = self.kinds
        mine = torch.zeros(int(instance.max()) + 1, dtype=torch.bool).index_fill_(0, instance[I[:, 0]], True)
        rows = [torch.zeros(0, I.shape[1], dtype=torch.float64)]
        for at, coefficient in self.equations:
            owner = instance[at.gather(1, (coefficient != 0).long().argmax(1, keepdim=True))[:, 0]]
            some = (coefficient != 0).any(1) & mine[owner]
            own = coefficient[some]
            index = torch.where(own != 0, column[at[some]], 0)
            made = torch.zeros(len(own), I.shape[1], dtype=torch.float64).scatter_add(1, index, own)
            rows.append(torch.unique(made, dim=0))
        return torch.cat(rows)

    def survives(self, kinds: Sequence[Kind], data: Sequence[Vectors]) -> tuple[bool, float]:
        """Return whether the charges of all generators vanish on other samples, and the largest relative charge."""
        R, Z = self.charges(data)
        worst = 0.0
        for kind in kinds:
            size = Z[:, kind.instances] @ kind.basis.abs()
            worst = max(worst, float(relative(R[:, kind.instances] @ kind.basis, size).max()))
        return worst < _MARGIN * NOISE, worst

    # Groups

    def groups(self, kinds: Sequence[Kind]) -> tuple[list[Symmetry], list[str]]:
        """Return groups of matrices on the channels of instances, one torus of all log-scales, and refusals."""
        gauges: list[Symmetry] = []
        refused: list[str] = []
        scales: list[tuple[Tensor, Tensor]] = []
        for kind in kinds:
            inside, N = self._split(kind)
            if len(inside[0]) and inside[1].shape[1]:
                try:
                    gauges += self._gauges(kind.instances, *inside)
                except ValueError as error:
                    where = self.positions.parameters(self._touched(kind.instances))
                    refused.append(f"entries between aligned channels of {where}: {error}")
            if N.shape[1]:
                scales.append((kind.instances, N))
        torus = self._torus(scales, refused)
        return gauges + ([torus] if torus is not None else []), refused

    def _split(self, kind: Kind) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Split generators into (positions, matrices on these), which change no gain, and the remaining log-scales.

        The log-scales exclude the diagonals of blocks.
        """
        S, lead = len(self.scales), kind.instances[0]
        scale = lead < S
        own = torch.where(scale, self.position[torch.where(scale, lead, 0)], -1)
        block = torch.where(own >= 0, self.blocks[own.clamp(0)], 0)
        N = kind.basis / kind.basis.norm(dim=0)
        N = torch.linalg.qr(N)[0]
        entries = self.entries[lead[~scale] - S]
        mixing = torch.linalg.svdvals(N[~scale]) if len(entries) else torch.zeros(0)
        touched = entries[N[~scale].abs().amax(1) > _ZERO].unique() if bool((mixing > _ZERO).any()) else own[:0]
        sign = self.sign[torch.where(scale, lead, 0)]
        diagonal = (own[:, None] == touched).double() * sign[:, None]
        number = block.abs().unique()
        other = (block.abs()[:, None] == number[number > 0]).double() * (sign * block.sign())[:, None]
        free = torch.cat([diagonal, torch.eye(len(lead), dtype=torch.float64)[:, ~scale]], 1)
        inside = N[:, :0]
        if len(touched):  # the part of N in the span of free
            Q = torch.linalg.qr(free)[0]
            inside = N @ null_space(N - Q @ (Q.T @ N), _ZERO, 1.0)[0]
        known = torch.linalg.qr(torch.cat([inside, other], 1))[0]
        rest = N @ null_space(known.T @ N, 1e-7, 1.0)[0]
        if len(entries) and rest.shape[1]:
            rest = rest @ null_space(rest[~scale], _ZERO, 1.0)[0]
        return (touched, _sparse(inside) if inside.shape[1] else inside), _sparse(rest) if rest.shape[1] else rest

    def _gauges(self, I: Tensor, touched: Tensor, inside: Tensor) -> Iterator[Gauge]:
        """Yield the groups of matrices on the positions of each instance, with the same algebra on all instances.

        Generators that act on no common position belong to different groups.
        """
        p, S, lead = self.positions, len(self.scales), I[0]
        m, scale = len(touched), lead < S
        place = torch.full((len(p.held),), -1)
        place[touched] = torch.arange(m)
        X = torch.zeros(inside.shape[1], m, m, dtype=torch.float64)
        ends = place[self.entries[lead[~scale] - S]]
        some = (ends >= 0).all(1)
        X[:, ends[some, 0], ends[some, 1]] = inside[~scale][some].T
        own = place[self.position[torch.where(scale, lead, 0)]]
        own[~scale | (self.position[torch.where(scale, lead, 0)] < 0)] = -1
        at = torch.nonzero(own >= 0)[:, 0]
        X[:, own[at], own[at]] = (self.sign[lead[at]][:, None] * inside[at]).T
        of_column = torch.stack([(own == k).long().argmax() for k in range(m)])
        sets = self.position[I[:, of_column]]
        for some in connected(X):
            touches = (X[some] != 0).any(0)
            own = torch.nonzero(touches.any(0) | touches.any(1))[:, 0]
            blocks, flips = alike(Y := X[some][:, own[:, None], own])
            Y = Y[:, blocks[0][:, None], blocks[0]]
            algebra = Complex() if len(Y) == Y.shape[1] == 2 and _same(Complex().project(Y), Y) else Span(Y.shape[1], Y)
            aligned = sets[:, own[blocks]].transpose(0, 1).flatten(1)
            parts = torch.arange(aligned.shape[1]).view(len(I), -1)
            yield Gauge(p.folded(aligned, flips), DirectSum(aligned.shape[1], ((parts, algebra),)))

    def _torus(self, scales: Sequence[tuple[Tensor, Tensor]], refused: list[str]) -> Torus | None:
        """Return the torus of log-scales of instances (n, u) with exponents (u, k); None if no log-scale can act."""
        rows, columns, powers, count = [], [], [], 0
        for I, N in scales:
            at, which = torch.nonzero(N, as_tuple=True)
            keep = I[0, at] < len(self.scales)
            at, which = at[keep], which[keep]
            n, k = len(I), N.shape[1]
            rows.append(I[:, at].reshape(-1))
            columns.append((count + torch.arange(n)[:, None] * k + which).reshape(-1))
            powers.append(N[at, which].expand(n, -1).reshape(-1))
            count += n * k
        if not count:
            return None
        made = (torch.cat(each).numpy() for each in (powers, rows, columns))
        power, row, column = made
        L = coo_matrix((power, (row, column)), (max(1, len(self.scales)), count)).tocsr()
        moved = np.zeros(count)
        slices, dead = self._slices(L, refused, moved)
        if dead.any() or not moved.all():
            L = L[:, np.flatnonzero((dead == 0) & (moved > 0))]
            if not L.shape[1]:
                return None
            slices, _ = self._slices(L, refused, np.zeros(L.shape[1]))
        try:
            return self.frame.torus(slices, L.shape[1])
        except ValueError as error:
            refused.append(f"{L.shape[1]} log-scales: {error}")
            return None

    def _slices(self, L: csr_matrix, refused: list[str], moved: np.ndarray) -> tuple[list[Slices], np.ndarray]:
        """Return the slices that log-scales L (scales, k) multiply, and which of the k are refused.

        Set `moved` to 1 for all of the k that multiply any slice.
        """
        frame, slices, dead = self.frame, [], np.zeros(L.shape[1], dtype=bool)

        def add(port: Port, E: csr_matrix, once: bool) -> None:
            some = np.flatnonzero(np.diff(E.indptr))
            port, E = port.at(torch.from_numpy(some)), E[some]
            moved[np.unique(E.indices)] = 1
            for piece in frame.by_parameter(replace(port, rows=torch.arange(len(some)))):
                share = np.ones(1) if once else frame.shares[piece.entries[:, 0]].double().numpy()
                part = E[piece.rows.numpy()].multiply(1 / share[:, None]).tocoo()
                try:
                    index = torch.from_numpy(np.stack([part.row, part.col]).astype(np.int64))
                    slices.append(Slices(frame.rows(piece), index, torch.from_numpy(part.data)))
                except ValueError as error:
                    dead[np.unique(part.col)] = True
                    refused.append(f"log-scales of {len(piece.rows)} rows of {frame.name_of(piece)}: {error}")

        for port in frame.ports:
            at, turn = self.look(port.nodes)
            way = turn * (1.0 if port.writes else -1.0)
            if bool(way.any()):
                E = L[at.numpy()].multiply(way.numpy()[:, None]).tocsr()
                E.eliminate_zeros()
                if E.nnz:
                    add(port, E, once=False)
        known = torch.zeros(frame.entries.size, dtype=torch.bool)
        for gain, (ids, ways) in zip(frame.walk.gains, self.gains, strict=True):
            new = (gain.entries >= 0) & ~known[gain.entries.clamp(0)] & (ways != 0).any(1)
            at = torch.nonzero(new)[:, 0]
            at = at[distinct_columns(gain.entries[at][None])[0]]
            known[gain.entries[at]] = True
            E = sum(L[ids[at, k].numpy()].multiply(ways[at, k].numpy()[:, None]) for k in range(2)).tocsr()
            E.data[np.abs(E.data) < 1e-12] = 0
            E.eliminate_zeros()
            if E.nnz:
                none = torch.zeros(len(at), dtype=torch.long)
                tables = Table.of(gain.entries[at][:, None]), Table.of(gain.places[at][:, None])
                add(Port(-1, gain.memory, True, False, at, none, none, *tables), E, once=True)
        return slices, dead


def _same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= _ZERO * b.abs().max())


def alike(X: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks (blocks, c) of channels on which matrices (k, m, m) are equal, and which are contragredient.

    If there are no such blocks, all channels are one block.
    """
    m = X.shape[1]
    part = components(m, *torch.nonzero(X.abs().amax(0) > _ZERO).T)
    blocks = [torch.nonzero(part == one)[:, 0] for one in part.unique()]
    whole = torch.arange(m)[None], torch.zeros(1, dtype=torch.bool)
    if any(len(block) != len(blocks[0]) or len(block) > 2 for block in blocks):
        return whole
    lead, found = X[:, blocks[0][:, None], blocks[0]], []
    for block in blocks:
        ways = [(each, flip) for each in (block, block.flip(0)) for flip in (False, True)]
        own = [X[:, each[:, None], each] for each, _ in ways]
        fits = [_same(-x.mT if flip else x, lead) for x, (_, flip) in zip(own, ways, strict=True)]
        if not any(fits):
            return whole
        found.append(ways[fits.index(True)])
    return torch.stack([each for each, _ in found]), torch.tensor([flip for _, flip in found])


def _sparse(N: Tensor) -> Tensor:
    """Return a basis of the same span in echelon form, rounded near integers, so that exponents are of few slices."""
    pivots = _leading(N)
    N = torch.linalg.solve(N[pivots].T, N.T).T
    N = torch.where((N - N.round()).abs() < _ZERO, N.round(), N)
    return N + 0.0


def _leading(N: Tensor) -> Tensor:
    """Return k independent rows of N (u, k), by elimination with the largest entry of each column."""
    order = scipy.linalg.qr(N.T.numpy(), mode="r", pivoting=True)[1]
    return torch.from_numpy(order[: N.shape[1]].astype(np.int64))
