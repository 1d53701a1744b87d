"""Follow values that are computed from several channels: scores of a head, gates of an expert, norms of a group.

The walk follows entries that depend on one channel. All others have marks here: numbers of nodes, or of sets of marks.
If an operation only moves entries, which is checked by running it on the marks, marks move, too. Otherwise they stay in
place, and marks that are reduced or contracted form a set. Buffers have marks from the start, so that the statistics of
each channel are found. Marks may be wrong: they only determine which units are proposed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.nodes import distinct_columns
from quotient_manifolds.symmetries.charges.walk import Walk, on_processor
from quotient_manifolds.symmetries.trace.program import Operation, substituted

_REFUSED = (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError)
_LARGE = 2**22
"""Values with more entries have no marks."""


Placed = tuple[int, Tensor]
"""The operation at which marks occur together, and pairs of these marks as columns."""


class Sets:
    """Hold the marks of a walk: nodes are numbered from 1, followed by entries of buffers, then by sets.

    members: pairs (set, mark), as columns. beside: pairs (mark, node) of constants that are added to a channel or
    multiply it. read: by use, the marks of the channels that it reads. depth: by operation, the largest number of
    weights applied in sequence up to it. buffers: by name, the mark of a buffer's first entry. first: the first set.
    """

    def __init__(self, walk: Walk) -> None:
        self.walk, self.program = walk, walk.program
        self.count = len(walk.nodes)
        self.members: list[Placed] = []
        self.beside: list[Placed] = []
        self.pairs: list[Placed] = []
        self.read: dict[int, Tensor] = {}
        self.buffers: dict[str, int] = {}
        self._marks: dict[int, Tensor] = {}
        self._generator = torch.Generator().manual_seed(11)
        recording = walk.recording
        self._data = {self.program.layouts[n].memory for n in self.program.inputs}
        for number, name in recording.buffers.items():
            layout = self.program.layouts[number]
            if name not in self.buffers and layout.room <= _LARGE:
                self.buffers[name] = self._new(layout.room)
            if name in self.buffers:
                self._marks[layout.memory] = self.buffers[name] + torch.arange(layout.room)
        self.first = self.count
        self._place = 0
        self.depth, behind = list[int](), dict[int, int]()
        uses: dict[int, list[int]] = {}
        for k, use in enumerate(walk.uses):
            uses.setdefault(use.operation, []).append(k)
        for place, operation in enumerate(self.program.operations):
            self._place = place
            taken = any(walk.entries.known(n) for n in operation.ins)
            self.depth.append(max((behind.get(n, 0) for n in operation.ins), default=0) + taken)
            behind.update(dict.fromkeys(operation.outs, self.depth[-1]))
            memories = [self.program.layouts[n].memory for n in (*operation.ins, *operation.outs)]
            if self._data.intersection(memories[: len(operation.ins)]):
                self._data.update(memories[len(operation.ins) :])
            for k in uses.get(place, ()):
                self._reads(k, operation)
            if place not in uses:
                self._follow(operation)

    def _new(self, count: int) -> int:
        self.count += count
        return self.count - count

    def _sets(self, columns: Tensor) -> Tensor:
        """Return a mark for each column: its only mark, a set if there are several, or 0."""
        first, which = distinct_columns(columns.sort(0)[0])
        sets = columns[:, first]
        made, several = sets.amax(0), (torch.where(sets > 0, sets, sets.amax(0)) != sets.amax(0)).any(0)
        new = self._new(int(several.sum())) + torch.arange(int(several.sum()))
        made[several] = new
        pairs = torch.stack([new.expand(len(sets), -1).reshape(-1), sets[:, several].reshape(-1)])
        if pairs.numel():
            self.members.append((self._place, torch.unique(pairs[:, pairs[1] > 0], dim=1)))
        return made[which]

    def nodes(self, number: int) -> Tensor:
        """Return the nodes of a value; for a parameter, the nodes that it has as an activation."""
        layout, walk = self.program.layouts[number], self.walk
        if layout.memory in walk._labels:
            found = walk.labels(number)
            return torch.zeros(layout.shape, dtype=torch.long) if found is None else found
        if walk.entries.known(number):
            return self.leaves(walk.entries.of(number))
        return torch.zeros(layout.shape, dtype=torch.long)

    def leaves(self, entries: Tensor) -> Tensor:
        """Return the nodes of entries of theta that are activations, 0 for others."""
        found = torch.zeros(entries.shape, dtype=torch.long)
        for name, nodes in self.walk.leaves.items():
            local = entries - self.walk.entries.start[name]
            inside = (local >= 0) & (local < len(nodes))
            found[inside] = nodes[local[inside]]
        return found

    def of(self, number: int) -> Tensor:
        layout = self.program.layouts[number]
        known = self._marks.get(layout.memory)
        return torch.zeros(layout.shape, dtype=torch.long) if known is None else layout.of(known)

    def _reads(self, use: int, operation: Operation) -> None:
        tokens = self.walk.uses[use].tokens
        if tokens.place is not None:
            marks = self.of(operation.args[tokens.place].number)
            if bool(marks.any()):
                self.read[use] = tokens.of(marks).amax(0)

    def _follow(self, operation: Operation) -> None:
        layouts = self.program.layouts
        ins = list(dict.fromkeys(operation.ins))
        own = {layouts[n].memory for n in ins}
        outs = [n for n in operation.outs if layouts[n].memory not in own and layouts[n].room <= _LARGE]
        nodes, marks = {n: self.nodes(n) for n in ins}, {n: self.of(n) for n in ins}
        labelled = [n for n in ins if bool(nodes[n].any())]
        marked = [n for n in ins if bool(marks[n].any())]
        if operation.func._schema.is_mutable:  # a value written into another's memory has its nodes
            for n in labelled[1:]:
                if layouts[n].shape == layouts[labelled[0]].shape:
                    self._pair(nodes[labelled[0]], nodes[n])
        if not outs or not (labelled or marked):
            return
        for out in outs:
            passed = self.nodes(out)
            if not marked and bool((passed > 0).all()):
                continue
            if labelled:
                for n in marked:
                    if layouts[n].memory not in self._data and n not in labelled:
                        self._note(marks.pop(n), passed)
            made = torch.zeros_like(passed)
            if bool((passed == 0).any()):
                whole = {n: torch.where(m > 0, m, nodes[n]) for n, m in marks.items()}
                made = self._made(operation, whole, out, passed).where(passed == 0, 0)
            if bool((passed > 0).any()):  # a node already shows which channel it depends on
                made = made.where(passed == 0, self._made(operation, marks, out, passed))
                self._pair(made, passed)
            if bool(made.any()):
                layout = layouts[out]
                memory = self._marks.setdefault(layout.memory, torch.zeros(layout.room, dtype=torch.long))
                layout.write(memory, made)

    def _note(self, marks: Tensor, nodes: Tensor) -> None:
        """Record constants that are combined with channels, one number with each channel."""
        try:
            pairs = torch.stack([marks.expand(nodes.shape).reshape(-1), nodes.reshape(-1)])
        except RuntimeError:
            return
        pairs = torch.unique(pairs[:, (pairs > 0).all(0)], dim=1)
        if pairs.shape[1] == len(pairs[1].unique()):
            self.beside.append((self._place, pairs))

    def _pair(self, a: Tensor, b: Tensor) -> None:
        """Record pairs of marks that occur together."""
        pairs = torch.stack(torch.broadcast_tensors(a, b)).flatten(1)
        pairs = pairs[:, (pairs > 0).all(0)]
        if pairs.numel():
            self.pairs.append((self._place, pairs[:, distinct_columns(pairs)[0]]))

    def _made(self, operation: Operation, given: dict[int, Tensor], out: int, passed: Tensor) -> Tensor:
        """Return the marks of a result, 0 where the origin of an entry is unknown."""
        some = {n: marks for n, marks in given.items() if bool(marks.any())}
        shape = passed.shape
        if not some:
            return torch.zeros_like(passed)
        if operation.name in ("bmm", "mm"):
            return self._contracted(operation, some, passed)
        if (moved := self._moved(operation, some, out)) is not None:
            return moved
        try:
            return self._sets(torch.stack([marks.expand(shape).reshape(-1) for marks in some.values()])).view(shape)
        except RuntimeError:
            found = self._reduced(operation, next(iter(some.values())), shape) if len(some) == 1 else None
            return torch.zeros_like(passed) if found is None else found

    def _moved(self, operation: Operation, some: dict[int, Tensor], out: int) -> Tensor | None:
        """Return the marks of a result if the operation only moves entries, else None."""
        names = torch.cat([marks.reshape(-1) for marks in some.values()]).unique()
        names = names[names > 0]
        numbers = torch.rand(len(names), generator=self._generator, dtype=torch.float64).sort()[0] + 0.5
        values, layouts = self.walk.recording.values, self.program.layouts

        def at(number: int) -> Tensor:
            value = values[number].cpu()
            if number in some:
                marks = some[number]
                place = torch.searchsorted(names, marks.contiguous()).clamp(max=len(names) - 1)
                return torch.where(marks > 0, numbers[place], 0.0)
            if number in floating:
                return torch.zeros(layouts[number].shape, dtype=torch.float64)
            return value

        floating = {n for n in operation.ins if layouts[n].is_floating_point}
        try:
            kwargs = substituted(on_processor(operation.kwargs), at)
            made = operation.func(*substituted(operation.args, at), **kwargs)
        except _REFUSED:
            return None
        parts = [made] if isinstance(made, Tensor) else [t for t in made if isinstance(t, Tensor)]
        made = parts[operation.outs.index(out)]
        if not made.is_floating_point() or made.shape != self.program.layouts[out].shape:
            return None
        place = torch.searchsorted(numbers, made.double().contiguous()).clamp(max=len(names) - 1)
        good = (numbers[place] == made) | (made == 0)
        return torch.where(made == 0, 0, names[place]) if bool(good.all()) and bool(made.any()) else None

    def _reduced(self, operation: Operation, marks: Tensor, shape: Sequence[int]) -> Tensor | None:
        """Return the sets of the marks that are reduced along axes; None if the axes are unknown."""
        axes = operation.args[1] if len(operation.args) > 1 else None
        axes = [axes] if isinstance(axes, int) and not isinstance(axes, bool) else axes
        if not isinstance(axes, (list, tuple)) or not all(
            isinstance(a, int) and -marks.ndim <= a < marks.ndim for a in axes
        ):
            return None
        axes = sorted({a % marks.ndim for a in axes})
        size, left = torch.Size(marks.shape[a] for a in axes).numel(), torch.Size(shape).numel()
        if not axes or size * left != marks.numel():
            return None
        rest = [a for a in range(marks.ndim) if a not in axes]
        return self._sets(marks.permute(*axes, *rest).reshape(size, left)).view(shape)

    def _contracted(self, operation: Operation, given: dict[int, Tensor], passed: Tensor) -> Tensor:
        """Return for each entry of a product the set of marks that it contracts, without its own node."""
        sides = []
        for ref, last in zip(operation.args[:2], (True, False), strict=True):
            if ref.number not in given:
                continue
            marks = given[ref.number]
            fibers = marks.movedim(-1, 0) if last else marks.movedim(-2, 0)  # (contracted, ...)
            sets = self._sets(fibers.reshape(len(fibers), -1)).view(fibers.shape[1:])
            sets = (sets[..., None] if last else sets[..., None, :]).expand(passed.shape)
            sides.append(torch.where(sets == passed, 0, sets).reshape(-1))
        if len(sides) == 2:
            a, b = (given[ref.number] for ref in operation.args[:2])
            self._pair(a, b.mT[..., :1, :])
            self._pair(a[..., :1, :], b.mT)
        return self._sets(torch.stack(sides)).view(passed.shape)
