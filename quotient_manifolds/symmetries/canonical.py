"""Find the canonical point of an orbit: gains are 1, constants are 0, |w| is least, channels are on principal axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from scipy.optimize import linprog
from scipy.sparse import csr_matrix, vstack
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from quotient_manifolds.linalg import LinAlgError
from quotient_manifolds.symmetries.groups import (
    SO,
    CenteredSO,
    Draft,
    FromSum,
    Gauge,
    IntoMean,
    Linear,
    Params,
    Part,
    Rows,
    Span,
    Symmetry,
    Torus,
    Translation,
)
from quotient_manifolds.symmetries.groups.gains import Constants
from quotient_manifolds.symmetries.groups.rows import flattened, numbers
from quotient_manifolds.symmetries.in_turns import (
    balanced_alone,
    in_turns,
    joined,
    of_sums,
    without_constants,
    without_idle,
)
from quotient_manifolds.symmetries.least_norm import DONE, Free, Point, Step, directions, in_units, least
from quotient_manifolds.symmetries.principal_axes import turned

SMALL = 4_000
"""Up to this number of entries, |w| is minimized jointly over all groups and the remaining translations."""
_CHANGE = 1e-9
"""Largest relative change of outputs that counts as rounding."""
_RANK = 1e-9
"""Singular values that count as 0, relative to the largest."""
_ZERO = 1e-12
"""Entries below this, relative to the largest, count as 0."""
_SEEN = 1e-6
_FEW = 8
"""Up to this number of log-scales, lengths that no output depends on are determined in wide models as well."""
_TINY = 1e-7
"""Largest difference from 1 of the absolute value of a gain that counts as 1 or -1."""


@dataclass(frozen=True, eq=False)
class Canonical:
    """Hold the canonical point of an orbit, and the steps that led to it.

    params: all parameters; those that were acted on are in float64. element: the steps, symmetries with elements, in
    order. zeros: by parameter, the flat indices of entries that are 0 because constants were removed. constant: names
    of parameters whose entries are the same at every canonical point (gains of 1). doubts: one sentence for each reason
    why other points of the orbit may have another canonical point.
    """

    params: Params
    element: tuple[Step, ...]
    zeros: dict[str, Tensor]
    constant: tuple[str, ...]
    doubts: tuple[str, ...]


class NoPlaceError(ValueError):
    """Report that an orbit has no canonical point, which may happen for a false symmetry."""


@torch.no_grad()
def canonical(
    symmetries: Sequence[Symmetry],
    params: Mapping[str, Tensor],
    changed: Callable[[Params], float] | None = None,
) -> Canonical:
    """Return the canonical point of the orbit of parameters.

    The steps with a closed form come first: gains become 1 if their readers can absorb them, and constants become 0 if
    a later map can absorb them. Then |w|^2 is minimized on the remaining orbit. Last, the remaining rotations are fixed
    by the principal axes of each wire's second moment, in descending order, with positive sums of cubes.

    changed: returns the relative change of outputs at other parameters. If it exceeds 1e-9, translations are left out,
    which is a doubt. Raises ValueError if that does not suffice. Before any computation, it raises ValueError if a
    parameter is missing or has another shape or kind. Raises NoPlaceError if there is no canonical point.
    """
    try:
        found = _canonical(symmetries, params)
    except LinAlgError as error:
        raise NoPlaceError(f"the orbit must have a canonical point. Found none: {error}") from error
    change = changed(found.params) if changed else 0.0
    if change <= _CHANGE:
        return found
    groups = [each for each in symmetries if not isinstance(each, Translation)]
    found = _canonical(groups, params)
    if changed and (left := changed(found.params)) > _CHANGE:
        raise ValueError(f"symmetries must leave outputs as they are. Found a change of {left:.1e}; find them again.")
    doubt = f"Translations must hold at these parameters. Found a change of outputs of {change:.1e} and left them out."
    return replace(found, doubts=(*found.doubts, doubt))


def _canonical(symmetries: Sequence[Symmetry], params: Mapping[str, Tensor]) -> Canonical:
    """Return the canonical point, computed on the CPU because its many matrices are small."""
    if not symmetries:
        return Canonical(dict(params), (), {}, (), ())
    for rows in _every_rows(symmetries):
        flattened(params, rows.name, rows.shape)
    shapes = _shapes(symmetries, params)
    found = _on_processor(symmetries, {n: w.cpu() if n in shapes else w for n, w in params.items()}, shapes)
    moved = {name: w.to(params[name].device) for name, w in found.params.items()}
    return replace(found, params=moved)


def _on_processor(
    symmetries: Sequence[Symmetry], params: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
) -> Canonical:
    """Return the canonical point, computed on the CPU. shapes: of all parameters that symmetries depend on."""
    symmetries = joined(symmetries)
    translations = [*of_sums(symmetries), *(each for each in symmetries if isinstance(each, Translation))]
    wide = sum(map(prod, shapes.values())) > SMALL
    draft = Draft(params).own(name for name in shapes if params[name].dtype != torch.float64)
    point = _start(symmetries, {**draft}, [])
    free = []
    gains = _gains(symmetries, params)
    for symmetry in symmetries:
        if isinstance(symmetry, Torus):
            point, each = _with_gains(point, symmetry, gains)
            free.append(each)
    draft, steps = (Draft(point.params).own(shapes) if point.steps else draft), point.steps
    zero = _zero(symmetries, {**draft})
    settled = without_constants(draft, translations, zero)
    still = [] if wide else [*settled.left, *_moved_by_means(translations, symmetries)]
    point = replace(_start(symmetries, {**draft}, still), steps=(*steps, *settled.steps))
    for symmetry in symmetries:
        if isinstance(symmetry, Gauge):
            point = _without_mean(point, symmetry)
    for symmetry in symmetries:
        if isinstance(symmetry, Gauge):
            point = without_idle(point, symmetry)
    others = [each for each in symmetries if not isinstance(each, (Torus, Translation))]
    sums = [each for each in others if isinstance(each, Gauge) and isinstance(each.algebra, FromSum)]
    open_ = [each for each in sums if not _settled(each, translations)]
    others = [each for each in others if each not in sums or each in open_]
    others += [_of_mean(each) for each in sums if each not in open_]
    mixed = {name for each in others if not _rotates(each) for name in each.names}
    free = [_with_lengths(point, each, mixed) if not wide or len(each.basis) <= _FEW else each for each in free]
    if wide:
        point, left = in_turns(point, others, free)
    else:
        point, others = balanced_alone(point, others, [*(each.symmetry for each in free), *settled.left])
        free = [replace(each, basis=each.basis.to_dense()) for each in free]
        free += [Free.of(each) for each in others]
        free = [each for each in free if len(each.basis)]
        point, left = least(point, free) if free or len(point.directions) else (point, 0.0)
    doubts: list[str] = []
    if open_:
        names = ", ".join(open_[0].names)
        doubts.append(f"|w| must have a least value on the orbit. Found that of t 1^T on {names}, which is not closed.")
    if left > 1e3 * DONE:
        doubts.append(f"|w| must have a least value on the orbit. Found a gradient of {left:.1e}.")
    point, more = turned(point, [each for each in symmetries if isinstance(each, Gauge)])
    zeros = dict(_still(settled.zeros, point.params))
    return Canonical(point.params, point.steps, zeros, tuple(_ones(point, gains)), (*doubts, *more))


def _still(zeros: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the entries that are still 0, as translations that minimize |w| may have changed some."""
    for name, at in zeros.items():
        own = params[name].flatten()
        if bool((zero := own[at].abs() <= _ZERO * own.abs().max()).any()):
            yield name, at[zero]


def _settled(gauge: Gauge, translations: Sequence[Translation]) -> bool:
    """Return whether translations remove the constants that t 1^T adds.

    One of them must change all writers of the gauge. It must also change each other parameter of the gauge, unless a
    bias that it changes compensates for that parameter in another translation.
    """
    shifted, written = [{*each.names} for each in translations], {s.name for s in gauge.wire.slots if s.covariant}
    for names in shifted:
        own = names.union(*(beside for beside in shifted if len(beside - names) == 1 and beside & names - written))
        if written <= names and own.issuperset(gauge.names):
            return True
    return False


def _of_mean(gauge: Gauge) -> Gauge:
    """Return the gauge of 1 1^T / n alone, out of all t 1^T; the others add constants that translations removed."""
    n = gauge.algebra.n
    return replace(gauge, algebra=Span(n, torch.full((1, n, n), 1.0 / n, dtype=torch.float64)), reflections=None)


def _moved_by_means(translations: Sequence[Translation], symmetries: Sequence[Symmetry]) -> list[Translation]:
    """Return translations along means that nothing reads, which 1 + 1 w^T changes after they were set to 0."""
    means = [each for each in symmetries if isinstance(each, Gauge) and isinstance(each.algebra, IntoMean)]
    moved = {name for each in means for name in each.names}
    return [each for each in translations if len(each.parts) == 1 and moved.issuperset(each.names)]


def _shapes(symmetries: Sequence[Symmetry], params: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return the shapes of all parameters that symmetries depend on."""
    return {name: params[name].shape for each in symmetries for name in each.reads}


def _every_rows(symmetries: Sequence[Symmetry]) -> Iterator[Rows]:
    for symmetry in symmetries:
        if isinstance(symmetry, Gauge):
            for slot in symmetry.wire.slots:
                yield slot.rows
                yield from (gain.entries for gain in slot.gains)
        elif isinstance(symmetry, Torus):
            yield from (each.rows for each in symmetry.slices)
        elif isinstance(symmetry, Translation):
            for part in symmetry.parts:
                yield part.rows
                yield from part.read()
        elif isinstance(symmetry, Linear):
            yield from (Rows.along(name, shape, 0) for name, shape in symmetry.shapes)


def _start(symmetries: Sequence[Symmetry], params: Params, translations: Sequence[Translation]) -> Point:
    """Return the point of these parameters, with the directions of translations."""
    zero = _zero(symmetries, params)
    size = sum(each.numel() for each in zero.values())
    none = torch.zeros(0, size, dtype=torch.float64)
    point = Point(params, zero, none, _units(symmetries, params), tuple(translations))
    rows = [point.row(directions(each, params, zero)) for each in translations]
    return replace(point, directions=_orthonormal(torch.cat([none, *rows])))


def _units(symmetries: Sequence[Symmetry], params: Params) -> Params:
    """Return by name the units of wires in which lengths are measured, for parameters whose units are not all 1."""
    units: Params = {}
    for gauge in symmetries:
        own: Params = {}
        for slot in gauge.wire.slots if isinstance(gauge, Gauge) else ():
            if not slot.plain:
                w = params[slot.name]
                each = own.setdefault(slot.name, torch.ones(w.numel(), dtype=torch.float64, device=w.device))
                u = slot.units(params)[:, None].expand(-1, slot.rows.columns)
                each[slot.places] = 1 / u if slot.writes else u
        for name, each in own.items():
            units[name] = units.get(name, 1.0) * each.view(params[name].shape)
    return units


def _zero(symmetries: Sequence[Symmetry], params: Params) -> Params:
    """Return the origins of parameters: where scale * w + offset, plus any constant beside it, is 0.

    Constants are computed with the gains at `params`.
    """
    none, moved = torch.zeros((), dtype=torch.float64), _shapes(symmetries, params)
    zero = {name: none.expand(moved[name]) for name in params if name in moved}
    for rows in _every_rows(symmetries):
        at = none if rows.plain else -numbers(rows.offset) / numbers(rows.scale)
        if bool(at.any()):
            flat = zero[rows.name].flatten().clone()
            flat[rows.places] = at.expand(rows.places.shape)
            zero[rows.name] = flat.view(rows.shape)
    draft = Draft(zero)
    for each in symmetries:
        for constant in _constants(each).every:
            draft.write(constant.bias, -constant.read(params)[:, None])
    return {**draft}


def _constants(symmetry: Symmetry) -> Constants:
    if isinstance(symmetry, Gauge):
        return symmetry.wire.constants
    return symmetry.constants if isinstance(symmetry, Torus) else Constants()


def _orthonormal(D: Tensor) -> Tensor:
    if not len(D):
        return D
    size = D.norm(dim=1, keepdim=True)
    _, s, Vh = torch.linalg.svd(D[size[:, 0] > 0] / size[size[:, 0] > 0], full_matrices=False)
    return Vh[s > _RANK * s[:1]].where(D.any(0), 0.0)  # exact zeros in entries that no row of D changes


def _gains(symmetries: Sequence[Symmetry], params: Mapping[str, Tensor]) -> dict[str, Rows]:
    """Return the entries that are gains between a wire and a slot, by parameter, except parameters of gauges."""
    gains: dict[str, Rows] = {}
    mixed = {slot.name for each in symmetries if isinstance(each, Gauge) for slot in each.wire.slots}
    for symmetry in symmetries:
        for rows in (*symmetry.units, *(each.rows for each in symmetry.gains(params))):
            if rows.name not in mixed:
                gains.setdefault(rows.name, rows)
    return gains


def _with_gains(point: Point, torus: Torus, gains: Mapping[str, Rows]) -> tuple[Point, Free]:
    """Return the point with gains as near to 1 as possible, and the log-scales that do not change gains."""
    E, logs = [csr_matrix((0, torus.size))], [np.zeros(0)]
    for name, rows in gains.items():
        if name in torus.names:
            values = rows.read(point.params)[:, 0].abs().numpy()
            E.append(torus.exponents(rows)[values > 0])
            logs.append(np.log(values[values > 0]))
    matrix, log = vstack(E).tocsr(), np.concatenate(logs)
    touched = np.diff(matrix.tocsc().indptr)
    z, free = np.zeros(torus.size), [np.flatnonzero(touched == 0)]
    columns, powers, count = [np.arange(len(free[0]))], [np.ones(len(free[0]))], len(free[0])
    graph = (matrix.T @ matrix).tocsr()
    alone = (np.diff(graph.indptr) == 1) & (touched > 0)  # gains that only one log-scale changes
    square = np.asarray(matrix.multiply(matrix).sum(0))[0]
    z[alone] = -np.asarray(matrix.T @ log)[alone] / square[alone]
    labels = connected_components(graph, directed=False)[1]
    rest = np.flatnonzero((touched > 0) & ~alone)
    for label in np.unique(labels[rest]):
        some = rest[labels[rest] == label]
        own = matrix[:, some]
        present = np.flatnonzero(np.diff(own.indptr))
        U, s, Vh = np.linalg.svd(own[present].toarray())
        rank = int((s > _RANK * s[0]).sum())
        z[some] = -Vh[:rank].T @ ((U[:, :rank].T @ log[present]) / s[:rank])
        for v in Vh[rank:]:
            free, powers, columns = [*free, some], [*powers, v], [*columns, np.full(len(some), count)]
            count += 1
    index = torch.from_numpy(np.stack([np.concatenate(columns), np.concatenate(free)]))
    basis = torch.sparse_coo_tensor(
        index, torch.from_numpy(np.concatenate(powers)), (count, torus.size), check_invariants=True
    )
    if np.abs(z).max(initial=0.0) > 0:
        point = point.acted(torus, torch.from_numpy(z))
    return point, Free(torus, basis, torch.zeros(count, dtype=torch.float64))


def _without_mean(point: Point, gauge: Gauge) -> Point:
    """Return the point with means of channels set to 0 if they are arbitrary: a limit of elements 1 + 1 w^T.

    A must act in all nonzero slots, or, for 1 + t 1^T, A^-T. Otherwise the point is unchanged.
    """
    algebra, wire = gauge.algebra, gauge.wire
    rows = [(slot, in_units(slot, point.params)) for slot in wire.slots]
    size = max(float(V.abs().max()) for _, V in rows)
    some = [(slot, V) for slot, V in rows if float(V.abs().max()) > _ZERO * size]
    wanted = (
        isinstance(algebra, IntoMean)
        and not wire.constants.every
        and all(slot.covariant != isinstance(algebra, FromSum) for slot, _ in some)
    )
    if not wanted or wire.sides or any(len(slot.channels) < wire.channels for slot, _ in some):
        return point
    D = {name: each.flatten(1) for name, each in point.changes(point.directions).items()}
    for slot, V in some:
        s = slot.units(point.params)[:, None]
        s = s if slot.writes else 1 / s
        point = point.acted(Translation((Part(slot.rows),)), -s * V.mean(0))
        change = (D[slot.name][:, slot.places] / s).mean(1, keepdim=True) * s
        D[slot.name] = D[slot.name].index_add(1, slot.places.flatten(), -change.flatten(1))
    left = point.row({name: each.view(len(each), *point.zero[name].shape) for name, each in D.items()})
    return replace(point, directions=_orthonormal(left[left.norm(dim=1) > _RANK]))  # D had unit rows


def _rotates(symmetry: Symmetry) -> bool:
    """Return whether a group preserves lengths."""
    return isinstance(symmetry, Gauge) and all(
        isinstance(each, (SO, CenteredSO)) for _, each in symmetry.algebra.summands
    )


def _with_lengths(point: Point, free: Free, mixed: Set[str]) -> Free:
    """Return log-scales with the charges at which lengths that no output depends on are 1, as root mean squares.

    Their exponents have one sign, so that |w|^2 is least at length 0, where a model that divides by them is undefined.
    mixed: parameters on which groups act that change lengths as well.
    """
    torus, basis = free.symmetry, free.basis.to_dense()
    assert isinstance(torus, Torus)
    exponents = [np.zeros((0, len(basis) + 1))]
    for name in torus.names:
        at = torch.nonzero((point.params[name] - point.zero[name]).flatten().abs() > _ZERO)
        if len(at):
            rows = Rows.at(name, tuple(point.zero[name].shape), at)
            own = (torus.exponents(rows) @ basis.mT.numpy()).round(12)
            exponents.append(np.concatenate([own, np.full((len(own), 1), float(name not in mixed))], 1))
    E, counts = np.unique(np.concatenate(exponents), axis=0, return_counts=True)
    E, most = E[:, :-1], E[:, -1]
    target, (m, k) = basis.new_zeros(len(basis)), E.shape
    if m and k:  # maximize the entries that one generator shrinks without making any other larger
        bounds = [(None, None)] * k + [(0.0, high) for high in most]
        cost = np.concatenate([np.zeros(k), -np.ones(m)])
        found = linprog(cost, np.concatenate([-E, np.eye(m)], 1), np.zeros(m), bounds=bounds)
        alone = found.x[k:] > _SEEN if found.success else np.zeros(m, bool)
        target = torch.from_numpy(E[alone].T @ counts[alone])
    return replace(free, target=target)


def _ones(point: Point, gains: Mapping[str, Rows]) -> Iterator[str]:
    """Yield the names of parameters that are gains, all 1 or -1."""
    for name, rows in gains.items():
        values = rows.read(point.params)
        if values.numel() == point.params[name].numel() and float((values.abs() - 1).abs().max()) < _TINY:
            yield name
