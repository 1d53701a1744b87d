"""Make records of what a walk allows: scales, blocks that mix, what is unseen or unreached, and shifts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from quotient_manifolds.symmetries.pair import SymmetricPair
from quotient_manifolds.symmetries.wires.blocks import find_blocks
from quotient_manifolds.symmetries.wires.channels import Bundle
from quotient_manifolds.symmetries.wires.constants import Constants, FreeDirections, unreached_basis
from quotient_manifolds.symmetries.wires.gauges import gauges
from quotient_manifolds.symmetries.wires.labels import UNREACHED, UNREAD, Roles
from quotient_manifolds.symmetries.wires.linear_algebra import Array
from quotient_manifolds.symmetries.wires.overlap import own_dimension
from quotient_manifolds.symmetries.wires.partners import Partners
from quotient_manifolds.symmetries.wires.relations import parts_of
from quotient_manifolds.symmetries.wires.reparameterization import Reparameterization
from quotient_manifolds.symmetries.wires.scaling import Scaling, scalings
from quotient_manifolds.symmetries.wires.shifting import Solved, offset_channels, shifts_of, whole_biases
from quotient_manifolds.symmetries.wires.uses import Linear, by_entries
from quotient_manifolds.symmetries.wires.walk import Walk


def reparameterizations(
    walk: Walk, taken: Sequence[Bundle], pairs: tuple[SymmetricPair, ...], constants: Constants
) -> list[Reparameterization]:
    """Return all that a walk allows, in the order in which it is folded, but what pairs have taken.

    taken: channels that pairs mix and scale; pairs: those that tell
    how constants of their channels are measured; constants: of the walk.
    """
    partners = Partners(walk, pairs)
    constants = constants.beside(partners, offset_channels(walk))
    _free_offsets(constants)
    blocks, roles = find_blocks(walk), Roles(walk)
    at, found = constants.at(walk.parameters), Solved.at(constants, walk.parameters)
    partners.shifted = frozenset(name for kind, name, _ in found.column if kind == "bias")
    mixed = [each.block for each in taken if each.block is not None]
    gone = {block.roots for block in mixed}
    linear = [block for block in blocks if block.kind == "linear" and block.roots not in gone]
    own = {block.roots: own_dimension(walk, at, found, block) - 1 for block in linear}
    idle = [block for block in linear if own[block.roots] < 0]  # not even a scale is left to them
    held = [root for block in idle for root in block.roots]
    walk.equal((np.flatnonzero(np.isin(walk.turns.find(np.arange(walk.count))[0], held)), 1.0))
    by_length: dict[int, list[tuple[Array, Array]]] = defaultdict(list)
    for scale in (scale for each in taken for scale in each.scales()):
        by_length[len(scale[0])].append(scale)
    for several in by_length.values():
        walk.scales.equal(*(np.stack(part) for part in zip(*several, strict=True)))
    for block in (*linear, *mixed):  # it scales its channels against each other
        first, rest = block.roots[0], np.array(block.roots[1:])
        walk.scales.equal(np.stack([rest, np.full(len(rest), first)], 1), np.tile([1.0, -1.0], (len(rest), 1)))
    scaled = scalings(walk, roles, parts_of(*walk.scales.solutions()), partners, constants)
    scales = sorted(scaled, key=lambda each: (not each.tells, any(basis.size for basis in each.free)))
    _settle(walk, scales)
    left = [block for block in find_blocks(walk) if block.roots not in gone]
    told = [each for each in scales if each.tells]
    turns = list(gauges(walk, roles, left, told, partners, own))
    means = [each for each in turns if each.acts == "mean"]
    others = [each for each in turns if each.acts != "mean"]
    lengths = [each for each in scales if each not in told]
    # A mean goes by what its readers answer that somebody sees, and changes what writes to the stream, seen or not.
    written = {part.entries.name for each in means for part in each.parts if part.out}
    added = list(_constant(constants))
    early = [each for each in added if each.kind == UNREAD and written.isdisjoint(each.names)]
    later = [each for each in added if each not in early]
    return _told_apart([*told, *early, *means, *later, *lengths, *others])


def _told_apart(several: Sequence[Reparameterization]) -> list[Reparameterization]:
    """Give each a name of its own, and put together what is added to one parameter: no input may show a part of it."""
    found, count = dict[str, Reparameterization](), Counter[str]()
    for each in several:
        last = found.get(each.label)
        both = last.beside(each) if isinstance(last, FreeDirections) else None
        if both is None:
            count[each.label] += 1
            both = replace(each, number=count[each.label]) if each.label in found else each  # type: ignore[type-var]
        found[both.name] = both
    return [*found.values()]


def _free_offsets(constants: Constants) -> None:
    """Let channels be scaled to which constants are added, where shifts make up for that."""
    walk, params = constants.walk, constants.walk.parameters
    shifts = constants.at(params).shifts(walk, constants.scaled)
    constants.whole = whole_biases(shifts)
    if constants.scaled:
        free = [n for turn in Solved.at(constants, params).turned.tolist() for n in constants.scaled[turn]]
        walk.scales = walk.loose
        walk.equal((np.setdiff1d(walk.offsets(), free), 1.0))


def _settle(walk: Walk, found: Sequence[Scaling]) -> None:
    """Give the classes of channels the weights that they have where gains are at their place."""
    size = np.zeros(walk.count)
    for each in found:
        z, start = each.by_gains(walk.parameters), 0
        for component in each.components:
            d = component.basis.shape[1]
            size[component.unknowns] += component.basis @ z[start : start + d]
            start += d
    for classes in (walk.turns, walk.means):
        classes.rescale(size)
    walk.notes["source", "size"] = size


def _constant(constants: Constants) -> Iterator[Reparameterization]:
    """Yield what is unseen, then shifts, then what is unreached: more where shifts have taken constants away."""
    walk, params = constants.walk, constants.walk.parameters
    at = constants.at(params)
    readers = by_entries([each for each in walk.linears if not each.table])
    unreached = [unreached_basis(at, same).shape[1] for same in readers]
    answers = [each.linear for each in Solved.at(constants, params).shifts.virtual]
    answers += [same[0] for same, count in zip(readers, unreached, strict=True) if count]
    answering = {root for each in answers for root in walk.means.find(each.ins)[0].flat}
    for same in by_entries([*walk.linears, *(each for each in walk.vectors if not each.gain)]):
        width = same[0].shape[2] if isinstance(same[0], Linear) else 1
        bases = FreeDirections(constants, UNREAD, ()).bases(tuple(same), params)
        size = width * sum(K.shape[1] for K in bases)
        mean = all(K.shape[1] == 1 and np.ptp(K) < 1e-9 for K in bases)  # a norm takes it away, whatever weights are
        if size and same[0].entries.key not in constants.whole:
            written = walk.means.find(np.concatenate([each.outs for each in same]))[0]
            answered = width > 1 and not mean and not answering.isdisjoint(written.flat)
            yield FreeDirections(constants, UNREAD, ((tuple(same), size),), answered)
    yield from shifts_of(constants, params)
    for same, count in zip(readers, unreached, strict=True):
        taps, out, _ = same[0].shape
        free = at.unseen.common([row for each in same for row in each.outs]).shape[1]
        size = taps * (out - free) * count
        if size:
            yield FreeDirections(constants, UNREACHED, ((tuple(same), size),))
    constants.forget()
