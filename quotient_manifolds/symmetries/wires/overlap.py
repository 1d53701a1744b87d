"""Count what matrices that mix channels do beside what is unseen, unreached and shifted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quotient_manifolds.symmetries.wires.blocks import Block, Copy, copies
from quotient_manifolds.symmetries.wires.constants import At
from quotient_manifolds.symmetries.wires.linear_algebra import Array, kernel, span
from quotient_manifolds.symmetries.wires.shifting import Solved
from quotient_manifolds.symmetries.wires.uses import Linear, by_entries
from quotient_manifolds.symmetries.wires.walk import Walk


def own_dimension(walk: Walk, at: At, found: Solved, block: Block) -> int:
    """Return the dimension of GL(n) but for what others hold.

    X changes only what nobody sees, and answers to what never occurs, where B X A = 0, for all A that is reached and
    all B that is seen. Where u . x = 1 for all that is reached, d u^T shifts by d.
    """
    n = len(block.roots)
    other = [row for each in walk.uses if each.shared in ("other", "turned") for row in (*each.ins, *each.outs)]
    if any(copies(block, row) for row in other):  # nothing is unseen or unreached there
        return n * n
    sides: tuple[list[Array], list[Array]] = ([np.zeros((n, 0))], [np.zeros((n, 0))])
    common, shifts = list[Array](), list[Array]()
    for same in by_entries([*walk.linears, *(each for each in walk.vectors if not each.gain)]):
        first = same[0]
        for place in range(1 if isinstance(first, Linear) else len(first.outs)):
            for copy in copies(block, first.outs[place]):
                outs = [each.outs if isinstance(each, Linear) else [each.outs[place]] for each in same]
                unseen = at.unseen.common(_at(copy, [row for rows in outs for row in rows]))
                sides[not copy.dual].append(_spread(copy, kernel(unseen.T), n, dual=True))
        for copy in copies(block, first.takes) if isinstance(first, Linear) else ():
            rows = _at(copy, [row for each in same for row in each.ins])
            U, c = at.unreached.common(rows)
            never = kernel(c[None]).T @ U if len(c) else U
            sides[copy.dual].append(_spread(copy, kernel(never), n, dual=False))
            if not copy.dual:
                common.append(np.concatenate([_spread(copy, U.T, n, dual=True), c[None]]))
                added = found.shifts.expressions(rows[0])[:, : found.directions.shape[0]] @ found.directions
                shifts.append(_spread(copy, added.toarray(), n, dual=False))
    A, B = (span(np.concatenate(each, 1)) for each in sides)
    return A.shape[1] * B.shape[1] - _shifted(common, shifts, B)


def _shifted(common: Sequence[Array], shifts: Sequence[Array], B: Array) -> int:
    """Return how many d u^T are shifts, for u . x = c on all that readers take."""
    if not common:
        return 0
    equations = np.concatenate(common, 1)
    u, c = equations[:-1].T, equations[-1]
    if not c.any() or np.abs(u @ np.linalg.lstsq(u, c, rcond=None)[0] - c).max() > 1e-8 * np.abs(c).max():
        return 0
    return span(B.T @ shifts[0]).shape[1]


def _at(copy: Copy, rows: Sequence[Any]) -> list[Array]:
    return [np.asarray(row)[copy.places.numpy()] for row in rows]


def _spread(copy: Copy, columns: Array, n: int, *, dual: bool) -> Array:
    """Return vectors, or functionals, of channels of a copy as those of the block, in columns."""
    weights = copy.weights.numpy()[:, None]
    found = np.zeros((n, columns.shape[1]))
    found[copy.channels.numpy()] = columns * weights if dual else columns / weights
    return found
