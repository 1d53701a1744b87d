"""Find directions of wide nets by token vectors: inputs x and derivatives dy of each use y = W x, at given weights.

Null vectors of all dy are outputs that nothing depends on; those of all x are inputs that never occur, and those of
all [x 1] besides are constants. Maps whose tokens are equal on the shared side are blocks of one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.blocks import Block, Layout, Map
from quotient_manifolds.symmetries.charges.frame import Frame
from quotient_manifolds.symmetries.charges.kernel import NOISE, full_rank, null_space
from quotient_manifolds.symmetries.charges.samples import Leaves, Sample, Side, Undecided, Used, samples
from quotient_manifolds.symmetries.charges.shifts import WideShifts
from quotient_manifolds.symmetries.charges.stacks import TINY, Bases, Stacks, within
from quotient_manifolds.symmetries.charges.taps import cuts
from quotient_manifolds.symmetries.trace.replay import Replay

TOKENS, FRESH = 520, 64
"""Tokens of a sample, and of one that checks what was found."""
WIDEST = 4000
"""Channels of a matrix whose null vectors are computed."""
ROUNDS = 14
_SPARE = 10
_CALM = 3
"""Points in turn that show nothing new, after which a unit that is off counts as unread."""
_MOST = 1_000_000
"""Entries of a parameter whose gradient is computed."""
_LEAST = 1 / 10
"""How many rows there must be in one turn, for each column: others are given up."""
_SMALL = 1e-30
DrawTokens = Callable[[Mapping[str, Tensor], int, Sequence[str], Collection[int] | None], Sample]
"""Return a sample at these weights, of fresh inputs with about so many tokens, at the model's own eps.

With the gradients of the parameters that are named. Derivatives may be of what some uses write alone, and are of all
sides of all for None; then shapes may differ from call to call.
"""


def dealt(
    walk: Used,
    weights: Mapping[str, Tensor],
    batches: Sequence[Sequence[Tensor]],
    generator: torch.Generator,
    vectors: Sequence[str] = (),
    some: Collection[int] | None = None,
) -> Sample:
    """Return one sample of batches of one shape, run at once if all operations can be, at the model's own eps.

    some: uses of which derivatives are wanted, of what they write alone; other slopes may have no rows.
    """
    if not cuts(walk.program):  # taps are of one batch
        try:
            return _at_once(walk, weights, batches, generator, vectors, some)
        except (RuntimeError, ValueError, NotImplementedError, TypeError):  # of vmap
            pass
    made = [s for each in batches for s in samples(walk, weights, each, 1, generator, vectors=vectors, generic=False)]

    def joined(sides: Sequence[Mapping[int, Side]]) -> dict[int, Side]:
        return {
            n: Side(torch.cat([each[n].values for each in sides]), torch.cat([each[n].slopes for each in sides]))
            for n in sides[0]
        }

    if not made:
        raise Undecided("Outputs must be finite and depend on the weights. Found none that are")
    gradients = {name: torch.stack([s.gradients[name] for s in made]).sum(0) for name in vectors}
    return Sample(joined([s.read for s in made]), joined([s.written for s in made]), gradients)


def _at_once(
    walk: Used,
    weights: Mapping[str, Tensor],
    batches: Sequence[Sequence[Tensor]],
    generator: torch.Generator,
    vectors: Sequence[str],
    some: Collection[int] | None,
) -> Sample:
    watch = {use.operation: use.tokens.place for use in walk.uses}
    leaves = Leaves(weights, vectors)
    replay, places = Replay(walk.program), list[tuple[int, int]]()

    def one(*inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        outputs, seen = replay.run(leaves.__getitem__, inputs, watch, generic=False)
        places[:] = [(p, side) for p, pair in seen.items() for side, t in enumerate(pair) if t is not None]
        return outputs, [seen[p][side] for p, side in places]  # type: ignore[misc]

    outputs, tokens = torch.vmap(one)(*[torch.stack(each) for each in zip(*batches, strict=True)])
    outputs = [y for y in outputs if y.requires_grad]
    if not outputs or not all(bool(torch.isfinite(y).all()) for y in outputs):
        raise RuntimeError("Outputs must be finite and depend on the weights. Found others")
    up = [
        torch.randn(y.shape, generator=generator, dtype=y.dtype) / y.detach().square().mean().sqrt().clamp(_SMALL)
        for y in outputs
    ]
    values = dict(zip(places, tokens, strict=True))
    keys = places if some is None else list(dict.fromkeys((walk.uses[n].operation, 1) for n in some))
    wanted = [*(values[key] for key in keys), *(leaves[name] for name in vectors)]
    found = torch.autograd.grad(outputs, wanted, up, materialize_grads=True) if wanted else ()
    slopes = dict(zip(keys, found, strict=False))

    def side(use: int, written: int) -> Side:
        key, of = (walk.uses[use].operation, written), walk.uses[use].tokens.of
        known = of(values[key].detach())
        return Side(known, of(slopes[key]) if key in slopes else known[:0])

    read = {n: side(n, 0) for n, use in enumerate(walk.uses) if use.tokens.place is not None}
    written = {n: side(n, 1) for n in range(len(walk.uses))}
    return Sample(read, written, dict(zip(vectors, found[len(keys) :], strict=True)))


class Stock:
    """Collect rows until they are more than the columns, then hold what all of them vanish on.

    basis: orthonormal null vectors, None while there are too few rows. smallest: the smallest relative pivot of others.
    """

    def __init__(self, columns: int) -> None:
        self.columns, self.have, self.smallest, self.largest = columns, 0, float("inf"), 0.0
        self.rows: Tensor | None = torch.empty(columns + _SPARE, columns, dtype=torch.float64)
        self.basis: Tensor | None = None
        self.silent = torch.ones(columns, dtype=torch.bool)

    @property
    def wants(self) -> bool:
        """Return whether rows may change what is held."""
        return self.basis is None or self.basis.shape[1] > 0

    def add(self, rows: Tensor) -> bool:
        """Take rows into account; return whether these break some of what was held."""
        if not bool((rows[:, 0] != 0).all()):
            rows = rows[(rows != 0).any(1)]
        if self.rows is not None:
            rows = rows[: len(self.rows) - self.have]
            self.rows[self.have : self.have + len(rows)] = rows
            self.have += len(rows)
            if self.have == len(self.rows):
                self._solve(self.rows)
                self.rows = None
            return True
        assert self.basis is not None
        if not self.wants or not len(rows):
            return False
        left = rows @ self.basis / rows.square().sum(1).mean().sqrt()
        worst = float(left.abs().max())
        if worst <= NOISE:
            self.largest = max(self.largest, worst)
            return False
        before, self.basis = self.basis.shape[1], self.basis @ null_space(left, scale=len(left) ** 0.5)[0]
        return self.basis.shape[1] < before

    def _solve(self, rows: Tensor) -> None:
        size = rows.norm(dim=0) / len(rows) ** 0.5
        self.silent = size == 0
        size = size.clamp(min=NOISE * float(size.max()) + 1e-300)
        rows /= size
        if smallest := full_rank(rows[: self.columns]):
            self.basis, self.smallest = torch.zeros(self.columns, 0, dtype=torch.float64), smallest
            return
        N, self.smallest = null_space(rows)
        self.basis = torch.linalg.qr(N / size[:, None])[0]


def constant(N: Tensor) -> Tensor | None:
    """Return c with c . x = 1 for all x, by null vectors N of all [x 1]; None if there is none."""
    if float(N[-1:].norm()) <= TINY:
        return None
    v = N @ N[-1]
    return -v[:-1] / v[-1]


Key = tuple[str, int]


class Tokens:
    """Say which rows a sample has for each matrix of a layout: `written` and `read` by use, `several` by block."""

    def __init__(self, layout: Layout, first: Sample) -> None:
        self.layout, self.uses = layout, layout.walk.uses
        self.refused: dict[str, None] = {}
        self.biases = self.own_biases(layout, first)
        self.lead = dict[int, int]()
        """By use: the first use that reads the same tokens."""
        same = dict[tuple[object, ...], int]()
        for n in layout.inputs:
            x = first.read[n].values
            if self.uses[n].shape[2] == 1:
                self.lead[n] = same.setdefault((x.data_ptr(), x.shape, x.stride()), n)
        self.biased, self.several = dict[int, Block](), list[Block]()
        """By use: it beside its own bias; and blocks of uses whose tokens are equal."""
        for block in layout.shared:
            for group in self._aligned(block, first):
                uses = {m.use for m in group if m.use < len(self.uses)}
                if len(uses) > 1:
                    self.several.append(Block(group, block.outputs))
                elif len(group) == 2 and not block.outputs and len(group[0].entries) == len(self.uses[min(uses)].out):
                    self.biased[min(uses)] = Block(group, False)

    def _aligned(self, block: Block, first: Sample) -> Iterator[tuple[Map, ...]]:
        """Yield the maps of a block by what agrees up to a number: derivatives of outputs, or inputs."""
        left = [m for m in block.maps if m.use < len(self.uses) and self.uses[m.use].shape[2] == 1]
        left = [m for m in left if m.use in self.layout.inputs]
        biases = [m for m in block.maps if m.use >= len(self.uses) and m.entries.shape[1] == 1]
        tokens = [self._shared_side(m, block.outputs, first) for m in left]
        while left:
            ratios = [1.0, *(_ratio(t, tokens[0]) for t in tokens[1:])]
            group = [
                replace(m, scale=m.scale * r, units=m.units * r if block.outputs else m.units / r)
                for m, r in zip(left, ratios, strict=True)
                if r
            ]
            for m in () if block.outputs else biases:
                own = [self.biases[g.use][g.port.rows] for g in group if g.use in self.biases]
                if any(torch.equal(m.entries[:, 0], each) for each in own):
                    group.append(m)
            yield tuple(group)
            left = [m for m, r in zip(left, ratios, strict=True) if not r]
            tokens = [t for t, r in zip(tokens, ratios, strict=True) if not r]

    @staticmethod
    def _shared_side(m: Map, outputs: bool, sample: Sample) -> Tensor:
        if outputs:
            return sample.read[m.use].values[:, m.port.rows] / m.units
        return sample.written[m.use].slopes[:, m.port.rows] * m.units

    @staticmethod
    def own_biases(layout: Layout, sample: Sample) -> dict[int, Tensor]:
        """Return by use the entries of its bias, if their gradient is that of this use alone."""
        found = {}
        for n, bias in layout.walk.biases.items():
            if bool((bias < 0).any()) or float(layout.frame.shares[bias].max()) > 1:
                continue
            name, at = layout.owner(bias)
            slopes = sample.written[n].slopes
            if name not in sample.gradients or int(at.max()) >= sample.gradients[name].numel():
                continue
            error = sample.gradients[name].reshape(-1)[at] - slopes.sum(0)
            if float(error.norm()) <= NOISE * float(slopes.abs().sum(0).norm()):
                found[n] = bias
        return found

    @property
    def with_biases(self) -> set[int]:
        """Return the uses that are in a block with a bias, and several uses."""
        biased = [b for b in self.several if any(m.use >= len(self.uses) for m in b.maps)]
        return {m.use for block in biased for m in block.maps}

    def columns(self) -> dict[Key, int]:
        """Return how many columns each matrix has."""
        found = {("written", n): len(self.uses[n].out) for n in self.layout.outputs}
        found |= {("read", n): len(self.uses[n].into) + 1 for n in self.lead.values()}
        found |= {("several", k): sum(len(m.columns) for m in b.maps) for k, b in enumerate(self.several)}
        for key in [key for key, count in found.items() if count > WIDEST]:
            self.refused[f"{self.name(key)}: {found.pop(key)} channels, more than {WIDEST}"] = None
        return found

    def name(self, key: Key) -> str:
        """Return the parameter that a matrix is about."""
        block = self.several[key[1]] if key[0] == "several" else self.layout.outputs.get(key[1])
        return self.layout.frame.name_of(block.maps[0].port) if block else f"use {key[1]}"

    def bases(self, stocks: Mapping[Key, Stock]) -> Bases:
        """Return the null vectors of all blocks of the layout."""

        def at(kind: str, n: int | None, count: int) -> Tensor:
            stock = None if n is None else stocks.get((kind, n))
            return torch.zeros(count, 0, dtype=torch.float64) if stock is None or stock.basis is None else stock.basis

        unread = {n: at("written", n, len(self.uses[n].out)) for n in self.layout.outputs}
        unreached, shared = {}, list[tuple[Block, Tensor]]()
        for n in self.layout.inputs:
            N = at("read", self.lead.get(n), self.uses[n].shape[1] * self.uses[n].shape[2] + 1)
            one = torch.arange(len(N)) == len(N) - 1
            unreached[n] = within(N, ~one)[:-1]
            if n in self.biased:
                shared.append((self.biased[n], N))
        shared += [(b, at("several", k, len(b.columns))) for k, b in enumerate(self.several)]
        return Bases(self.layout, unread, unreached, tuple(shared), torch.zeros(0, 0, dtype=torch.float64))

    def constant(self, stocks: Mapping[Key, Stock], n: int) -> Tensor | None:
        """Return c with c . x = 1 for all that a use reads, None if there is none."""
        stock = stocks.get(("read", self.lead[n]))
        return None if stock is None or stock.basis is None else constant(stock.basis)

    def derived(self, keys: Collection[Key]) -> set[int]:
        """Return the uses of which the derivatives of what they write are in matrices."""
        of_several = {m.use for kind, n in keys if kind == "several" for m in self.several[n].maps}
        return {n for kind, n in keys if kind == "written"} | {n for n in of_several if n < len(self.uses)}

    def rows(self, key: Key, sample: Sample) -> Tensor:
        """Return the rows of a matrix that a sample has (tokens, columns)."""
        kind, n = key
        if kind == "written":
            return sample.written[n].slopes
        if kind == "read":
            x = sample.read[n].values
            return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
        block, parts = self.several[n], list[Tensor]()
        for m in block.maps:
            if m.use >= len(self.uses):
                parts.append(torch.ones(len(parts[0]), 1, dtype=torch.float64))
            else:
                side = sample.written[m.use].slopes if block.outputs else sample.read[m.use].values
                parts.append(side[:, m.columns])
        return torch.cat(parts, 1)


def read_wide(
    frame: Frame, draw: DrawTokens, elsewhere: DrawTokens, weights: Mapping[str, Tensor], shapes: int = 1
) -> Stacks:
    """Return directions at these weights by token vectors, for wide nets.

    draw: at the weights it is given, of so many `shapes` in turn. elsewhere: at generic ones; channels that are 0 here
    for all tokens but not there are idle, and not free. Not asked are inputs of convolutions with taps, and what
    several uses have in common unless their tokens are equal.
    """
    layout = Layout(frame, weights)
    tokens: Tokens | None = None
    stocks: dict[Key, Stock] = {}
    refused: dict[str, None] = {}
    count, vectors = TOKENS, _vectors(layout)
    left: dict[Key, Stock] = {}
    for turn in range(ROUNDS):
        some = tokens.derived(left) if tokens else None
        sample = draw(weights, count, vectors if some is None else (), some)
        if tokens is None:
            tokens = Tokens(layout, sample)
            stocks = {key: Stock(columns) for key, columns in tokens.columns().items()}
        for key, stock in stocks.items():
            if stock.wants and (some is None or tokens.derived([key]) <= some):
                stock.add(tokens.rows(key, sample))
        left = {key: stock for key, stock in stocks.items() if stock.rows is not None}
        for key in [k for k, s in left.items() if s.have < (turn + 1) * s.columns * _LEAST]:
            refused[f"{tokens.name(key)}: {left.pop(key).have} tokens, too few for its channels"] = None
            del stocks[key]
        if not left:
            break
        missing = max((turn + 1) * (s.columns + _SPARE - s.have) / s.have for s in left.values())
        count = min(TOKENS, int(1.1 * TOKENS * missing) + 1)
    assert tokens is not None
    refused |= {**layout.refused, **tokens.refused}
    _without_idle(tokens, stocks, lambda: elsewhere(weights, FRESH, (), None), refused)
    calm, drawn = 0, list[Sample]()
    while calm < max(2, shapes):  # a position may occur in one shape alone
        most = max((s.basis.shape[1] for s in stocks.values()), default=0)  # type: ignore[union-attr]
        drawn = [*drawn[-1:], draw(weights, min(max(FRESH, 2 * most), TOKENS), vectors, None)]
        broken = [s.add(tokens.rows(key, drawn[-1])) for key, s in stocks.items() if s.wants]
        calm = 0 if any(broken) else calm + 1
    bases = tokens.bases(stocks)
    others = {n for n in tokens.lead if n not in tokens.biased} - tokens.with_biases
    constants = {n: c for n in others if (c := tokens.constant(stocks, n)) is not None}
    found = (*bases.stacks(), *WideShifts(layout, bases.unread, constants, tokens.biases, drawn).stacks())
    largest = max((stock.largest for stock in stocks.values()), default=0.0)
    return Stacks(found, tuple(refused), largest, min((s.smallest for s in stocks.values()), default=float("inf")))


def _vectors(layout: Layout) -> list[str]:
    """Return the parameters of which gradients are wanted: biases, and tables of few words."""
    entries, leaves = layout.frame.entries, layout.leaves
    tables = {entries.plain.get(layout.walk.uses[n].memory) for n in layout.tables}
    slices = {name: slice(start, start + entries.shapes[name].numel()) for name, start in entries.start.items()}
    some = [name for name, at in slices.items() if name in tables or bool(leaves[at].any())]
    return [name for name in some if entries.shapes[name].numel() <= _MOST]


def _without_idle(
    tokens: Tokens, stocks: Mapping[Key, Stock], elsewhere: Callable[[], Sample], refused: dict[str, None]
) -> None:
    """Hold what is 0 here but not elsewhere, where one looks until several points in turn show nothing new."""
    silent = {key: stock.silent for key, stock in stocks.items() if bool(stock.silent.any())}
    left, calm = dict(silent), 0
    while calm < _CALM and any(bool(each.any()) for each in left.values()):
        other = elsewhere()
        seen = {key: each & (tokens.rows(key, other) != 0).any(0) for key, each in left.items()}
        calm = 0 if any(bool(each.any()) for each in seen.values()) else calm + 1
        left = {key: each & ~seen[key] for key, each in left.items()}
    for key, every in silent.items():
        stock, idle = stocks[key], every & ~left[key]
        if bool(idle.any()):
            stock.basis = within(stock.basis, ~idle)  # type: ignore[arg-type]
            refused[f"{tokens.name(key)}: {int(idle.sum())} channels are idle here, but not at other weights"] = None


def _ratio(one: Tensor, other: Tensor) -> float:
    """Return r with one = r * other up to rounding, 0 if there is none; one column is compared first."""
    if one.shape != other.shape:
        return 0.0
    a, b = one[:, 0], other[:, 0]
    r = float(a @ b / (b @ b).clamp(min=1e-300))
    same = bool((a - r * b).norm() <= NOISE * b.norm()) and bool((one - r * other).norm() <= NOISE * other.norm())
    return r if same else 0.0
