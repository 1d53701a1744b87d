"""Token vectors of a large model part by part, the last part first.

What is live between two parts is held for all tokens; each part is run again from there with its graph, and handed the
derivatives of the part behind it. So of all activations those of one part are there at a time, and of few tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.samples import Leaves, Sample, Side, Used, scaled
from quotient_manifolds.symmetries.trace import replay
from quotient_manifolds.symmetries.trace.program import Program
from quotient_manifolds.symmetries.trace.replay import Replay


class Extent(NamedTuple):
    """Hold the first and the last operation that a matrix has rows of, and how many entries the matrix has."""

    first: int
    last: int
    size: int


class Part(NamedTuple):
    """Hold the operations of a part, and the values that later ones take."""

    places: range
    live: tuple[int, ...]


def parts(program: Program, extents: Sequence[Extent], batches: int) -> list[Part]:
    """Return parts for which what is held is least: the matrices of one part, and for all batches what is live between.

    No matrix has rows of two parts.
    """
    live, end = _live(program), len(program.operations)
    size = [sum(torch.Size(program.layouts[n].shape).numel() for n in each) for each in live]
    free = [c for c in range(1, end) if not any(each.first < c <= each.last for each in extents)]
    total = sum(each.size for each in extents)
    count = int((total / (batches * max(1, min(size[c] for c in free)))) ** 0.5) if free else 1
    done = {c: sum(each.size for each in extents if each.last < c) for c in free}
    cuts = set[int]()
    for k in range(1, count):
        near = [c for c in free if abs(done[c] - k * total / count) <= total / (2 * count)]
        cuts |= {min(near, key=lambda c: (size[c], c))} if near else set()
    ends = [*sorted(cuts), end]
    return [Part(range(a, b), tuple(live[b])) for a, b in zip([0, *ends], ends, strict=False)]


def at_once(program: Program, places: range) -> int:
    """Return of how many batches at least one what a part computes, and derivatives by it, is held at once."""
    made = (n for place in places for n in program.operations[place].outs if n not in program.parameters)
    size = sum(torch.Size(program.layouts[n].shape).numel() for n in made)
    return max(1, int(replay.HELD / (2 * max(1, size))))


def _live(program: Program) -> list[list[int]]:
    """Return for each place what was made before, or is an input, and is taken there or later; outputs at the end."""
    given = {*program.parameters, *program.constants}
    needed = dict.fromkeys(number for number in program.outputs if number not in given)
    found = [list(needed)]
    for operation in reversed(program.operations):
        for number in operation.outs:
            needed.pop(number, None)
        needed |= dict.fromkeys(number for number in operation.ins if number not in given)
        found.append(list(needed))
    return found[::-1]


def dealt_in_parts(
    walk: Used,
    weights: Mapping[str, Tensor],
    chunks: Sequence[Sequence[Tensor]],
    generator: torch.Generator,
    every: Sequence[Part],
    some: Collection[int],
) -> Iterator[tuple[Part, Iterator[Sample]]]:
    """Yield each part with samples of its uses, one of each chunk: of inputs of several batches, stacked.

    some: uses of which derivatives are wanted, of what they write. Samples are of what `tokens.dealt` returns.
    """
    program, leaves = walk.program, Leaves(weights, ())
    runs, depends = Replay(program), set(program.parameters)
    for operation in program.operations:
        depends |= set(operation.outs) if not depends.isdisjoint(operation.ins) else set()
    watch = {use.operation: use.tokens.place for use in walk.uses}

    def run(part: Part, known: Mapping[int, Tensor], seen: dict[int, int | None]) -> tuple[list[Tensor], Tokens]:
        keys = list[tuple[int, int]]()

        def one(*given: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            values = dict(zip(known, given, strict=True))
            made, found = runs.part(leaves.__getitem__, values, part.places, part.live, seen)
            tokens = {(p, side): t for p, pair in found.items() for side, t in enumerate(pair) if t is not None}
            keys[:] = tokens
            return made, list(tokens.values())

        made, tokens = torch.vmap(one)(*known.values())
        return made, dict(zip(keys, tokens, strict=True))

    held, up = list[list[dict[int, Tensor]]](), list[dict[int, Tensor]]()
    for chunk in chunks:
        known = [dict(zip(program.inputs, chunk, strict=True))]
        with torch.no_grad():
            for part in every:
                known.append(dict(zip(part.live, run(part, known[-1], {})[0], strict=True)))
        outputs = known.pop()
        if not all(bool(torch.isfinite(y).all()) for y in outputs.values()):
            raise RuntimeError("Outputs must be finite. Found others")
        held.append(known)
        up.append({n: scaled(y, generator) for n, y in outputs.items()})

    def sample(k: int, part: Part) -> Sample:
        start = held[k].pop()
        leafs = {n: t.detach().requires_grad_(n in depends and t.is_floating_point()) for n, t in start.items()}
        made, values = run(part, leafs, {p: own for p, own in watch.items() if p in part.places})
        ways = {n: y for n, y in zip(part.live, made, strict=True) if y.requires_grad and n in up[k]}
        uses = [n for n, use in enumerate(walk.uses) if use.operation in part.places]
        keys = list(dict.fromkeys((walk.uses[n].operation, 1) for n in uses if n in some))
        back = [n for n, t in leafs.items() if t.requires_grad]
        wanted = [*(values[key] for key in keys), *(leafs[n] for n in back)]
        given = [up[k][n] for n in ways]
        found = torch.autograd.grad(list(ways.values()), wanted, given, materialize_grads=True) if wanted else ()
        slopes = dict(zip(keys, found, strict=False))
        up[k] = dict(zip(back, found[len(keys) :], strict=True))

        def side(use: int, written: int) -> Side:
            key, of = (walk.uses[use].operation, written), walk.uses[use].tokens.of
            seen = of(values[key].detach())
            return Side(seen, of(slopes[key]) if key in slopes else seen[:0])

        read = {n: side(n, 0) for n in uses if walk.uses[n].tokens.place is not None}
        return Sample(read, {n: side(n, 1) for n in uses}, {})

    for part in reversed(every):
        yield part, (sample(k, part) for k in range(len(chunks)))


Tokens = dict[tuple[int, int], Tensor]
"""Values by operation, of what it takes (0) and gives (1)."""
