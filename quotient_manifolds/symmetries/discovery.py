"""Find the symmetries of a model and name them: pairs, reparameterizations, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries.charges import find as charges
from quotient_manifolds.symmetries.charges.finder import Found
from quotient_manifolds.symmetries.charges.stacks import Stack
from quotient_manifolds.symmetries.checks import check_model, check_weights, named_if_empty
from quotient_manifolds.symmetries.groups import (
    FromSum,
    Gauge,
    IntoMean,
    Params,
    Permutation,
    Symmetry,
    Torus,
    Translation,
)
from quotient_manifolds.symmetries.names import CONSTANT, OF_STACKS, UNREAD, Roles
from quotient_manifolds.symmetries.outputs import Evaluate
from quotient_manifolds.symmetries.pair import SymmetricPair
from quotient_manifolds.symmetries.pairing import Pairs, heads_of, pairs_of
from quotient_manifolds.symmetries.reparameterization import Reparameterization
from quotient_manifolds.symmetries.scales import Scales
from quotient_manifolds.symmetries.symmetries import Refused, Symmetries, check_symmetries

_DENSE = 4e7
"""Entries of all tangents, up to which dimensions that symmetries have in common are counted once."""
_RANK = 1e-8
_TINY = 1e-9


def find_symmetries(
    model: nn.Module, batch: Any, *others: Any, evaluate: Evaluate | None = None, declared: Symmetries | None = None
) -> Symmetries:
    found, params = _found(model, batch, others, evaluate, declared)
    return named(found, params, declared)


def _found(
    model: nn.Module, batch: Any, others: Sequence[Any], evaluate: Evaluate | None, declared: Symmetries | None
) -> tuple[Found, dict[str, Tensor]]:
    check_model(model)
    params = {name: w.detach() for name, w in model.named_parameters()}
    check_weights(params, (name for name, w in params.items() if w.is_floating_point()))
    declared = Symmetries(()) if declared is None else declared
    check_symmetries(declared)
    check_weights(params, declared.moved)
    with named_if_empty(params):
        return charges.find(model, batch, evaluate, others=others), params


# ---- names


def named(found: Found, params: Mapping[str, Tensor], declared: Symmetries | None = None) -> Symmetries:
    """Return what was found as pairs and reparameterizations. declared: pairs in the place of those of the same parameters."""
    known = () if declared is None else declared.pairs
    if found.finder is None:
        return Symmetries(known, _rest(params, known), _sentences(found), held=found.held)
    roles, own = Roles(found.finder.frame), {n: w.double() for n, w in params.items() if w.is_floating_point()}
    small = sum(w.numel() for w in own.values()) <= charges.SMALL
    symmetries = _independent(found.symmetries, own) if small else found.symmetries
    scales = {k: Scales(each, k, roles) for k, each in enumerate(symmetries) if isinstance(each, Torus)}
    heads = [head for each in scales.values() for head in each.heads()]
    for k, each in enumerate(symmetries):
        heads += heads_of(each, k, roles) if isinstance(each, Gauge) else ()
    every = pairs_of(heads, roles, _unreached(found.stacks))
    names = {name for pair in known for name in pair.names}
    pairs = (*known, *(pair for pair in every.pairs if names.isdisjoint(pair.names)))
    called = {pair.name for pair in known}
    left = [*_translations(found.stacks), *_others(symmetries, scales, every, roles)]
    own_dimensions = _dimensions([pair.gauge for pair in pairs] if small else (), [each.symmetry for each in left], own)
    free = _told_apart([replace(e, dimension=d) for e, d in zip(left, own_dimensions, strict=True) if d])
    refused = (*(each for each in every.refused if each.name not in called), *_sentences(found))
    return Symmetries(pairs, _rest(params, pairs), refused, tuple(free), found.held)


def _rest(params: Mapping[str, Tensor], pairs: Sequence[SymmetricPair]) -> tuple[str, ...]:
    touched = {name for pair in pairs for name in pair.names}
    return tuple(name for name in params if name not in touched)


def _sentences(found: Found) -> tuple[Refused, ...]:
    """Return what charges or a finite move spoke against."""
    return tuple(Refused("", "charge", sentence) for sentence in found.refused)


def _unreached(stacks: Sequence[Stack]) -> dict[str, int]:
    """Return by parameter in how many directions its inputs never are."""
    found = Counter[str]()
    for stack in stacks:
        if stack.family == "unreached" and isinstance(stack.translation, Translation):
            for part in stack.translation.parts:
                found[part.rows.name] += part.ranks()[1]
    return dict(found)


def _translations(stacks: Sequence[Stack]) -> Iterator[Reparameterization]:
    """Yield translations, of those that shift several parameters one for each that they start from."""
    sets = {key: k for k, key in enumerate(dict.fromkeys((s.outputs, s.apart) for s in stacks), 1)}
    for stack in stacks:
        kind, apart = OF_STACKS[stack.family], sets[stack.outputs, stack.apart]
        if stack.family != "shift" or not isinstance(stack.translation, Translation):
            yield Reparameterization(stack.translation, kind, 0, apart=apart)
            continue
        for each in _by_parameter(stack.translation):
            table = each.parts[0].rows.columns > 1
            yield Reparameterization(each, CONSTANT if table else kind, 0, apart=apart)


def _by_parameter(whole: Translation) -> Iterator[Translation]:
    """Yield directions by the first parameter that they change; all have unknowns z (a, 1)."""
    a = whole.shape[0]
    left = torch.eye(a, dtype=torch.float64)
    for part in whole.parts:
        if not left.shape[1]:
            return
        L = torch.eye(a, dtype=torch.float64) if part.left is None else part.left
        moved = L @ left
        _, s, Vh = torch.linalg.svd(moved)
        rank = int((s > _TINY * L.abs().max()).sum())
        own, left = left @ Vh[:rank].mT, left @ Vh[rank:].mT
        if not rank:
            continue
        parts = []
        for each in whole.parts:
            K = own if each.left is None else each.left @ own
            if float(K.abs().max()) > _TINY:
                parts.append(replace(each, left=K))
        yield Translation(tuple(parts))


def _others(
    symmetries: Sequence[Symmetry], scales: Mapping[int, Scales], pairs: Pairs, roles: Roles
) -> Iterator[Reparameterization]:
    """Yield scales, then groups that mix channels, of which no pair is made."""
    for k, each in scales.items():
        for torus, kind, name in each.groups({scale for number, scale in pairs.origins if number == k}):
            yield Reparameterization(torus, kind, 0, lead=name)
    turns = [(k, each) for k, each in enumerate(symmetries) if k not in scales and (k, -1) not in pairs.origins]
    for _, each in sorted(turns, key=lambda each: _is_mean(each[1])):
        if isinstance(each, Gauge):
            yield Reparameterization(each, roles.mixing(each), 0)
        else:
            yield Reparameterization(each, "hidden change of basis", 0)


def _is_mean(symmetry: Symmetry) -> bool:
    return isinstance(symmetry, Gauge) and isinstance(symmetry.algebra, IntoMean)


def _told_apart(several: Sequence[Reparameterization]) -> list[Reparameterization]:
    """Give each a name of its own."""
    count, told = Counter[str](), []
    for each in several:
        count[each.label] += 1
        told.append(replace(each, number=count[each.label]))
    return told


# ---- dimensions


def _independent(symmetries: Sequence[Symmetry], params: Params) -> tuple[Symmetry, ...]:
    """Return the symmetries without log-scales that others have; later tori first."""
    known = _spanned([t for each in symmetries if not isinstance(each, Torus) for t in _tangents(each, params)], params)
    kept: dict[int, Symmetry] = {}
    for k, each in reversed([*enumerate(symmetries)]):
        if not isinstance(each, Torus):
            kept[k] = each
            continue
        (T,) = _tangents(each, params)
        some = _pivots(T, known)
        if len(some):
            kept[k] = each if len(some) == each.size else _columns(each, some)
            known = torch.cat([known, _beyond(T[some], known)])
    return tuple(kept[k] for k in sorted(kept))


def _columns(torus: Torus, some: Tensor) -> Torus:
    """Return the torus of some of its log-scales."""
    place = torch.full((torus.size,), -1)
    place[some] = torch.arange(len(some))
    slices = []
    for each in torus.slices:
        keep = place[each.index[1]] >= 0
        if bool(keep.any()):
            index = torch.stack([each.index[0][keep], place[each.index[1][keep]]])
            slices.append(replace(each, index=index, powers=each.powers[keep]))
    return Torus(tuple(slices), len(some))


def _pivots(T: Tensor, known: Tensor) -> Tensor:
    """Return which rows of tangents (k, P) are independent of known ones and of earlier ones."""
    T = T / T.norm(dim=1, keepdim=True).clamp(min=1e-300)
    for _ in range(2):
        T = T - (T @ known.mT) @ known
    kept: list[int] = []
    for k in range(len(T)):
        norm = float(T[k].norm())
        if norm > _RANK:
            q = T[k] / norm
            T = T - torch.outer(T @ q, q)
            kept.append(k)
    return torch.tensor(kept, dtype=torch.long)


def _dimensions(pairs: Sequence[Gauge], others: Sequence[Symmetry], params: Params) -> list[int]:
    """Return the dimension of each, without what pairs and earlier ones have of it, if that can be counted."""
    size = sum(w.numel() for w in params.values())
    count = sum(_generators(each) for each in (*pairs, *others))
    if not pairs and count * size > _DENSE:
        return [0 if _covered(each, others) else each.dimension(params) for each in others]
    known = _spanned([t for pair in pairs for t in _tangents(pair, params)], params)
    found = []
    for each in others:
        before = len(known)
        for T in _tangents(each, params):
            known = torch.cat([known, _beyond(T, known)])
        found.append(len(known) - before)
    return found


def _covered(symmetry: Symmetry, others: Sequence[Symmetry]) -> bool:
    """Return whether a mean is nothing but outputs that nobody reads."""
    if not isinstance(symmetry, Gauge) or not isinstance(symmetry.algebra, IntoMean) or isinstance(symmetry.algebra, FromSum):
        return False
    free = {each.names[0] for each in others if isinstance(each, Translation) and len(each.parts) == 1}
    return free.issuperset(symmetry.names)


def _generators(symmetry: Symmetry) -> int:
    if isinstance(symmetry, Gauge):
        return sum(len(channels) * algebra.n**2 for channels, algebra in symmetry.algebra.summands)
    return int(torch.Size(symmetry.shape).numel())


def _tangents(symmetry: Symmetry, params: Params) -> Iterator[Tensor]:
    """Yield the tangents of generators, rows (k, P)."""
    if not isinstance(symmetry, Gauge):
        size = int(torch.Size(symmetry.shape).numel())
        yield _flat(symmetry, torch.eye(size, dtype=torch.float64).view(-1, *symmetry.shape), params)
        return
    n = symmetry.algebra.n
    for channels, algebra in symmetry.algebra.summands:
        E = algebra.project(torch.eye(algebra.n**2, dtype=torch.float64).view(-1, algebra.n, algebra.n))
        for own in channels:
            X = torch.zeros(len(E), n, n, dtype=torch.float64)
            X[:, own[:, None], own] = E
            yield _flat(symmetry, X, params)


def _flat(symmetry: Symmetry, X: Tensor, params: Params) -> Tensor:
    along = symmetry.tangent(params, X)
    return torch.cat([along[n].flatten(1) if n in along else w.new_zeros(len(X), w.numel()) for n, w in params.items()], 1)


def _spanned(several: Sequence[Tensor], params: Params) -> Tensor:
    """Return an orthonormal basis (k, P) of tangents."""
    size = sum(w.numel() for w in params.values())
    known = torch.zeros(0, size, dtype=torch.float64)
    return _beyond(torch.cat(several), known) if several else known


def _beyond(T: Tensor, known: Tensor) -> Tensor:
    """Return an orthonormal basis of what tangents (k, P) span beyond known ones, each taken at length 1."""
    norms = T.norm(dim=1)
    T = T[norms > _RANK * norms.max()] if len(T) else T
    T = T / T.norm(dim=1, keepdim=True)
    for _ in range(2):
        T = T - (T @ known.mT) @ known
    if not len(T):
        return T
    _, s, Vh = torch.linalg.svd(T, full_matrices=False)
    return Vh[s > _RANK]


# ---- permutations


def find_permutations(model: nn.Module, batch: Any, *, evaluate: Evaluate | None = None) -> tuple[Permutation, ...]:
    return charges.find_permutations(model, batch, evaluate)


__all__ = ["UNREAD", "find_permutations", "find_symmetries"]
