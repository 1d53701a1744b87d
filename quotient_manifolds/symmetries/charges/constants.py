"""Assign each constant that a model adds to channels to a bias: the nearest one on the same wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.nodes import firsts
from quotient_manifolds.symmetries.charges.walk import Walk
from quotient_manifolds.symmetries.groups.gains import Constant, Constants, Gain
from quotient_manifolds.symmetries.groups.rows import Rows

Step = tuple[Tensor, Tensor, Tensor]
"""For each row: a number of the use of a gain or -1, the number of the gain, and its power."""
_FAR = 1 << 60
_MOST = 1 / torch.finfo(torch.float64).eps
"""Larger constants mask channels: a bias that takes one up would be lost to rounding."""
Steps = Callable[[Tensor], tuple[Tensor, list[Step]]]
"""Function that returns the units of nodes as constants and steps."""


def taken_up(
    walk: Walk, shares: Tensor, steps: Steps, gained: Callable[[Sequence[Step]], tuple[Gain, ...]]
) -> Constants:
    """Return the constants m added to channels as parts (u_b / u_m) m of biases b, with the units u of their channels.

    A bias is an entry that is used as an activation once, and the only entry of its parameter on its wire. These are
    proposals: charges decide. gained: converts steps to gains.
    """
    found: list[Constant] = []
    for name, bias, node, values, event in _pairs(walk, shares):
        (above, powers), (below, others) = steps(node), steps(event)
        both = without_common([*powers, *((which, number, -power) for which, number, power in others)])
        entries = Rows.at(name, tuple(walk.entries.shapes[name]), bias[:, None])
        try:
            found.append(Constant(entries, values * above / below, gained(both)))
        except ValueError:  # groups cannot read its entries
            continue
    return Constants(tuple(found))


def _pairs(walk: Walk, shares: Tensor) -> Iterator[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
    """Yield a parameter, entries of it that are biases, their nodes, constants and their nodes; no entry twice."""
    places, events, values = (torch.cat(each) for each in zip(*_events(walk), strict=True))
    owner, entry, node, by = (torch.cat(each) for each in zip(*_biases(walk, shares), strict=True))
    turned = walk.channels.dual.long()
    of = torch.full_like(places, -1)
    for classes in (walk.channels.scales, walk.channels.wires):  # prefer a bias of the same scale
        own = 2 * classes + turned
        of = torch.where(of < 0, _nearest(own[node], by, own[events], places), of)
    taken = torch.nonzero(of >= 0)[:, 0]
    of = of[taken]
    while len(taken):
        fresh = torch.zeros(len(taken), dtype=torch.bool)
        fresh[firsts(torch.unique(of, return_inverse=True)[1], len(of.unique()))] = True
        for number, name in enumerate(walk.leaves):
            some = fresh & (owner[of] == number)
            if bool(some.any()):
                yield name, entry[of[some]], node[of[some]], values[taken[some]], events[taken[some]]
        taken, of = taken[~fresh], of[~fresh]


def _events(walk: Walk) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the places of operations that add constants, the nodes, and the constants."""
    none = torch.zeros(0, dtype=torch.long)
    yield none, none, none.double()
    for place, nodes, values in walk.constants:
        some = values.abs() < _MOST
        yield torch.full_like(nodes[some], place), nodes[some], values[some]


def _biases(walk: Walk, shares: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield the numbers of parameters, their entries that are biases, the nodes, and the operations that use them."""
    yield tuple(torch.zeros(4, 0, dtype=torch.long))
    for number, (name, nodes) in enumerate(walk.leaves.items()):
        alone = (nodes > 0) & (walk.taken[name] >= 0) & (shares[walk.entries.start[name] :][: len(nodes)] == 1)
        at = torch.nonzero(alone)[:, 0]
        _, which, count = torch.unique(walk.channels.wires[nodes[at]], return_inverse=True, return_counts=True)
        at = at[count[which] == 1]
        yield torch.full_like(at, number), at, nodes[at], walk.taken[name][at]


def _nearest(known: Tensor, at: Tensor, wanted: Tensor, places: Tensor) -> Tensor:
    """Return the index of the known item of each wanted class at the nearest place, the earlier of two, or -1."""
    many = 1 + max(int(each.max()) if len(each) else 0 for each in (at, places))
    key, sought = known * many + at, wanted * many + places
    order = torch.argsort(key)
    none = torch.full((1,), _FAR)
    key, order = (
        torch.cat([-none, key[order], none]),
        torch.cat([-torch.ones_like(none), order, -torch.ones_like(none)]),
    )
    after = torch.searchsorted(key[1:-1].contiguous(), sought, right=True) + 1
    sides = after - 1, after
    apart = [
        torch.where(key[k].div(many, rounding_mode="floor") == wanted, (key[k] - sought).abs(), _FAR) for k in sides
    ]
    found = torch.where(apart[0] <= apart[1], order[sides[0]], order[sides[1]])
    return torch.where(torch.minimum(*apart) < _FAR, found, -1)


def without_common(steps: Sequence[Step]) -> list[Step]:
    """Return steps without pairs of gains that cancel."""
    kept = [torch.where(which >= 0, 2 * which + (power > 0), -1) for which, _, power in steps]
    ends = [(int(gain.min()), int(gain.max())) for _, gain, _ in steps]
    for i, j in combinations(range(len(steps)), 2):
        if ends[i][1] < ends[j][0] or ends[j][1] < ends[i][0]:
            continue
        (_, a, p), (_, b, q) = steps[i], steps[j]
        undone = (kept[i] >= 0) & (kept[j] >= 0) & (a == b) & (p == -q)
        kept[i], kept[j] = (torch.where(undone, -1, each) for each in (kept[i], kept[j]))
    return [(kind, gain, power) for kind, (_, gain, power) in zip(kept, steps, strict=True) if bool((kind >= 0).any())]
