"""Determine which parameters are measured and which ones pairs own, and raise if they cannot be measured."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quotient_manifolds.linalg import SingularFrame, product_svd, rank_floor, singular_frame
from quotient_manifolds.manifolds import FixedRankQuotient, Metric
from quotient_manifolds.symmetries import (
    ADAPTER,
    BESIDE_ATTENTION,
    Factor,
    Params,
    SymmetricPair,
)
from quotient_manifolds.symmetries.checks import check_loaded, check_weights
from quotient_manifolds.symmetries.representatives import balanced_point

ROUNDING = 8.0  # singular values up to this multiple of the rounding error of the weights count as 0
_CLEAR = 1e-6
"""Pivots of a Gram matrix above this, relative to the largest, cannot be due to rounding: factors of 1e-3."""


def measured_parameters(model: nn.Module) -> Params:
    """Return the parameters that require a gradient, detached, by their first name; each is checked."""
    check_loaded(model)
    params = dict(model.named_parameters())
    check_weights(params, (name for name, w in params.items() if w.is_floating_point() or w.is_complex()))
    return trained_parameters(model)


def trained_parameters(model: nn.Module) -> Params:
    """Return the parameters that require a gradient, detached, by their first name; ValueError if there are none."""
    trained = {name: w.detach() for name, w in model.named_parameters() if w.requires_grad}
    # Autograd does not take tensors made in inference mode.
    trained = {name: w.clone() if w.is_inference() else w for name, w in trained.items()}
    if not trained:
        raise ValueError(
            f"{type(model).__name__} has no parameter to measure: every one has requires_grad=False (or there is "
            f"none); call model.requires_grad_(True) on those to measure"
        )
    return trained


def precise(dtype: torch.dtype) -> torch.dtype:
    """Return the precision in which weights of this dtype move: single, or their own if it is higher."""
    return torch.promote_types(dtype, torch.float32)


def check_whole(pairs: Iterable[SymmetricPair], trained: Collection[str]) -> list[SymmetricPair]:
    """Return the pairs whose parameters are all trained; ValueError if a pair is trained in part.

    Half a pair has no symmetry.
    """
    pairs = list(pairs)
    frozen = {pair.name: [name for name in pair.names if name not in trained] for pair in pairs}
    if halves := [pair for pair in pairs if 0 < len(frozen[pair.name]) < len(pair.names)]:
        first, names = halves[0], ", ".join(repr(pair.name) for pair in halves)
        raise ValueError(
            f"the pair {first.name!r} must be trained as a whole or not at all. Found that it is frozen in part "
            f"({frozen[first.name][0]} has requires_grad=False, or is not given): freeze or unfreeze all of "
            f"{', '.join(first.names)}, or leave out such pairs by symmetries.without([{names}])"
        )
    return [pair for pair in pairs if not frozen[pair.name]]


def measured_pairs(
    pairs: Iterable[SymmetricPair], point: Params, every: Collection[str], model: str
) -> list[SymmetricPair]:
    """Return the pairs whose parameters are all measured; ValueError if the model of this name lacks one.

    Raises ValueError if attention or an adapter is measured in part; such neurons and bottlenecks are left out.
    """
    pairs = list(pairs)
    for pair in pairs:
        if unknown := [name for name in pair.names if name not in every]:
            raise ValueError(f"pairs must be of parameters that {model} has. Found {unknown[0]} in {pair.name}")
    measured = (pair for pair in pairs if pair.kind not in BESIDE_ATTENTION or point.keys() >= {*pair.names})
    return check_whole(measured, point)


def stored(point: Params, like: Params) -> Params:
    """Return a point in the precision in which parameters are measured; tensors that have not moved are kept."""
    return {name: w if w is like[name] else w.to(precise(like[name].dtype)) for name, w in point.items()}


@dataclass(frozen=True, eq=False)
class Factored:
    """Hold a pair with the results of one factorization of its product in float64.

    lost: which singular values are 0 up to rounding, (heads, h). frame: of the product, if real matrices act.
    """

    pair: SymmetricPair
    lost: Tensor
    frame: SingularFrame | None = None

    @staticmethod
    def of(pair: SymmetricPair, point: Params, start: Params) -> Factored:
        """Factor a pair. start: the parameters before canonicalization."""
        if pair.acts == "GL(1, C)" or pair.h > min(pair.n, pair.m):
            return Factored(pair, _lost(pair, point, start))
        x = pair.read(point).double()
        manifold = pair.manifold()
        assert isinstance(manifold, FixedRankQuotient)
        frame = singular_frame(*manifold.split(x))
        return Factored(pair, _lost(pair, point, start, frame), frame)

    def balance(self, params: Params) -> SingularFrame | None:
        """Write the balanced factors to `params`, and return their singular frame, if there is one."""
        x = self.pair.read(params)
        if self.frame is None:
            self.pair.write(params, balanced_point(self.pair, x))
            return None
        n, root = self.pair.n, self.frame.s.sqrt()[..., None, :]
        sign: Tensor | float = 1.0
        if self.pair.acts == "GL+(1)":  # it keeps its sign
            sign = (self.frame.left * x[..., :n, :]).sum(dim=(-2, -1), keepdim=True).sign()
        self.pair.write(params, torch.cat([self.frame.left, self.frame.right], dim=-2) * (sign * root))
        return self.frame.balanced(sign)


def balanced(pairs: Iterable[Factored], point: Params) -> tuple[Params, dict[SymmetricPair, SingularFrame]]:
    """Return the parameters with the factors of every pair balanced, and the singular frames that are known.

    Products of balanced factors round least in the orbit. Factors in half precision become single, because rounding
    them once more would cost more digits than they have.
    """
    pairs = list(pairs)
    names = {name for each in pairs for name in each.pair.names}
    point = {name: w.to(precise(w.dtype), copy=True) if name in names else w for name, w in point.items()}
    frames = {each.pair: each.balance(point) for each in pairs}
    return point, {pair: frame for pair, frame in frames.items() if frame is not None}


def of_lower_rank(factored: Factored, point: Params, start: Params) -> tuple[Factored, Params]:
    """Return a pair with as many columns as the rank of its product, if all heads have the same lower rank; else as is.

    A head as wide as the stream loses the direction that no norm reads; a bottleneck loses pruned columns. The factors
    become G = U sqrt(S), H = V sqrt(S) with G H^T = U S V^T. Columns without a singular value become 0, belong to no
    pair, and stay 0. start: the parameters before canonicalization.
    """
    pair, lost, frame = factored.pair, factored.lost, factored.frame
    plain = frame is not None and pair.acts == "GL(h)" and pair.h > 1
    if not plain or any(len(view.axes[2]) != 1 for view in pair.views):
        return factored, point
    rank = pair.h - int(lost[0].sum())
    if not 0 < rank < pair.h or bool((lost.sum(-1) != pair.h - rank).any()):
        return factored, point
    assert frame is not None
    x = torch.cat([frame.left, frame.right], dim=-2) * frame.s.sqrt()[:, None]
    x = x * (torch.arange(pair.h, device=x.device) < rank)
    point = {name: w.to(precise(w.dtype), copy=True) if name in pair.names else w for name, w in point.items()}
    pair.write(point, x)
    G, H = (Factor(tuple(view.first(rank) for view in factor.views)) for factor in (pair.G, pair.H))
    return Factored.of(replace(pair, G=G, H=H), point, start), point


def _lost(pair: SymmetricPair, point: Params, start: Params, frame: SingularFrame | None = None) -> Tensor:
    """Return which singular values s = u^T G H^T v are 0 up to rounding. Shape (heads, h), bool.

    Rounding the weights changes s by at most eps / 2 sum_j |G_j| |(H^T v)_j| + |(G^T u)_j| |H_j|, with columns G_j.
    Columns of the start are used if they are longer: if canonicalization cancels them, their rounding remains. A value
    is also lost if float64 cannot resolve it next to the largest s of the head, or of all neurons, which feed one sum.
    """
    x, before = (pair.read(params).double() for params in (point, start))
    if pair.acts == "GL(1, C)":  # a real pair of one column
        x, before = x.flatten(-2)[..., None], before.flatten(-2)[..., None]
    n = x.shape[-2] * pair.n // (pair.n + pair.m)
    (G, H), others = (each.split([n, each.shape[-2] - n], dim=-2) for each in (x, before))
    if frame is None:
        U, s, V = product_svd(G, H)
        in_G, in_H = U.mT @ G, V.mT @ H
    else:
        s, in_G, in_H = frame.s, frame.from_left, frame.from_right
    lengths = (
        torch.maximum(*(y.norm(dim=-2, keepdim=True) for y in both)) for both in zip((G, H), others, strict=True)
    )
    on_G, on_H = lengths  # (heads, 1, h)
    eps = max(torch.finfo(precise(point[name].dtype)).eps for name in pair.names)
    level = ROUNDING * eps / 2 * (on_G * in_H.abs() + in_G.abs() * on_H).sum(-1)
    largest = s.max() if pair.acts == "GL+(1)" else s[:, :1]
    return s <= torch.maximum(level, rank_floor(pair.n, pair.m) * largest)


def of_full_rank(pairs: Iterable[SymmetricPair], params: Params) -> tuple[SymmetricPair, ...]:
    """Return the pairs of full rank; the orbits of other pairs are not closed, and contain no balanced point."""
    return tuple(pair for pair in pairs if _clearly_full(pair, params) or not bool(_lost(pair, params, params).any()))


def _clearly_full(pair: SymmetricPair, params: Params) -> bool:
    """Return whether pivots of G^T G and H^T H show full rank, far from rounding, at the cost of two products."""
    if pair.acts == "GL(1, C)" or pair.h > min(pair.n, pair.m):
        return False
    for V in pair.read(params).double().split([pair.n, pair.m], dim=-2):
        L, failed = torch.linalg.cholesky_ex(V.mT @ V)
        d = L.diagonal(dim1=-2, dim2=-1)
        if bool(failed.any()) or not bool(d.min() > _CLEAR * d.max()):
            return False
    return True


def has_rank(factored: Factored, point: Params, metric: Metric, eps: float) -> bool:
    """Return whether the pair is a point of its manifold: G and H have full rank.

    If it is not, raises ValueError for attention and adapters. A network may well have a neuron that is 0 on one
    side: its layer is then measured elementwise, with a warning.
    """
    pair, reason = factored.pair, _rank_problem(factored, point, metric, eps)
    if not reason:
        return True
    if pair.kind in BESIDE_ATTENTION:
        warnings.warn(f"Pair {pair.name} is measured elementwise: {reason}", stacklevel=3)
        return False
    raise ValueError(
        f"Pair {pair.name} cannot be measured in a quotient metric: {reason}; use Adaptive(), or pass symmetries= "
        f"without this pair"
    )


def _rank_problem(factored: Factored, point: Params, metric: Metric, eps: float) -> str:
    pair = factored.pair
    if pair.h > min(pair.n, pair.m):
        return f"its heads are {pair.h} wide, and factors of {pair.n} and {pair.m} rows cannot have that rank"
    if eps or not bool(factored.lost.any()):
        return ""
    reason = pair.manifold(metric, eps).check_point_on_manifold(pair.read(point).to(torch.float64), explain=True)[1]
    if pair.kind == ADAPTER and not bool(pair.G.read(point).any()):
        return f"B is 0, as peft starts it, and B A must have rank {pair.h}; measure after training has begun"
    return reason or f"rank(G H^T) = h = {pair.h} fails up to the rounding of its weights"


def scales_outside(pairs: Iterable[SymmetricPair], point: Params) -> dict[str, Tensor | None]:
    """Return the adaptive scale: w for elements in no pair, 0 for elements of pairs; no entry if pairs own them all."""
    owned: Params = {}
    for pair in pairs:
        for name in pair.names:
            owned.setdefault(name, torch.zeros_like(point[name], dtype=torch.bool))
        before = pair.read(owned)
        if bool(before.any()):
            raise ValueError(f"Pair {pair.name} shares elements with another pair ({', '.join(pair.names)})")
        pair.write(owned, torch.ones_like(before))
    scales: dict[str, Tensor | None] = {}
    for name, w in point.items():
        if name not in owned:
            scales[name] = w
        elif not bool(owned[name].all()):
            scales[name] = w.masked_fill(owned[name], 0)
    return scales
