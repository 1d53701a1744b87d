"""One tangent space over all parameters of a model, in orthonormal coordinates, for three geometries.

A tangent vector is held as coordinates z, a dict of blocks, such that its metric norm is the l2 norm of z over all
blocks. So the ball of every geometry is a round ball, one projected ascent serves them all, and a standard Gaussian
in z is an isotropic one in the metric.

Every parameter that requires a gradient is measured; frozen parameters stay where they are. A symmetric pair must
be measured whole or not at all: with one side frozen the ball would not be invariant, so that is an error.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from quotient_manifolds.manifolds import GEODESICS, FixedRankQuotient, HorizontalSpace, Metric, RelativeSpace
from quotient_manifolds.symmetries import (
    Evaluate,
    Params,
    SymmetricPair,
    Symmetries,
    Translation,
    find_symmetries,
    prove_on_batch,
    without_biases,
)

Gradients = Mapping[str, Tensor | None]

Norm = Literal["l2", "linf"]
"""Which ball of coordinates z a geometry means: sum of squares, or the largest of them. A metric has l2."""


class Geometry(ABC):
    """A Riemannian metric on the parameters of any model."""

    @property
    @abstractmethod
    def name(self) -> str:
        """How results and tables call it."""

    @abstractmethod
    def at(self, model: nn.Module) -> TangentSpace:
        """The tangent space at the model's parameters; the model is read, never written."""

    @abstractmethod
    def proved(self, model: nn.Module, loss: Evaluate, batch: Any) -> Geometry:
        """The geometry with only such symmetries of the model as loss(model, batch) bears out; ValueError if none."""


@final
@dataclass(frozen=True)
class Euclidean(Geometry):
    """<xi, eta> = sum xi eta, so z = xi. norm: the ball is |xi|_2 or max |xi_i| <= radius."""

    norm: Norm = "l2"

    def __post_init__(self) -> None:
        _check_norm(self.norm)

    @property
    def name(self) -> str:
        return _named("euclidean", self.norm)

    def at(self, model: nn.Module) -> TangentSpace:
        point = measured_parameters(model)
        return TangentSpace(point, dict.fromkeys(point), (), self.norm)

    def proved(self, model: nn.Module, loss: Evaluate, batch: Any) -> Geometry:
        return self


@final
@dataclass(frozen=True)
class Adaptive(Geometry):
    """<xi, eta> = sum xi eta / c^2, so z = xi / c, elementwise, with c = |w| + eta.

    eta: 0 leaves weights that are 0 where they are; ASAM has 0.01 (Kwon et al., arXiv 2102.11600). norm: the ball is
    |xi / c|_2 or max |xi_i / c_i| <= radius.
    """

    eta: float = 0.0
    norm: Norm = "l2"

    def __post_init__(self) -> None:
        number = isinstance(self.eta, (int, float)) and not isinstance(self.eta, bool)
        if not number or not 0 <= self.eta < math.inf:
            raise ValueError(f"eta must be a finite number, at least 0. Found {self.eta!r}")
        _check_norm(self.norm)

    @property
    def name(self) -> str:
        return _named("adaptive", self.norm) + (f" (eta {self.eta:g})" if self.eta else "")

    def at(self, model: nn.Module) -> TangentSpace:
        point = measured_parameters(model)
        # For eta = 0 the weights themselves serve as c: a sign is an isometry of either ball.
        scale = {name: w.abs().add_(self.eta) for name, w in point.items()} if self.eta else point
        return TangentSpace(point, scale, (), self.norm)

    def proved(self, model: nn.Module, loss: Evaluate, batch: Any) -> Geometry:
        return self


@final
@dataclass(frozen=True)
class Quotient(Geometry):
    """Symmetric pairs (G, H) modulo their group in a quotient metric, all other elements adaptive [paper, App. C.1].

    metric: "inv", "mix", or the number t of their family. geodesic: "first", "second" [paper, Eq. 4] or "exact". eps:
    the paper's relaxation of the metric (0 keeps invariance). symmetries: those to use; None finds them in the model.

    biases: "quotient" measures at the representative whose needless biases are zero, b_K = 0, b_V = 0, b_O + W_O b_V,
    and stay so: the measure is invariant under these translations too. "paper" keeps biases as rows of their pairs
    [paper, App. C.1]: invariant under the groups of the pairs alone.
    trust: use the symmetries without asking the loss whether they are any.
    norm: "metric", or for an ablation [paper, App. G] "adaptive": the ball is |xi / w| <= radius on pairs' elements as
    all others, the horizontal part of xi is the velocity of the metric's geodesic, and nothing is invariant. With
    geodesic "first" besides, both are off: adaptive sharpness up to terms of the second order in the radius, those of
    the vertical part of xi, which is left out.
    """

    metric: Metric = "inv"
    geodesic: str = "second"
    eps: float = 0.0
    symmetries: Symmetries | None = None
    biases: Literal["quotient", "paper"] = "quotient"
    trust: bool = False
    norm: Literal["metric", "adaptive"] = "metric"

    def __post_init__(self) -> None:
        FixedRankQuotient(1, 1, self.metric, eps=self.eps)  # refuses what is no metric
        if self.geodesic not in GEODESICS:
            raise ValueError(f"geodesic must be one of {', '.join(GEODESICS)}. Found {self.geodesic!r}")
        if self.biases not in ("quotient", "paper"):
            raise ValueError(f"biases must be 'quotient' or 'paper'. Found {self.biases!r}")
        if self.norm not in ("metric", "adaptive"):
            raise ValueError(f"norm must be 'metric' or 'adaptive' (a quotient has no linf). Found {self.norm!r}")

    @property
    def name(self) -> str:
        metric = self.metric if isinstance(self.metric, str) else f"t = {self.metric:g}"
        options = ["exact" if self.geodesic == "exact" else f"{self.geodesic} order"]
        options += ["biases as rows"] * (self.biases == "paper") + ["adaptive norm"] * (self.norm == "adaptive")
        return f"{metric} ({', '.join(options)})"

    def at(self, model: nn.Module) -> TangentSpace:
        point = measured_parameters(model)
        symmetries = find_symmetries(model) if self.symmetries is None else self.symmetries
        pairs = [pair for pair in symmetries.pairs if _is_measured(pair, point, model)]
        if not pairs:
            raise ValueError(
                f"A quotient geometry needs at least one symmetric pair of measured parameters, and "
                f"{type(model).__name__} has none; use Adaptive(), or pass symmetries= with the pairs of the model"
            )
        if self.biases == "quotient":
            pairs, point = _canonical(pairs, symmetries.translations, point)
        for pair in pairs:
            _check_rank(pair, point, self)
        blocks = tuple(StackedPairs.at(group, point, self) for group in _equal_shapes(pairs, point))
        return TangentSpace(point, _scales_outside(pairs, point), blocks)

    def proved(self, model: nn.Module, loss: Evaluate, batch: Any) -> Geometry:
        """Itself, without translations that change the loss; ValueError naming the pairs that do.

        All symmetries are applied at once to the model on two examples of the batch, about ten evaluations.
        """
        symmetries = find_symmetries(model) if self.symmetries is None else self.symmetries
        if self.trust or not symmetries.pairs:
            return self
        proof = prove_on_batch(model, loss, batch, symmetries)
        false = [pair.pair for pair in proof.pairs if not pair.holds]
        if false:
            more = f" and {len(false) - 1} more" if len(false) > 1 else ""
            raise ValueError(
                f"The loss must not change along the orbit of a symmetric pair. It does for {false[0]}{more}; use "
                f"Adaptive(), pass symmetries= without them (Proof.proved makes such), or trust=True to use them anyway"
            )
        wrong = {shift.pair for shift in proof.translations if not shift.holds}
        if not wrong:
            return self
        kept = tuple(shift for shift in symmetries.translations if shift.name not in wrong)
        return replace(self, symmetries=replace(symmetries, translations=kept))


@final
@dataclass(frozen=True)
class StackedPairs:
    """Pairs of equal shape and group, over layers and heads, as one batched point of their quotient manifold.

    Factored in float64 whatever the model's dtype. Steps in z then run in the model's own precision (at least float32)
    where they are a few products of well-scaled matrices, and in float64 where they are exponentials or an ODE.
    """

    key: str
    pairs: tuple[SymmetricPair, ...]
    space: HorizontalSpace
    order: str

    @classmethod
    def at(cls, pairs: tuple[SymmetricPair, ...], point: Params, geometry: Quotient) -> StackedPairs:
        n, m, h = pairs[0].n, pairs[0].m, pairs[0].h
        x = _read(pairs, point)
        space = pairs[0].manifold(geometry.metric, geometry.eps).at(x.to(torch.float64))
        if geometry.geodesic != "exact":
            space = _in_precision(space, torch.promote_types(x.dtype, torch.float32))
        if geometry.norm == "adaptive":
            space = RelativeSpace(space)
        return cls(f"pairs {pairs[0].acts} {n} {m} {h} {x.device}", pairs, space, geometry.geodesic)

    def read_gradient(self, grads: Gradients, point: Params) -> Tensor:
        """The Euclidean gradient, (heads of all pairs, n + m, h); parameters without gradient count as zero."""
        names = {name for pair in self.pairs for name in pair.names}
        grad = _read(self.pairs, {name: _or_zero(grads.get(name), point[name]) for name in names})
        return grad.to(self.space.point.dtype)

    def write(self, x: Tensor, out: Params) -> None:
        for pair, part in zip(self.pairs, x.split([pair.heads for pair in self.pairs]), strict=True):
            pair.write(out, part)


@final
class TangentSpace:
    """T_w of all measured parameters w of a model, in orthonormal coordinates z (immutable, holds w as it is).

    z has one block per parameter (of its shape and dtype) for the elements in no pair, and one block (heads of
    all pairs, n + m, h) per shape of pair. scale: xi = scale * z for a parameter's block, None for 1; a
    parameter that pairs own entirely has no block. norm: that of the ball of z.
    """

    def __init__(
        self,
        point: Params,
        scale: Mapping[str, Tensor | None],
        pairs: tuple[StackedPairs, ...],
        norm: Norm = "l2",
    ) -> None:
        self.point = point
        self.scale = dict(scale)
        self.pairs = pairs
        self.norm = norm

    def zero(self) -> Params:
        """z = 0: the model as it is."""
        return {key: torch.zeros_like(like, memory_format=torch.contiguous_format) for key, like in self._blocks()}

    def sample(self, generator: torch.Generator) -> Params:
        """z ~ N(0, I) on the horizontal space, for linf uniform in [-1, 1]; weights that cannot move get 0."""
        z: Params = {}
        for name, scale in self.scale.items():
            w = self.point[name]
            noise = torch.empty(w.shape, device=generator.device, dtype=torch.float32)
            noise = (
                noise.normal_(generator=generator) if self.norm == "l2" else noise.uniform_(-1, 1, generator=generator)
            )
            z[name] = noise.to(w) if scale is None else noise.to(w).mul_(scale != 0)
        for block in self.pairs:
            like = block.space.point
            noise = torch.randn(like.shape, generator=generator, device=generator.device)
            z[block.key] = block.space.horizontal(noise.to(like))
        return z

    def length(self, z: Params) -> float:
        """|z| in the norm of the ball."""
        order = 2 if self.norm == "l2" else math.inf
        blocks = (block for block in z.values() if block.numel())
        sizes = [float(torch.linalg.vector_norm(block, order, dtype=torch.float64)) for block in blocks]
        return math.hypot(*sizes) if self.norm == "l2" else max(sizes)

    def project(self, z: Params) -> Params:
        """The nearest horizontal z, then cut to where its geodesic leaves the manifold, if that is before t = 1."""
        out: Params = {}
        for name, scale in self.scale.items():
            out[name] = z[name].clone() if scale is None else z[name] * (scale != 0)
        for block in self.pairs:
            horizontal = block.space.horizontal(z[block.key])
            with torch.no_grad():
                out[block.key] = horizontal * block.space.follow(horizontal, block.order)[1][..., None, None]
        return out

    def move(self, z: Params, out: Params | None = None) -> Params:
        """gamma_z(1), or the end of gamma_z if that is earlier: all measured parameters by name.

        Written into `out`, a result of an earlier call, where given.
        """
        return self.linearise(z, out, differentiable=False)[0]

    def pull_back(self, z: Params, grads: Gradients) -> Params:
        """The gradient in z of loss(move(z)), from the loss's gradient at move(z); a missing one counts as zero."""
        copies = {name: None if grad is None else grad.clone() for name, grad in grads.items()}
        return self.linearise(z)[1](copies)

    def linearise(
        self, z: Params, out: Params | None = None, *, differentiable: bool = True
    ) -> tuple[Params, Callable[[Gradients], Params]]:
        """move(z) and the pull-back there, sharing their work. The pull-back OVERWRITES the gradients it is given.

        The network is no part of any graph kept here: only the h x h algebra of the pairs is differentiated.
        """
        out = {name: torch.empty_like(w) for name, w in self.point.items()} if out is None else out
        leaves, images = [], []
        with torch.no_grad():
            for name, scale in self.scale.items():
                w = self.point[name]
                if scale is None:
                    torch.add(w, z[name], out=out[name])
                else:
                    torch.addcmul(w, scale, z[name], out=out[name])
        for block in self.pairs:
            with torch.set_grad_enabled(differentiable):
                leaf = z[block.key].detach().requires_grad_(differentiable)
                image = block.space.move(leaf, block.order)
            block.write(image.detach(), out)
            leaves.append(leaf)
            images.append(image)

        def pull_back(grads: Gradients) -> Params:
            pulled: Params = {}
            for block, leaf, image in zip(self.pairs, leaves, images, strict=True):
                (grad,) = torch.autograd.grad(image, leaf, block.read_gradient(grads, self.point))
                pulled[block.key] = block.space.horizontal(grad)
            return pulled | self._scaled(grads)  # last, for it overwrites what the pairs have to read

        return out, pull_back

    def _scaled(self, grads: Gradients) -> Params:
        """scale * gradient, in place wherever a gradient is alone in its memory (autograd may return one twice)."""
        pulled: Params = {}
        uses = Counter(_address(tensor) for tensor in (*self.point.values(), *grads.values()) if tensor is not None)
        for name, scale in self.scale.items():
            grad = grads.get(name)
            if grad is None:
                pulled[name] = torch.zeros_like(self.point[name], memory_format=torch.contiguous_format)
                continue
            if uses[_address(grad)] > 1 or grad.untyped_storage().nbytes() != grad.numel() * grad.element_size():
                grad = grad.clone(memory_format=torch.contiguous_format)
            pulled[name] = grad.contiguous() if scale is None else grad.mul_(scale).contiguous()
        return pulled

    def _blocks(self) -> Iterable[tuple[str, Tensor]]:
        yield from ((name, self.point[name]) for name in self.scale)
        yield from ((block.key, block.space.point) for block in self.pairs)


def measured_parameters(model: nn.Module) -> Params:
    """The parameters that require a gradient, detached, by the first of their names; each checked to be usable."""
    for name, w in model.named_parameters():
        if w.is_meta:
            raise ValueError(f"Parameter {name} has no values (meta device); load the weights first")
        if w.is_complex():
            raise TypeError(f"Parameter {name} is complex ({w.dtype}); only real parameters can be measured")
        if w.is_floating_point() and not bool(torch.isfinite(w).all()):
            raise ValueError(f"Parameter {name} holds NaN or infinity; repair the checkpoint")
    measured = {name: w.detach() for name, w in model.named_parameters() if w.requires_grad}
    if not measured:
        raise ValueError(
            f"{type(model).__name__} has no parameter to measure: every one has requires_grad=False (or there is "
            f"none); call model.requires_grad_(True) on those that shall count"
        )
    return measured


def _check_norm(norm: str) -> None:
    if norm not in ("l2", "linf"):
        raise ValueError(f"norm must be 'l2' or 'linf'. Found {norm!r}")


def _named(name: str, norm: Norm) -> str:
    return name if norm == "l2" else f"{name} {norm}"


def _is_measured(pair: SymmetricPair, point: Params, model: nn.Module) -> bool:
    unknown = [name for name in pair.names if name not in dict(model.named_parameters())]
    if unknown:
        raise ValueError(f"Pair {pair.name} names parameter {unknown[0]}, which {type(model).__name__} does not have")
    frozen = [name for name in pair.names if name not in point]
    if frozen and len(frozen) < len(set(pair.names)):
        raise ValueError(
            f"Pair {pair.name} is frozen in part ({frozen[0]} has requires_grad=False), and half a pair has no "
            f"symmetry; freeze or unfreeze all of {', '.join(pair.names)}, or pass symmetries= without this pair"
        )
    return not frozen


def _canonical(
    pairs: list[SymmetricPair], translations: Iterable[Translation], point: Params
) -> tuple[list[SymmetricPair], Params]:
    """Needless biases set to zero, the output biases making up for them, and the pairs without these rows."""
    names = {pair.name for pair in pairs}
    removed = [shift for shift in translations if shift.pair in names and all(name in point for name in shift.moved)]
    touched = {name for shift in removed for name in shift.moved}
    point = {name: w.clone() if name in touched else w for name, w in point.items()}
    for shift in removed:
        shift.remove(point)
    return list(without_biases(pairs, removed)), point


def _check_rank(pair: SymmetricPair, point: Params, geometry: Quotient) -> None:
    manifold = pair.manifold(geometry.metric, geometry.eps)
    ok, reason = manifold.check_point_on_manifold(pair.read(point).to(torch.float64), explain=True)
    if not ok:
        raise ValueError(
            f"Pair {pair.name} cannot be measured in a quotient metric, which needs G and H of full rank: {reason}; "
            f"use Adaptive(), or pass symmetries= without this pair"
        )


def _equal_shapes(pairs: Iterable[SymmetricPair], point: Params) -> list[tuple[SymmetricPair, ...]]:
    groups: dict[tuple[object, ...], list[SymmetricPair]] = {}
    for pair in pairs:
        groups.setdefault((pair.n, pair.m, pair.h, pair.acts, point[pair.names[0]].device), []).append(pair)
    return [tuple(group) for group in groups.values()]


def _scales_outside(pairs: Iterable[SymmetricPair], point: Params) -> dict[str, Tensor | None]:
    """The adaptive scale w where no pair owns the element and 0 where one does; nothing where all are owned."""
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


def _read(pairs: Iterable[SymmetricPair], params: Params) -> Tensor:
    return torch.cat([pair.read(params) for pair in pairs])  # (heads of all pairs, n + m, h)


def _in_precision(space: HorizontalSpace, dtype: torch.dtype) -> HorizontalSpace:
    """The same factored space, its tensors rounded to `dtype`."""

    def cast(value: Any) -> Any:
        if isinstance(value, HorizontalSpace):
            return _in_precision(value, dtype)
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    rounded = copy.copy(space)
    rounded.__dict__.update(tree_map(cast, vars(space)))
    return rounded


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _or_zero(grad: Tensor | None, like: Tensor) -> Tensor:
    return like.new_zeros(()).expand_as(like) if grad is None else grad
