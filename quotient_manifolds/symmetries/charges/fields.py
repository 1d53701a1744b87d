"""Find linear fields across wires: constants that biases add and readers' biases take back, maps beside others.

A shift is a wire that is extended by a constant channel, A = [[1, z], [0, 1]]; an adapter beside its base is one that
is extended by the channels of its inputs, A = [[1, 0], [Z, 1]]. Unknowns are such as add to single entries, and such as
take back what a map V makes of that; each moves entries by entries that no other one moves, so charges are bilinear:

| unknown | field | charge |
|---|---|---|
| an entry b | b += u z | u y_b |
| a channel of a table | all words += u z | u sum of y |
| a reader V of a channel i beside the bias c | c_j -= V_ji u z | sum_j V_ji u y_c_j |
| a column m of a base W beside an adapter B A | W_jm -= B_jk z | sum_j B_jk y_W_jm |
| an output j of the same | W_jm -= z A_km | sum_m A_km y_W_jm |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.entries import Reading
from quotient_manifolds.symmetries.charges.frame import Frame, Port
from quotient_manifolds.symmetries.charges.kernel import OFTEN, Kernel, Point, solve
from quotient_manifolds.symmetries.charges.recognition import _pivots, sparse
from quotient_manifolds.symmetries.charges.uses import Lookup
from quotient_manifolds.symmetries.groups.gains import Gain
from quotient_manifolds.symmetries.groups.rows import Rows
from quotient_manifolds.symmetries.groups.shift import Shift, Terms

MOST_TOGETHER = 900
_SPARE = 4


@dataclass(frozen=True, eq=False)
class Source:
    """Hold entries of theta and where these are in a memory, one per term."""

    memory: int
    entries: Tensor
    places: Tensor

    def at(self, index: Tensor) -> Source:
        """Return those of some terms."""
        return Source(self.memory, self.entries[index], self.places[index])


@dataclass(frozen=True, eq=False)
class Block:
    """Hold terms: unknown[t] moves entry t of `moved` by value[t] times units of `up` over those of `down`."""

    unknown: Tensor
    moved: Source
    value: Source | None
    up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]
    sign: float = 1.0

    def at(self, index: Tensor) -> Block:
        """Return some terms."""
        value = None if self.value is None else self.value.at(index)
        up, down = (tuple(each[index] for each in nodes) for nodes in (self.up, self.down))
        return Block(self.unknown[index], self.moved.at(index), value, up, down, self.sign)

    def rates(self, reading: Reading, units: Tensor) -> Tensor:
        """Return what moves each entry by 1 (terms,)."""
        slope = reading.at(self.moved.memory, self.moved.places)[1]
        made = self.sign / torch.where(slope != 0, slope, torch.inf)
        if self.value is not None:
            made = made * reading.at(self.value.memory, self.value.places)[0]
        for nodes in self.up:
            made = made * torch.where(nodes > 0, units[nodes], 1.0)
        for nodes in self.down:
            made = made / torch.where(nodes > 0, units[nodes], 1.0)
        return torch.nan_to_num(made, 0.0, 0.0, 0.0)


class Fields:
    """Number the unknowns, and compute their charges and fields, as `Unknowns` does for wires."""

    def __init__(self, frame: Frame) -> None:
        self.frame, self.walk = frame, frame.walk
        self.size, self.count = frame.entries.size, 0
        self.blocks: list[Block] = []
        self.every: list[Tensor] = []
        self.kinds: list[str] = []
        self._constants = dict[int, list[Tensor]]()
        self._single: dict[int, Tensor] = {}
        """By use: the unknown of each of its entries (outputs, inputs, taps)."""
        self._entry = torch.full((self.size,), -1)
        self.tables = {n for n, use in enumerate(self.walk.uses) if isinstance(use.tokens, Lookup)}
        self._own_units = torch.zeros(len(frame.nodes.wires), dtype=torch.long)
        """By node: the node whose units constants of its channel are counted in: that of its first writer."""
        first = torch.zeros(2 * len(frame.roots) + 1, dtype=torch.long)
        for p in reversed([p for p in frame.ports if p.writes]):
            first[2 * p.channels + int(p.dual)] = p.nodes
        channel = torch.where(frame.channel_of >= 0, 2 * frame.channel_of + frame.nodes.dual.long(), -1)
        self._own_units = first[channel]
        self._shifts()
        self._beside()
        self._alone()

    @property
    def groups(self) -> list[Tensor]:
        """Return sets of unknowns that are solved for together."""
        return self.every

    def _new(self, count: int) -> Tensor:
        self.count += count
        return torch.arange(self.count - count, self.count)

    def _group(self, kind: str, *ids: Tensor) -> None:
        every = torch.cat([torch.zeros(0, dtype=torch.long), *(each.reshape(-1) for each in ids)]).unique()
        if len(every):
            self.every.append(every)
            self.kinds.append(kind)

    # Shifts

    def _shifts(self) -> None:
        biases = [p for p in self.frame.ports if p.writes and (p.use >= len(self.walk.uses) or p.use in self.tables)]
        ids = []
        for p in biases:
            rows, columns = p.entries.shape
            if p.use not in self.tables:
                ids.append(self._entries_of(p))
            if columns > 1:
                each = self._new(rows)
                ids.append(each)
                self._add(
                    each[:, None].expand(rows, columns),
                    p,
                    None,
                    (p.nodes[:, None],),
                    (self._own_units[p.nodes][:, None],),
                )
        readers = [p for p in self.frame.ports if not p.writes and p.use < len(self.walk.uses)]
        for q in readers:
            use = self.walk.uses[q.use]
            for s in biases:
                j, row = self._common(use.out, s)
                if not len(j):
                    continue
                e, places = (each[j][:, q.rows] for each in (use.entries, use.places))  # (j, i, taps)
                each = self._new(len(q.rows))
                ids.append(each)
                m = s.entries.shape[1]
                shape = (*e.shape, m)
                moved = Source(s.memory, *(x[row][:, None, None, :].expand(shape) for x in (s.entries, s.places)))
                value = Source(use.memory, *(x[..., None].expand(shape) for x in (e, places)))
                i, o = q.nodes[None, :, None, None], use.out[j][:, None, None, None]
                up = (i, s.nodes[row][:, None, None, None])
                self._terms(each[None, :, None, None].expand(shape), moved, value, up, (o, self._own_units[i]))
        self._group("shift", *ids)

    def _common(self, nodes: Tensor, port: Port) -> tuple[Tensor, Tensor]:
        """Return which of some nodes are channels of a port, and which of its rows."""
        place = torch.full((len(self.frame.roots) + 1,), -1)
        place[port.channels] = torch.arange(len(port.channels))
        channels = torch.where(nodes > 0, self.frame.channel_of[nodes], -1)
        row = place[channels]
        good = (channels >= 0) & (row >= 0) & (self.frame.nodes.dual[nodes] == port.dual)
        j = torch.nonzero(good)[:, 0]
        return j, row[j]

    def _entries_of(self, p: Port) -> Tensor:
        """Return the unknowns of the entries of a port of biases."""
        e = p.entries
        fresh = self._new(e.numel()).view(e.shape)
        known = self._entry[e]
        ids = torch.where(known >= 0, known, fresh)
        up = p.nodes[:, None].expand(e.shape)
        keep = known.reshape(-1) < 0
        block = self._made(ids, Source(p.memory, e, p.places), None, (up,), (self._own_units[up],))
        self.blocks.append(block.at(torch.nonzero(keep)[:, 0]))
        self._entry[e] = ids
        return ids

    def _add(self, ids: Tensor, p: Port, value: Source | None, up: Sequence[Tensor], down: Sequence[Tensor]) -> None:
        self._terms(ids, Source(p.memory, p.entries, p.places), value, up, down)

    def _terms(
        self,
        ids: Tensor,
        moved: Source,
        value: Source | None,
        up: Sequence[Tensor],
        down: Sequence[Tensor],
        sign: float = 1.0,
    ) -> None:
        self.blocks.append(self._made(ids, moved, value, up, down, sign))

    def _made(
        self,
        ids: Tensor,
        moved: Source,
        value: Source | None,
        up: Sequence[Tensor],
        down: Sequence[Tensor],
        sign: float = 1.0,
    ) -> Block:
        shape = ids.shape
        flat = [tuple(each.expand(shape).reshape(-1) for each in nodes) for nodes in (up, down)]
        parts = [
            None
            if s is None
            else Source(s.memory, s.entries.expand(shape).reshape(-1), s.places.expand(shape).reshape(-1))
            for s in (moved, value)
        ]
        block = Block(ids.reshape(-1), parts[0], parts[1], flat[0], flat[1], sign)  # type: ignore[arg-type]
        return block.at(torch.nonzero(block.moved.entries >= 0)[:, 0])

    # Maps beside others

    def _single_of(self, n: int) -> Tensor:
        """Return the unknowns of all entries of a use (outputs, inputs, taps), -1 of constants."""
        if n not in self._single:
            use = self.walk.uses[n]
            e = use.entries
            fresh = self._new(e.numel()).view(e.shape)
            known = torch.where(e >= 0, self._entry[e.clamp(0)], -1)
            ids = torch.where(known >= 0, known, fresh)
            up, down = use.out[:, None, None].expand(e.shape), use.into[None, :, None].expand(e.shape)
            block = self._made(
                ids, Source(use.memory, e, use.places), None, (up, self._eldest(down)), (down, self._own_units[up])
            )
            keep = torch.nonzero(self._entry[block.moved.entries] < 0)[:, 0]
            self.blocks.append(block.at(keep))
            self._entry[block.moved.entries[keep]] = block.unknown[keep]
            self._single[n] = torch.where(e >= 0, ids, -1)
        return self._single[n]

    def _inputs(self, n: int) -> tuple[object, ...] | None:
        """Return what names the inputs of a use: equal for uses of the same."""
        use = self.walk.uses[n]
        if use.tokens.place is None:
            return None
        if bool((use.into > 0).all()):
            channels = self.frame.channel_of[use.into] * 2 + self.frame.nodes.dual[use.into].long()
            return ("channels", tuple(channels.tolist()), use.shape[2])
        read = self.walk.program.operations[use.operation].args[use.tokens.place]
        layout = self.walk.program.layouts[read.number]
        return ("data", layout.memory, layout.shape, layout.stride, layout.offset, use.tokens, use.shape[2])

    def _beside(self) -> None:
        by_inputs: dict[tuple[object, ...], list[int]] = {}
        for n in range(len(self.walk.uses)):
            if (key := self._inputs(n)) is not None:
                by_inputs.setdefault(key, []).append(n)
        uses = self.walk.uses
        for some in by_inputs.values():
            one, other = list[Tensor](), list[Tensor]()
            if len(some) > 1 and sum(uses[n].entries.numel() for n in some) <= MOST_TOGETHER:
                one += [self._single_of(n) for n in some]
            for a in some:
                for m in some:
                    if a == m:
                        continue
                    if self._meets(uses[a].out, uses[m].out):
                        one += [self._single_of(a), self._single_of(m)]
                    for b, use in enumerate(uses):
                        if use.shape[2] > 1 or b in self.tables:
                            continue
                        k = self._pairs(uses[a].out, use.into)  # (outputs of a, inputs of b)
                        j = self._pairs(use.out, uses[m].out)
                        if k.shape[1] and j.shape[1]:
                            one += [self._single_of(a), self._taken_by_columns(b, m, k, j)]
                            other += [self._single_of(b), self._taken_by_outputs(a, b, m, k, j)]
            self._group("beside", *one)
            self._group("after", *other)

    def _eldest(self, nodes: Tensor) -> Tensor:
        """Return the nodes in whose units what reads a wire is counted: where it begins, as behind a norm."""
        return torch.where(nodes > 0, self.frame.nodes.wires[nodes], 0)

    def _channels(self, nodes: Tensor) -> Tensor:
        c = torch.where(nodes > 0, self.frame.channel_of[nodes], -1)
        return torch.where(c >= 0, 2 * c + self.frame.nodes.dual[nodes].long(), -1)

    def _pairs(self, one: Tensor, other: Tensor) -> Tensor:
        """Return which of some nodes are the same channels as which others (2, n)."""
        a, b = self._channels(one), self._channels(other)
        return torch.stack(torch.nonzero((a[:, None] == b) & (a >= 0)[:, None], as_tuple=True))

    def _meets(self, one: Tensor, other: Tensor) -> bool:
        return bool(self._pairs(one, other).shape[1])

    def _taken_by_columns(self, b: int, m: int, k: Tensor, j: Tensor) -> Tensor:
        """Add unknowns (inputs of b, inputs, taps): W_jm -= B_jk z."""
        B, W = (self.walk.uses[n] for n in (b, m))
        ids = self._new(k.shape[1] * W.shape[1] * W.shape[2]).view(1, k.shape[1], *W.shape[1:])
        shape = (j.shape[1], *ids.shape[1:])
        moved = Source(W.memory, *(x[j[1]][:, None].expand(shape) for x in (W.entries, W.places)))
        value = Source(B.memory, *(x[j[0]][:, k[1], 0][..., None, None].expand(shape) for x in (B.entries, B.places)))
        up = (W.out[j[1]][:, None, None, None], B.into[k[1]][None, :, None, None], self._eldest(W.into))
        up = (*up[:2], up[2][None, None, :, None])
        own = self._own_units[B.into[k[1]]][None, :, None, None]
        down = (B.out[j[0]][:, None, None, None], W.into[None, None, :, None], own)
        self._terms(ids.expand(shape), moved, value, up, down)
        return ids

    def _taken_by_outputs(self, a: int, b: int, m: int, k: Tensor, j: Tensor) -> Tensor:
        """Add unknowns (outputs of b, inputs of b): W_jm -= z A_km, and those of biases b_j -= z a_k."""
        A, W = (self.walk.uses[n] for n in (a, m))
        made = self._new(j.shape[1] * k.shape[1])
        ids = made.view(j.shape[1], k.shape[1], 1, 1)
        shape = (*ids.shape[:2], *W.shape[1:])
        moved = Source(W.memory, *(x[j[1]][:, None].expand(shape) for x in (W.entries, W.places)))
        value = Source(A.memory, *(x[k[0]][None].expand(shape) for x in (A.entries, A.places)))
        own_units = self._eldest(A.out[k[0]])[None, :, None, None]
        up = (W.out[j[1]][:, None, None, None], A.into[None, None, :, None], own_units)
        own = self._own_units[W.out[j[1]]][:, None, None, None]
        down = (A.out[k[0]][None, :, None, None], W.into[None, None, :, None], own)
        self._terms(ids.expand(shape), moved, value, up, down)
        return torch.cat([made, *self._of_constants(b)])

    def _of_constants(self, b: int) -> list[Tensor]:
        """Add unknowns (outputs of b, inputs of b) by biases: c_j -= z b_k, for V_jk += z."""
        if b in self._constants:
            return self._constants[b]
        B = self.walk.uses[b]
        leaves = [p for p in self.frame.ports if p.use >= len(self.walk.uses) and p.entries.shape[1] == 1]
        found = list[Tensor]()
        for s in leaves:
            k, row = self._common(B.into, s)
            for t in leaves if len(k) else ():
                j, into = self._common(B.out, t)
                if not len(j):
                    continue
                ids = self._new(len(j) * len(k)).view(len(j), len(k))
                found.append(ids.reshape(-1))
                moved = Source(t.memory, *(x[into].expand(ids.shape) for x in (t.entries, t.places)))
                value = Source(s.memory, *(x[row].T.expand(ids.shape) for x in (s.entries, s.places)))
                self._terms(
                    ids,
                    moved,
                    value,
                    (t.nodes[into][:, None], self._eldest(s.nodes[row])[None]),
                    (s.nodes[row][None], self._own_units[t.nodes[into]][:, None]),
                )
        self._constants[b] = found
        return found

    def _alone(self) -> None:
        """Add what a use and its bias have alone: entries that nothing reads or reaches, constants of inputs."""
        for n, use in enumerate(self.walk.uses):
            if use.entries.numel() > MOST_TOGETHER:
                continue
            ids = self._single_of(n).reshape(-1)
            more = [ids[ids >= 0]]
            if use.tokens.place is not None:
                more += self._of_constants(n)
            for p in self.frame.ports:
                if p.use >= len(self.walk.uses) and self._meets(use.out, p.nodes):
                    more.append(self._entries_of(p))
            self._group("alone", *more)

    @property
    def often(self) -> Tensor:
        """Return at how many points each has to be exercised: more than there are that move the same entry alone.

        These differ by weights, of which a point has one value, whatever the number of its losses.
        """
        terms = torch.zeros(self.count, dtype=torch.long)
        for block in self.blocks:
            terms += torch.bincount(block.unknown, minlength=self.count)
        by_entry = torch.zeros(self.size, dtype=torch.long)
        for block in self.blocks:
            alone = block.moved.entries[terms[block.unknown] == 1]
            by_entry += torch.bincount(alone, minlength=self.size)
        often = torch.full((self.count,), OFTEN)
        for block in self.blocks:
            alone = terms[block.unknown] == 1
            often.scatter_reduce_(0, block.unknown[alone], by_entry[block.moved.entries[alone]] + _SPARE, "amax")
        return often

    # At a point

    def charges(self, point: Point) -> tuple[Tensor, Tensor]:
        """Return the charges of all unknowns, (losses, unknowns), and the sums of their absolute summands."""
        units = self.frame.units(point.reading)
        total = torch.zeros(len(point.gradients), self.count, dtype=torch.float64)
        size = torch.zeros_like(total)
        for block in self.blocks:
            q = point.gradients[:, block.moved.entries] * block.rates(point.reading, units)
            total.index_add_(1, block.unknown, q)
            size.index_add_(1, block.unknown, q.abs())
        return total, size

    def fields(self, point: Point, basis: Tensor) -> Tensor:
        """Return the changes of theta (P, k) by columns of unknowns."""
        units = self.frame.units(point.reading)
        made = torch.zeros(self.size, basis.shape[1], dtype=torch.float64)
        for block in self.blocks:
            made.index_add_(0, block.moved.entries, basis[block.unknown] * block.rates(point.reading, units)[:, None])
        return made

    def slices_of(self, entries: Tensor) -> Tensor:
        """Return which unknowns cannot be known if no gradient reaches these entries, bool (unknowns,)."""
        found = torch.zeros(self.count, dtype=torch.bool)
        counts = torch.zeros(self.count, dtype=torch.long)
        for block in self.blocks:
            counts += torch.bincount(block.unknown, minlength=self.count)
        for name, start in self.frame.entries.start.items():
            part = entries[start : start + self.frame.entries.shapes[name].numel()]
            if bool(part.any()) and not bool(part.all()):  # of longer inputs: rows of all columns alone
                whole = torch.zeros_like(entries)
                whole[start : start + len(part)] = True
                for block in self.blocks:
                    inside = whole[block.moved.entries]
                    found[block.unknown[inside & (counts[block.unknown] == 1)]] = True
        return found


@dataclass(frozen=True, eq=False)
class FoundFields:
    """Hold shifts, and what was none."""

    symmetries: tuple[Shift, ...]
    refused: tuple[str, ...]
    kernel: Kernel[Fields]
    kinds: tuple[str, ...]


def read_fields(frame: Frame, draw: Callable[[], Point]) -> FoundFields:
    """Return the shifts of a narrow net that hold at all weights."""
    fields = Fields(frame)
    kernel = solve(fields, draw)
    point = draw()
    made, kinds, refused = [], [], list[str]()
    known = torch.zeros(fields.size, 0, dtype=torch.float64)
    for kind, N in zip(fields.kinds, kernel.parts, strict=True):
        if not N.shape[1]:
            continue
        N = sparse(N, N)
        F = fields.fields(point, N)
        sizes = F.norm(dim=0)
        rest = F - known @ (known.T @ F)
        N = N[:, _pivots(rest, sizes)]
        if not N.shape[1]:
            continue
        F = fields.fields(point, N)
        known = torch.linalg.qr(torch.cat([known, F / F.norm(dim=0)], 1))[0]
        for columns in _unmoved(fields, N):
            for shift in _shifts(fields, N[:, columns], refused):
                made.append(shift)
                kinds.append(kind)
    return FoundFields(tuple(made), tuple(refused), kernel, tuple(kinds))


def _shifts(fields: Fields, N: Tensor, refused: list[str]) -> list[Shift]:
    """Return columns of unknowns as one shift, without those that groups cannot read."""
    try:
        return [Shift(tuple(_terms(fields, N)), N.shape[1])]
    except ValueError as error:
        if N.shape[1] == 1:
            refused.append(f"a shift: {error}")
            return []
    good = [k for k in range(N.shape[1]) if _shifts(fields, N[:, k : k + 1], refused)]
    return _shifts(fields, N[:, good], refused) if good else []


def _unmoved(fields: Fields, N: Tensor) -> Iterator[Tensor]:
    """Yield sets of columns none of which moves what others are multiplied by, by need one by one."""
    every = torch.arange(N.shape[1])
    moved = torch.zeros(fields.size, N.shape[1], dtype=torch.bool)
    by = torch.zeros_like(moved)
    for block in fields.blocks:
        touched = N[block.unknown] != 0
        moved.index_put_((block.moved.entries,), touched, accumulate=True)
        if block.value is not None:
            keep = block.value.entries >= 0
            by.index_put_((block.value.entries[keep],), touched[keep], accumulate=True)
    clash = (moved.double().T @ by.double()) > 0
    clash = clash | clash.T
    left = every
    while len(left):
        some: list[int] = []
        for k in left.tolist():
            if not bool(clash[k, torch.tensor([*some, k])].any()) or not some:
                some.append(k)
        yield torch.tensor(some)
        left = torch.tensor([k for k in left.tolist() if k not in some], dtype=torch.long)


def _terms(fields: Fields, N: Tensor) -> Iterator[Terms]:
    """Yield the terms of columns of unknowns (ValueError for what groups cannot read)."""
    frame = fields.frame
    for whole in fields.blocks:
        block = whole.at(torch.nonzero((N[whole.unknown] != 0).any(1))[:, 0])
        if not len(block.unknown):
            continue
        owner = frame.owners(block.moved.entries)
        if block.value is not None:
            if bool((block.value.entries < 0).any()):
                raise ValueError("factors must be entries of parameters. Found constants")
            owner = owner * (len(frame.entries.start) + 1) + frame.owners(block.value.entries)
        for one in owner.unique():
            piece = block.at(torch.nonzero(owner == one)[:, 0])
            factors = [] if piece.value is None else [_entry(frame, piece.value, piece.value.entries)]
            constant = torch.full((len(piece.unknown),), piece.sign, dtype=torch.float64)
            every: list[tuple[Tensor, Tensor, Tensor]] = []
            for nodes, power in [*((n, 1) for n in piece.up), *((n, -1) for n in piece.down)]:
                c, steps = frame._steps(nodes)
                constant = constant * c**power
                every += [(which, number, power * p) for which, number, p in steps]
            factors += frame.gained(_without_common(every))
            moved = piece.moved.entries
            unique, at = moved.unique(return_inverse=True)
            first = torch.full((len(unique),), len(moved)).scatter_reduce(0, at, torch.arange(len(moved)), "amin")
            rows = _rows(frame, piece.moved.at(first))
            sp = (N[piece.unknown] * constant[:, None]).to_sparse_coo().coalesce()
            yield Terms(rows, at, sp.indices(), sp.values(), tuple(factors))


def _without_common(steps: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return steps (which use of a gain, its number, power) without those that others undo, term by term."""
    gains = [torch.where(which >= 0, number, -1) for which, number, _ in steps]
    for i in range(len(steps)):
        for j in range(i):
            undone = (gains[i] >= 0) & (gains[i] == gains[j]) & (steps[i][2] == -steps[j][2])
            gains[i], gains[j] = (torch.where(undone, -1, gains[k]) for k in (i, j))
    kept = []
    for known, (which, number, power) in zip(gains, steps, strict=True):
        if bool((known >= 0).any()):
            kept.append((torch.where(known >= 0, 2 * (which // 2) + (power > 0), -1), number, power))
    return kept


def _rows(frame: Frame, source: Source) -> Rows:
    owner = int(frame.owners(source.entries[:1])[0]) - 1
    name = list(frame.entries.start)[owner]
    places = (source.entries - frame.entries.start[name])[:, None]
    affine = frame._function(source.memory, source.places[:, None])
    return Rows.at(name, tuple(frame.entries.shapes[name]), places, **affine)


def _entry(frame: Frame, source: Source, entries: Tensor) -> Gain:
    unique, at = entries.unique(return_inverse=True)
    first = torch.full((len(unique),), len(entries)).scatter_reduce(0, at, torch.arange(len(entries)), "amin")
    return Gain(_rows(frame, source.at(first)), at, 1.0)
