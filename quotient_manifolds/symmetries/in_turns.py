"""Minimize |w| over one group after another, in closed form if there is one, for models of any width."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quotient_manifolds.linalg import LinAlgError
from quotient_manifolds.symmetries.groups import (
    GL,
    Complex,
    Constant,
    Constants,
    Draft,
    Factor,
    FromSum,
    Gauge,
    Matrix,
    Part,
    Product,
    Rows,
    Slices,
    Slot,
    Span,
    Sparse,
    Sum,
    Symmetry,
    Terms,
    Torus,
    Translation,
    Wire,
    blocks,
)
from quotient_manifolds.symmetries.least_norm import DONE, Free, Point, Step, in_units, moments

_SWEEPS = 30
_REGULAR = 1e-15
"""Added to a block's second moment, relative to its mean, so that a moment of lower rank has an inverse."""
_STEPS = 40
_RANK, _ORTHOGONAL = 1e-9, 1e-12
"""Singular values that count as 0, and inner products that count as 0, relative to the largest squared length."""
_FULL = 1e-4
"""Smallest pivot of a second moment, relative to the largest, at which full rank is certain."""
_ZERO = 1e-12


class Settled(NamedTuple):
    """Hold steps along translations, the entries that are 0 then, by parameter, and translations not used up."""

    steps: list[Step]
    zeros: dict[str, Tensor]
    left: list[Translation]


def without_constants(draft: Draft, translations: Sequence[Translation], zero: Mapping[str, Tensor]) -> Settled:
    """Translate a draft until constants are at their origins, `zero`, beginning with earlier parameters.

    The parameters of a translation determine its z one after another, in the order of the draft, until z has no freedom
    left. It has another turn only if these parameters or their factors change. Parameters that compensate for others
    come last, because constants that two translations pass back and forth could grow without bound.
    """
    paid = [each.parts for each in translations if any(map(_is_direct, each.parts))]
    taking = {part.rows.name for parts in paid for part in parts if not _is_direct(part)}
    place = {name: k for k, name in enumerate(sorted(draft, key=lambda name: name in taking))}
    free, translations = _free(translations, draft), _told_apart(translations, place, draft)
    order = sorted(range(len(translations)), key=lambda k: min(place[name] for name in translations[k].names))
    todo, turns, steps, visits = dict.fromkeys(order), dict[int, Turn](), list[Step](), 0
    while todo and visits < _SWEEPS * len(translations):
        k, visits = next(iter(todo)), visits + 1
        del todo[k]
        turns[k] = turn = _projected(draft, zero, translations[k], place, free)
        if turn.z is not None:
            translations[k].move(draft, turn.z)
            steps.append((translations[k], turn.z))
            moved = {*translations[k].names}
            todo |= dict.fromkeys(j for j in order if j != k and j in turns and moved & turns[j].read)
    zeros: dict[str, Tensor] = {}
    # Only the first part is 0 at all weights: another part may be 0 by chance, as biases before training are.
    settled = [_in_order(each, place)[0] for k, each in enumerate(translations) if turns[k].exact]
    for part in (part for each in translations for part in each.parts):
        if _are_at(part.rows, draft, zero):
            draft.write(part.rows, part.rows.read(zero))
            first = part.rows.columns == 1 and any(part is each for each in settled)
            if first and not bool(part.rows.entries(zero).any()):  # `zero` may be, e.g., a running mean
                name, at = part.rows.name, part.rows.places.flatten()
                zeros[name] = torch.cat([zeros.get(name, at), at]).unique()
    return Settled(steps, zeros, [each for k, each in enumerate(translations) if not turns[k].exact])


def _are_at(rows: Rows, params: Mapping[str, Tensor], zero: Mapping[str, Tensor]) -> bool:
    """Return whether all entries of rows are at their origins; the first is tested first, as most are not."""
    first = int(rows.starts[0, 0] + rows.steps[0])
    w, at = (float(each[rows.name].reshape(-1)[first]) for each in (params, zero))
    if abs(w - at) > _ZERO:
        return False
    return float((rows.entries(params) - rows.entries(zero)).abs().max()) <= _ZERO


def _in_order(translation: Translation, place: Mapping[str, int]) -> list[Part]:
    """Return parts in order: those that z changes directly come first, so that no reader's weights must be inverted.

    Parts with matrices of weights as factors come last, because other groups mix their rows.
    """
    matrices = lambda part: any(rows.columns > 1 for rows in part.read())  # noqa: E731
    return sorted(translation.parts, key=lambda part: (not _is_direct(part), matrices(part), place[part.rows.name]))


def _told_apart(
    translations: Sequence[Translation], place: Mapping[str, int], params: Mapping[str, Tensor]
) -> list[Translation]:
    """Replace translations by differences, such that no two of them determine the same constants first."""
    found: list[Translation] = []
    firsts: list[tuple[Part, Tensor | None, Translation]] = []
    for own in sorted(translations, key=lambda each: _in_order(each, place)[0].left is not None):
        for _ in translations:
            first = _in_order(own, place)[0]
            if len(own.parts) == 1 or not _is_direct(first) or first.rows.columns > 1:
                break
            left = first.at(params)[0]
            known = [
                each for each in firsts if _same_rows(each[0], first) and (each[1] is None or _same(each[1], left))
            ]
            other = _difference(own, first, known[0][2], known[0][0]) if known else None
            if other is None:
                firsts.append((first, None if _same(left, None) else left, own))
                break
            own = other
        found.append(own)
    return found


def _same_rows(one: Part, other: Part) -> bool:
    a, b = one.rows, other.rows
    plain = not any(isinstance(each, Tensor) for each in (a.scale, b.scale))
    return plain and (a.name, a.scale) == (b.name, b.scale) and torch.equal(a.places, b.places)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    one, other = (
        None if each is None or torch.equal(each, torch.eye(len(each), each.shape[1]).double()) else each
        for each in (one, other)
    )
    return one is other if one is None or other is None else torch.equal(one, other)


def _difference(own: Translation, first: Part, other: Translation, its: Part) -> Translation | None:
    """Return own minus other, which leaves the rows of `first` unchanged; None if it cannot be formed.

    its: the part of other with the same rows, whose left is the identity or equals first.left.
    """
    of = None if its.left is not None else first.left
    parts = [part for part in own.parts if part is not first]
    for part in (part for part in other.parts if part is not its):
        if part.right is not None or any(each.right is not None for each in parts):
            return None
        beside = next((k for k, each in enumerate(parts) if _same_rows(each, part)), None)
        if beside is not None:
            both = (_left(parts[beside]), _negative(part, of))
            parts[beside] = Part(part.rows, Sum(both))
        elif any(each.rows.meets(part.rows) for each in parts):
            return None
        else:
            parts.append(Part(part.rows, _negative(part, of)))
    return Translation(tuple(parts), own.kind)


def _left(part: Part) -> Tensor | Factor:
    return torch.eye(len(part.rows), dtype=torch.float64) if part.left is None else part.left


def _negative(part: Part, of: Tensor | Factor | None) -> Factor:
    n = len(part.rows)
    if of is not None:
        return Product((-torch.eye(n, dtype=torch.float64), _left(part), of))
    if part.left is None:
        return Sparse((n, n), (Terms(torch.arange(n).repeat(2, 1), -torch.ones(n, dtype=torch.float64)),))
    if isinstance(part.left, Sparse):
        return Sparse(part.left.shape, tuple(replace(each, values=-each.values) for each in part.left.terms))
    return Product((-torch.eye(n, dtype=torch.float64), part.left))


def of_sums(symmetries: Sequence[Symmetry]) -> list[Translation]:
    """Return translations of constants on channels with a constant sum, compensated by the readers' biases.

    t 1^T maps constants to multiples of t, and a limit of elements maps them to 0, once biases absorb means of weights.
    """
    taking: dict[str, list[Translation]] = {}
    for each in symmetries:
        if isinstance(each, Translation) and len(each.parts) == 2 and each.parts[1].rows.columns == 1:
            taking.setdefault(each.parts[0].rows.name, []).append(each)
    found = []
    for gauge in symmetries:
        if not isinstance(gauge, Gauge) or not isinstance(gauge.algebra, FromSum):
            continue
        n = gauge.wire.channels
        writers = [slot for slot in gauge.wire.slots if slot.covariant]
        readers = [slot for slot in gauge.wire.slots if not slot.covariant]
        biases = [_bias(slot, taking.get(slot.name, [])) for slot in readers]
        whole = all(torch.equal(slot.channels, torch.arange(n)) for slot in gauge.wire.slots)
        single = all(slot.writes and slot.rows.columns == 1 for slot in writers) and not any(s.writes for s in readers)
        if not writers or not whole or not single or None in biases or gauge.wire.constants.every:
            continue
        ones, index = torch.ones(n, dtype=torch.float64), torch.arange(n).repeat(2, 1)
        terms = [Terms(index, ones if each.constant is None else each.constant, each.gains) for each in writers]
        parts = [Part(each.rows, Sparse((n, n), (own,))) for each, own in zip(writers, terms, strict=True)]
        for slot, rows in zip(readers, biases, strict=True):
            assert rows is not None
            beside = ones if slot.constant is None else slot.constant
            above = -torch.ones(len(rows), dtype=torch.float64)
            parts.append(Part(rows, Matrix(above, beside, slot.rows, True, ((), slot.gains))))
        if all(not one.rows.meets(other.rows) for one, other in combinations(parts, 2)):
            found.append(Translation(tuple(parts)))
    return found


def _bias(slot: Slot, translations: Sequence[Translation]) -> Rows | None:
    """Return the biases added after a reader, which absorb the means of its weights; None if there are none."""
    for each in translations:
        weight, bias = (part.rows for part in each.parts)
        if weight.shape == slot.rows.shape and torch.equal(weight.places.mT, slot.places):
            return bias
    return None


def joined(symmetries: Sequence[Symmetry]) -> list[Symmetry]:
    """Return the symmetries with all tori joined into one, and with similar gauges joined, as the heads of a layer.

    Similar gauges differ only in their rows of the same parameters.
    """
    alike: dict[Any, list[Gauge]] = {}
    tori = [each for each in symmetries if isinstance(each, Torus)]
    result: list[Symmetry] = [_at_once(tori)] if tori else []
    for each in symmetries:
        if isinstance(each, Torus):
            continue
        slots = each.wire.slots if isinstance(each, Gauge) else ()
        plain = all(s.constant is None and not s.gains and s.rows.plain for s in slots)
        if isinstance(each, Gauge) and isinstance(each.algebra, GL) and plain and not each.wire.constants.every:
            own = tuple((s.name, s.writes, s.dual, s.use, s.rows.columns, *s.channels.tolist()) for s in slots)
            bits = () if each.reflections is None else tuple(each.reflections.tolist())
            alike.setdefault((each.algebra.n, bits, own), []).append(each)
        else:
            result.append(each)
    for gauges in alike.values():
        result += [_beside(gauges)] if len(gauges) > 1 and _disjoint(gauges) else gauges
    return result


def _at_once(tori: Sequence[Torus]) -> Torus:
    """Join tori into one."""
    slices, constants, start = list[Slices](), list[Constant](), 0
    for torus in tori:
        slices += [replace(each, index=each.index + torch.tensor([[0], [start]])) for each in torus.slices]
        constants += [each for each in torus.constants.every if each not in constants]
        start += torus.size
    return Torus(tuple(slices), start, Constants(tuple(constants)))


def _disjoint(gauges: Sequence[Gauge]) -> bool:
    """Return whether no entry is in slots of two gauges."""
    places: dict[str, list[Tensor]] = {}
    for gauge in gauges:
        own: dict[str, list[Tensor]] = {}
        for slot in gauge.wire.slots:
            own.setdefault(slot.name, []).append(slot.places.flatten())
        for name, each in own.items():
            places.setdefault(name, []).append(torch.cat(each).unique())
    return all(int(torch.bincount(torch.cat(each)).max()) == 1 for each in places.values())


def _beside(gauges: Sequence[Gauge]) -> Gauge:
    """Join gauges of GL(n) on disjoint entries into one gauge with diagonal blocks."""
    n, count = gauges[0].wire.channels, len(gauges)
    slots = []
    for same in zip(*(gauge.wire.slots for gauge in gauges), strict=True):
        rows = Rows.at(same[0].name, same[0].rows.shape, torch.cat([slot.places for slot in same]))
        channels = torch.cat([k * n + slot.channels for k, slot in enumerate(same)])
        slots.append(replace(same[0], rows=rows, channels=channels))
    flips = [gauge.reflections for gauge in gauges if gauge.reflections is not None]
    algebra = blocks(n * count, torch.arange(n * count).view(count, n))
    return Gauge(Wire(tuple(slots), n * count), algebra, torch.cat(flips) if flips else None)


def without_idle(point: Point, gauge: Gauge) -> Point:
    """Return the point with weights of 0 along directions of channels that are only written, or only read.

    It is the limit of elements P + t (1 - P), with the projection P onto the directions that readers read, or writers
    write. All points of an orbit have the same limit. Sets of channels with readers or writers only are unchanged.
    """
    wire = gauge.wire
    if wire.sides or wire.constants.every or _tied(gauge):
        return point
    for channels, algebra in gauge.algebra.summands:
        if not isinstance(algebra, GL) or algebra.n == 1:
            continue
        for covariant in (True, False):
            P = _onto(point, gauge, channels, covariant)
            if P is None:
                continue
            for slot in wire.slots:
                if slot.covariant == covariant:
                    continue
                covered, at = slot.among(channels)
                V, u = slot.rows.read(point.params), slot.units(point.params)[:, None]
                s = u if slot.writes else 1 / u
                change = torch.zeros_like(V)
                change[at.flatten()] = ((P[covered] @ (V / s)[at]).flatten(0, 1) * s[at.flatten()]) - V[at.flatten()]
                if float(change.abs().max()) > _ZERO * float(V.abs().max()):
                    point = point.acted(Translation((Part(slot.rows),)), change)
    return point


def _tied(gauge: Gauge) -> bool:
    """Return whether two slots of the wire share entries."""
    return any(one.rows.meets(other.rows) for one, other in combinations(gauge.wire.slots, 2))


def _onto(point: Point, gauge: Gauge, channels: Tensor, covariant: bool) -> Tensor | None:
    """Return projections (k, m, m) onto the span of what slots write, or read; None if all are the identity.

    A projection is the identity if the span is everything or 0.
    """
    k, m = channels.shape
    found = [torch.zeros(k, m, 1, dtype=torch.float64)]
    for slot in gauge.wire.slots:
        if slot.covariant == covariant:
            covered, at = slot.among(channels)
            V = in_units(slot, point.params)
            rows = torch.zeros(k, m, V.shape[1], dtype=torch.float64)
            rows[covered] = V[at]
            found.append(rows)
    rows = torch.cat(found, 2)
    pivots, info = torch.linalg.cholesky_ex(rows @ rows.mT)
    d = pivots.diagonal(dim1=1, dim2=2)
    if not bool(info.any()) and bool((d.amin(1) > _FULL * d.amax(1)).all()):
        return None
    U, s, _ = torch.linalg.svd(rows, full_matrices=False)
    alive = s > _RANK * s[:, :1]
    count = alive.sum(1)
    some = (count > 0) & (count < m)
    if not bool(some.any()):
        return None
    U = U * alive[:, None]
    return torch.where(some[:, None, None], U @ U.mT, torch.eye(m, dtype=torch.float64))


def in_turns(point: Point, groups: Sequence[Symmetry], tori: Sequence[Free]) -> tuple[Point, float]:
    """Minimize |w| over the groups in turns; return the point and the largest relative charge that is left.

    A group that shares no parameter with others has one turn only.
    """
    counts = Counter(name for each in (*groups, *(free.symmetry for free in tori)) for name in each.names)
    gauges = [each for each in groups if isinstance(each, Gauge)]
    for _ in range(_SWEEPS):
        left = 0.0
        for each in gauges:
            point, change = _balanced(point, each)
            left = max(left, change)
        for log_scales in tori:
            point, change = _scaled(point, log_scales)
            left = max(left, change)
        gauges = [each for each in gauges if any(counts[name] > 1 for name in each.names)]
        if left <= DONE or not (gauges or tori):
            return point, 0.0
    return point, left


def balanced_alone(
    point: Point, groups: Sequence[Symmetry], others: Sequence[Symmetry]
) -> tuple[Point, list[Symmetry]]:
    """Minimize |w| over the gauges that share no parameter with others; return the point and the other groups."""
    counts, left = Counter(name for each in (*groups, *others) for name in each.names), list[Symmetry]()
    for each in groups:
        if (
            isinstance(each, Gauge)
            and all(counts[name] == 1 and name not in point.units for name in each.names)
            and all(isinstance(algebra, (GL, Complex)) for _, algebra in each.algebra.summands)
            and _has_both_sides(point, each)
        ):
            with suppress(ValueError, LinAlgError):  # if factors have lost rank, only steps reach the limit
                moved, _ = _balanced(point, each)
                if _balanced(moved, each)[1] <= DONE:
                    point = moved
                    continue
        left.append(each)
    return point, left


def _has_both_sides(point: Point, gauge: Gauge) -> bool:
    """Return whether no block has only writers, or only readers, for which |w| has no minimum."""
    sides = [moments(point.params, gauge, channels) for channels, _ in gauge.algebra.summands]
    return all(torch.equal(M.flatten(1).any(1), N.flatten(1).any(1)) for M, N in sides)


class Turn(NamedTuple):
    """Hold z of a translation, None if 0, the parameters it depends on, and whether those that fix z become 0."""

    z: Tensor | None
    read: set[str]
    exact: bool


def _free(translations: Sequence[Translation], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return orthonormal directions (entries, k) of constants that may change without others, by parameter."""
    found: dict[str, list[Tensor]] = {}
    for each in translations:
        rows = each.parts[0].rows
        if len(each.parts) == 1 and rows.columns == 1:
            left, right = each.parts[0].at(params)
            if left is not None and right is None:
                B = torch.zeros(params[rows.name].numel(), left.shape[1], dtype=torch.float64)
                B[rows.places[:, 0]] = left
                found.setdefault(rows.name, []).append(B)
    return {name: _orthonormal(torch.cat(each, 1)) for name, each in found.items()}


def _orthonormal(B: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns: their signs if each has one nonzero entry, in distinct rows."""
    alone = int(B.count_nonzero()) == B.shape[1] == int(B.any(0).sum()) and int(B.count_nonzero(1).max()) <= 1
    return B.sign() if alone else torch.linalg.qr(B)[0]


def _projected(
    params: Mapping[str, Tensor],
    zero: Mapping[str, Tensor],
    translation: Translation,
    place: Mapping[str, int],
    free: Mapping[str, Tensor],
) -> Turn:
    """Return the turn of a translation, whose z minimizes |w - zero| of its first parameters.

    Parts without weights as factors come first, in order; the others compensate for their changes. free: directions in
    which a parameter may change alone, and which a translation of several parts therefore ignores.
    """
    parts = _in_order(translation, place)
    a, b = translation.shape
    if b > 1 and len(parts) > 1 and (parts[0].left is not None or parts[0].right is not None):
        jointly = all(part.right is None for part in parts)
        return _jointly(params, zero, parts, (a, b)) if jointly else Turn(None, set(), False)
    z, basis = torch.zeros(a, b, dtype=torch.float64), None  # a basis of the free z, None if all z are free
    read, far, exact = set[str](), 0.0, True
    for part in parts:
        left, right = part.at(params)
        read |= {part.rows.name, *(rows.name for rows in part.read())}
        wanted = -_against(part.rows, params, zero, right)
        Q = _own(part, free) if len(parts) > 1 else None
        if basis is None and left is None:
            step, null = (wanted, None) if Q is None else (wanted - Q @ (Q.mT @ wanted), Q)
        else:
            wanted = wanted if basis is None else wanted - (z if left is None else left @ z)
            L = left if basis is None else basis if left is None else left @ basis
            assert L is not None
            if Q is not None and bool((Q.mT @ L).abs().max() > _RANK * L.abs().max()):
                L = L - Q @ (Q.mT @ L)
            wanted = wanted if Q is None else wanted - Q @ (Q.mT @ wanted)
            step, null = _solved(L, wanted, 1.0 if left is None else float(left.norm()))
            exact &= float((L @ step - wanted).norm()) <= _RANK * float(wanted.norm())
            step = step if basis is None else basis @ step
        far = max(far, _length(step if left is None else left @ step, right))
        z = z + step
        if null is None:
            break
        basis = null if basis is None else basis @ null
    size = max(float(torch.linalg.vector_norm(params[part.rows.name])) for part in parts)
    return Turn(z if far > DONE * size else None, read, exact)


def _own(part: Part, free: Mapping[str, Tensor]) -> Tensor | None:
    """Return the free directions of a parameter that lie within the rows of a part, None if there are none."""
    if part.rows.columns > 1 or part.rows.name not in free:
        return None
    Q = free[part.rows.name][part.rows.places[:, 0]]
    whole = Q.square().sum(0) > 1 - _RANK
    return Q[:, whole] if bool(whole.any()) else None


def _against(rows: Rows, params: Mapping[str, Tensor], zero: Mapping[str, Tensor], right: Tensor | None) -> Tensor:
    """Return the coordinates of rows - zero in the rows of `right`, by least squares."""
    at = zero[rows.name]
    if bool((at if any(at.stride()) else at.reshape(-1)[:1]).any()):  # most origins are one expanded number
        far = rows.read(params) - rows.read(zero)
        return far if right is None else far @ torch.linalg.pinv(right)
    if right is None:
        return rows.read(params)
    inverse = right.mT / right.square().sum() if len(right) == 1 else torch.linalg.pinv(right)
    return rows.times(params, inverse)


def _jointly(
    params: Mapping[str, Tensor], zero: Mapping[str, Tensor], parts: Sequence[Part], shape: tuple[int, int]
) -> Turn:
    """Return the z that minimizes |w - zero| jointly over parts of several columns without a right factor."""
    (a, b), read = shape, {rows.name for part in parts for rows in (part.rows, *part.read())}
    gram, value, far = torch.zeros(a, a, dtype=torch.float64), torch.zeros(a, b, dtype=torch.float64), 0.0
    columns = [torch.eye(a, dtype=torch.float64) if (left := part.at(params)[0]) is None else left for part in parts]
    for left, part in zip(columns, parts, strict=True):
        gram, value = gram + left.mT @ left, value + left.mT @ (part.rows.read(params) - part.rows.read(zero))
    z = -torch.linalg.pinv(gram, hermitian=True) @ value
    for left, part in zip(columns, parts, strict=True):
        far = max(far, float((left @ z).norm()) / float(params[part.rows.name].norm().clamp(min=1e-300)))
    return Turn(z if far > DONE else None, read, False)


def _solved(L: Tensor, V: Tensor, size: float) -> tuple[Tensor, Tensor | None]:
    """Return the Y of least norm with L Y nearest to V, and a basis of the null space of L, None if it is 0.

    size: the norm of the matrix that L was computed from; singular values are compared with it.

    Orthogonal columns, such as those with one entry per row, need no decomposition.
    """
    gram = None if bool((L.count_nonzero(1) <= 1).all()) else L.mT @ L
    square = L.square().sum(0) if gram is None else gram.diagonal()
    alive = square > (_RANK * size) ** 2
    if gram is None or float((gram - square.diag()).abs().max()) <= _ORTHOGONAL * float(square.max()):
        step = torch.where(alive[:, None], (L.mT @ V) / square.where(alive, 1.0)[:, None], 0.0)
        return step, None if bool(alive.all()) else torch.eye(len(alive), dtype=torch.float64)[:, ~alive]
    U, s, Vh = torch.linalg.svd(L, full_matrices=len(L) < L.shape[1])
    rank = int((s > _RANK * size).sum())
    step = Vh[:rank].mT @ ((U[:, :rank].mT @ V) / s[:rank, None])
    return step, Vh[rank:].mT if rank < len(Vh) else None


def _is_direct(part: Part) -> bool:
    """Return whether z changes a part directly, up to units, and not through a matrix of weights."""
    return part.right is None and (part.left is None or isinstance(part.left, Sparse))


def _length(change: Tensor, right: Tensor | None) -> float:
    """Return the norm of change @ right without forming the product."""
    if right is None:
        return float(change.norm())
    side = right.norm()[None, None] if len(right) == 1 else torch.linalg.qr(right.mT, mode="r")[1]
    return float((side @ change.mT).norm())


def _balanced(point: Point, gauge: Gauge) -> tuple[Point, float]:
    """Return the point with equal second moments of writers and readers in each block, and how far apart they were."""
    blocks, far = [], 0.0
    for channels, algebra in gauge.algebra.summands:
        k, m = channels.shape
        blocks.append(torch.eye(m, dtype=torch.float64).repeat(k, 1, 1))
        if not isinstance(algebra, (GL, Complex, Span)):
            continue
        M, N = moments(point.params, gauge, channels)
        if isinstance(algebra, Span):
            J = algebra.basis[0] * algebra.basis[0].trace().sign()
            # Only the scales of a line have a closed form.
            if len(algebra.basis) > 1 or float((J @ J - J).abs().max()) > _RANK:
                continue
            a, b = ((J * each).sum((1, 2)) for each in (M, N))
            if bool((a > 0).all() and (b > 0).all()):
                far = max(far, float(((a - b).abs() / (a + b)).max()))
                blocks[-1] = blocks[-1] + ((b / a).pow(0.25) - 1)[:, None, None] * J
            continue
        scalar = m == 1 or isinstance(algebra, Complex)
        if scalar:
            M, N = (each.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] for each in (M, N))
        one, other = M.flatten(1).norm(dim=1), N.flatten(1).norm(dim=1)
        alive = (one > 0) & (other > 0)
        if not bool(alive.any()):
            continue
        M, N = M[alive], N[alive]
        far = max(far, float(((M - N).flatten(1).norm(dim=1) / (one + other)[alive]).max()))
        blocks[-1][alive] = (N / M).pow(0.25) * blocks[-1][alive] if scalar else _between(M, N, m)
    return (point, 0.0) if far <= DONE else (point.acted(gauge, gauge.composed(blocks)), far)


def _between(M: Tensor, N: Tensor, m: int) -> Tensor:
    """Return symmetric A with A M A = A^-1 N A^-1: A^2 = M^-1 # N, the geometric mean."""
    eye = torch.eye(m, dtype=torch.float64)
    M, N = (each + _REGULAR * each.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * eye for each in (M, N))
    L = torch.linalg.cholesky(M)
    e, V = torch.linalg.eigh(L.mT @ N @ L)
    P = torch.linalg.solve(L.mT, (V * e.clamp(min=0).sqrt()[:, None]) @ V.mT) @ torch.linalg.inv(L)
    e, V = torch.linalg.eigh((P + P.mT) / 2)
    return (V * e.clamp(min=1e-300).sqrt()[:, None]) @ V.mT


def _scaled(point: Point, free: Free) -> tuple[Point, float]:
    """Minimize |w| over log-scales by Newton's method with conjugate gradients; also return the first charge."""
    torus, N = free.symmetry, free.basis
    if not len(N):
        return point, 0.0
    first = 0.0
    for step in range(_STEPS):
        value, size = torus.charge(point.params, point.dual())
        g = N @ value - free.target
        far = float((g.abs() / (abs(N) @ size).clamp(min=1e-300)).max())
        first = max(first, far)
        if far <= DONE or step == _STEPS - 1:
            break
        diagonal = ((N * N) @ size).clamp(min=1e-300)
        x, r = torch.zeros_like(g), -g
        z = r / diagonal
        p, rz = z, float(r @ z)
        for _ in range(50):
            d = torus.tangent(point.params, N.t() @ p)
            full = {name: d.get(name, torch.zeros_like(point.params[name])) for name in torus.names}
            full = {name: each * point.units[name] ** 2 if name in point.units else each for name, each in full.items()}
            Hp = 2 * (N @ torus.charge(point.params, full).value)
            curve = float(p @ Hp)
            if curve <= 0:
                break
            x, r = x + rz / curve * p, r - rz / curve * Hp
            z = r / diagonal
            if (new := float(r @ z)) <= 1e-20 * float(g @ (g / diagonal)):
                break
            p, rz = z + new / rz * p, new
        x = x * min(1.0, 1.0 / max(1e-300, float(x.abs().max())))
        point = point.acted(torus, N.t() @ x)
    return point, first
