"""Divide the places of one product into classes: the same factors for all of a class, or planes that rotate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.linear_flow import Flow, Product, Side

SAME = 1e-6  # relative, of factors


def _clash(flow: Flow, side: Side, each: int) -> None:
    for source, units in zip(side.sources, side.units[each], strict=True):
        flow.mark(source, units, "rearranged")


Nodes = list[tuple[int, np.ndarray, np.ndarray, bool, bool]]


@dataclass(eq=False)
class Classes:
    """Hold the places of a product in classes: label (k,), turns (k,), and for each side nodes by source.

    Nodes: source, units by place, whether they are steady there, and whether any is positive or mixed. alone: that a
    class has one place only because the factors differ.
    """

    label: np.ndarray
    turns: np.ndarray
    alone: np.ndarray
    nodes: tuple[
        list[tuple[int, np.ndarray, np.ndarray, bool, bool]], list[tuple[int, np.ndarray, np.ndarray, bool, bool]]
    ]


@dataclass(eq=False)
class _OneSource:
    """Hold what a side has of one source: units (terms, k), coefs and paths (samples, terms, k)."""

    source: int
    units: Tensor
    coefs: Tensor
    paths: Tensor
    everywhere: Tensor
    positive: bool
    mixed: bool


def _by_source(side: Side, each: int) -> list[_OneSource]:
    found = []
    for source in dict.fromkeys(side.sources):
        terms = [index for index, other in enumerate(side.sources) if other == source]
        units, coefs = side.units[each, terms].clone(), side.coefs[each][:, terms].clone()
        for later in range(1, len(terms)):
            for earlier in range(later):
                same = (units[later] == units[earlier]) & (units[later] >= 0)
                coefs[:, earlier] += torch.where(same, coefs[:, later], 0.0)
                coefs[:, later] = torch.where(same, 0.0, coefs[:, later])
                units[later] = torch.where(same, -1, units[later])
        found.append(
            _OneSource(
                source,
                units,
                coefs,
                side.paths[each][:, terms],
                side.everywhere[each, terms],
                any(side.positive[term] for term in terms),
                any(side.mixed[term] for term in terms),
            )
        )
    return found


def classes_of(flow: Flow, product: Product, each: int) -> Classes:
    """Return the places of one product in classes, or all in one where they cannot be told."""
    sides = [_by_source(side, each) for side in (product.left, product.right)]
    width = product.left.units.shape[-1]
    turning = torch.zeros(width, dtype=torch.bool)
    for one in (*sides[0], *sides[1]):
        turning |= ((one.units >= 0) & (one.coefs != 0).any(0)).sum(0) > 1
    nodes: list[list[tuple[int, Tensor, Tensor, bool, bool]]] = [[], []]
    exact, near, zero = [], [], torch.zeros(width, dtype=torch.bool)
    for number, side in enumerate(sides):
        for one in side:
            units, coefs, paths, everywhere = _single(one)
            present = units >= 0
            meant = torch.ones_like(coefs[:1]) if product.left.parameter or product.right.parameter else coefs[:1]
            steady = present & everywhere & ((coefs - meant).abs() <= SAME * coefs.abs()).all(0)
            nodes[number].append((one.source, units, steady, one.positive, one.mixed))
            exact.append(torch.cat([present[None].long(), torch.where(present, paths, 0)]))
            near.append(torch.where(present, coefs, 0.0))
            zero |= present & (coefs == 0).all(0)
            zero |= present & one.positive
    label = _alike(torch.cat(exact), torch.cat(near))
    label = torch.where(zero, int(label.max()) + 1 + torch.arange(width), label)
    planes = _planes(sides, turning) if bool(turning.any()) else None
    if bool(turning.any()) and planes is None:
        for met in (product.left, product.right):
            _clash(flow, met, each)
        label, turning = torch.zeros_like(label), torch.zeros_like(turning)
    if planes is not None:
        first, second, units_of = planes
        label[first] = label[second] = int(label.max()) + 1 + torch.arange(len(first))
        for number in (0, 1):
            for order, (source, units, steady, positive, mixed) in enumerate(nodes[number]):
                units = units.clone()
                units[first], units[second] = units_of[number][order]
                nodes[number][order] = (source, units, steady & ~turning, positive, mixed)
    label = torch.unique(label, return_inverse=True)[1]
    single = torch.bincount(label)[label] == 1
    as_arrays = [
        [(source, units.numpy(), steady.numpy(), positive, mixed) for source, units, steady, positive, mixed in side]
        for side in nodes
    ]
    return Classes(label.numpy(), turning.numpy(), (single & (width > 1)).numpy(), (as_arrays[0], as_arrays[1]))


def _single(one: _OneSource) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return unit, coef, path and whether it is everywhere at each place, of the term that is not 0 there."""
    weight = torch.where(one.units >= 0, 1.0 + one.coefs.abs().amax(0) * 1e6, 0.0)
    chosen = weight.argmax(0)[None]
    return (
        one.units.gather(0, chosen)[0],
        one.coefs.gather(1, chosen.expand(len(one.coefs), 1, -1))[:, 0],
        one.paths.gather(1, chosen.expand(len(one.paths), 1, -1))[:, 0],
        one.everywhere.gather(0, chosen)[0],
    )


def _alike(exact: Tensor, near: Tensor) -> Tensor:
    """Number columns such that equal ones have one number, those of `near` up to rounding."""
    label = torch.unique(_hashed(exact), return_inverse=True)[1]
    fine = torch.unique(_hashed(torch.cat([label[None], near.contiguous().view(torch.long)])), return_inverse=True)[1]
    count = int(fine.max()) + 1
    if count == int(label.max()) + 1 or count > 256:  # as many as there are places: factors of their own
        return fine
    example = torch.zeros(count, dtype=torch.long).scatter(0, fine, torch.arange(len(fine)))
    columns, group = near[:, example], label[example]
    far = (columns[:, :, None] - columns[:, None, :]).abs().amax(0) > SAME * columns.abs().max()
    same = ~far & (group[:, None] == group)
    return same.int().argmax(1)[fine]  # the first that is alike


def _hashed(columns: Tensor) -> Tensor:
    """Return one number for each column, by which columns are told apart."""
    generator = torch.Generator().manual_seed(0)
    return (columns * torch.randint(1, 2**62, (len(columns), 1), generator=generator)).sum(0)


def _planes(
    sides: Sequence[Sequence[_OneSource]], turning: Tensor
) -> tuple[Tensor, Tensor, list[list[tuple[Tensor, Tensor]]]] | None:
    """Return the two places of each plane, and by side and source the two units of each; None if nothing turns so."""
    places = turning.nonzero()[:, 0]
    for one in (*sides[0], *sides[1]):
        active = (one.units >= 0) & (one.coefs != 0).any(0)
        if bool((active[:, places].sum(0) == 2).all()):
            break
    else:
        return None
    pairs = torch.where(active, one.units, -1)[:, places].sort(0, descending=True).values[:2]
    order = torch.from_numpy(np.lexsort((places.numpy(), pairs[1].numpy(), pairs[0].numpy())))
    first, second = places[order[0::2]], places[order[1::2]]
    if len(first) != len(second) or not torch.equal(pairs[:, order[0::2]], pairs[:, order[1::2]]):
        return None
    again = first.argsort()
    first, second = first[again], second[again]
    if bool((first > second).any()):
        return None
    units_of: list[list[tuple[Tensor, Tensor]]] = []
    matrices: list[list[Tensor]] = []
    for side in sides:
        found = [_in_planes(each, first, second) for each in side]
        if any(each is None for each in found):
            return None
        units_of.append([(low, high) for low, high, _ in (each for each in found if each is not None)])
        matrices.append([matrix for _, _, matrix in (each for each in found if each is not None)])
    for left in matrices[0]:
        for right in matrices[1]:
            met = torch.einsum("spku,tpkv->stpuv", left, right)  # units (u) of the left with units (v) of the right
            size = met.abs().amax((0, 1, 3, 4))
            wrong = (met[..., 0, 0] - met[..., 1, 1]).abs() + (met[..., 0, 1] + met[..., 1, 0]).abs()
            if bool((wrong.amax((0, 1)) > 1e-5 * size).any()):
                return None
    return first, second, units_of


def _in_planes(one: _OneSource, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the two units of each plane, and the matrices (samples, planes, place, unit) of their factors."""
    active = (one.units >= 0) & (one.coefs != 0).any(0)
    units = torch.where(active, one.units, -1)
    both = torch.cat([units[:, first], units[:, second]]).sort(0, descending=True).values
    high = both[0]
    low = torch.where((both < high) & (both >= 0), both, -1).amax(0)
    known = (both == high) | (both == low) | (both < 0)
    if not bool(known.all()) or bool(((low < 0) & (high >= 0)).any()):
        return None
    paths = torch.where(active, one.paths, 0)
    top = torch.cat([paths[:, :, first], paths[:, :, second]], 1).amax(1, keepdim=True)
    for place in (first, second):
        if bool(((paths[:, :, place] != top) & active[:, place]).any()):
            return None
    places = [
        [torch.where(units[:, place] == unit, one.coefs[:, :, place], 0.0).sum(1) for unit in (low, high)]
        for place in (first, second)
    ]
    matrix = torch.stack([torch.stack(each, -1) for each in places], -2)
    return low, high, torch.where((high >= 0)[:, None, None], matrix, 0.0)
