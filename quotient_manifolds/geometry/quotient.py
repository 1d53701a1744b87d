"""Define the quotient geometry, which is invariant under the symmetries of a model, and find geometries by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, final, get_args

import torch
from torch import nn

from quotient_manifolds.check import check_one_of, meant
from quotient_manifolds.geometry.elementwise import Adaptive, Euclidean
from quotient_manifolds.geometry.geometry import Geometry
from quotient_manifolds.geometry.known import KnownSymmetries, StartPoint
from quotient_manifolds.geometry.pair_block import PairBlock, pair_blocks
from quotient_manifolds.geometry.parameters import (
    Factored,
    balanced,
    has_rank,
    measured_pairs,
    measured_parameters,
    of_full_rank,
    of_lower_rank,
    scales_outside,
    stored,
    trained_parameters,
)
from quotient_manifolds.geometry.tangent_space import ShardedSpace, TangentSpace
from quotient_manifolds.linalg import SingularFrame
from quotient_manifolds.manifolds import GEODESICS, METRICS, FixedRankQuotient, Metric
from quotient_manifolds.sharded import Layout, Ownership, ShardedModel, Whole, from_all, is_sharded, together
from quotient_manifolds.symmetries import (
    HOW_TO,
    Evaluate,
    Params,
    Scope,
    SymmetricPair,
    Symmetries,
    propose_symmetries,
    verify_sharded,
)
from quotient_manifolds.symmetries.canonical import canonical
from quotient_manifolds.symmetries.checks import check_weights
from quotient_manifolds.symmetries.horizontal import Horizontal
from quotient_manifolds.symmetries.names import BESIDE
from quotient_manifolds.symmetries.verify import Verification, canonical_changes, changed_by, verify_on_batches

SHOWN = 3  # how many symmetries a warning names

GEOMETRY_OPTIONS = ("norm", "eta", "geodesic", "eps", "symmetries", "verify")
"""All options of geometries that can be given by name."""


@final
@dataclass(frozen=True)
class Quotient(Geometry):
    """Define a metric modulo symmetries: pairs (G, H) modulo their group, all other parameters as in `Adaptive`.

    A pair is two matrices of which a model uses only the product G H^T, such as query and key of a head. Changes of the
    pair that preserve the product have length 0. [paper, App. C.1]

    metric: "inv", "mix", or the number t of their family. geodesic: "first", "second" [paper, Eq. 4] or "exact". eps:
    the paper's relaxation of the metric (0 keeps invariance).

    symmetries: `Symmetries` to quotient out, or a scope, whose symmetries are found in the loss when a measure begins.
    Symmetries that act on frozen and trained parameters together are left out. "all" quotients out pairs, and measures
    at the canonical representative of all other symmetries: redundant biases (b_K = 0, b_V = 0, b_O + W_O b_V), gains
    and biases of norms, directions and means that no layer uses (see `balance`). "pairs" takes pairs and redundant
    biases alone. "paper" keeps biases as rows of their pairs [paper, App. C.1], and is invariant under the groups of
    the pairs only. With eps = 0 the factors of pairs are balanced first, G^T G = H^T H. This changes no value, but
    products of ill-conditioned factors would lose digits. Symmetries from `find_symmetries` are used unchanged: call it
    with evaluate=loss, because a shift of all logits leaves only the loss unchanged. Declared pairs are completed by
    the other symmetries of the loss.

    verify: how symmetries are verified. "gradient": on every batch, the first gradient of a measure must be orthogonal
    to the orbits of the symmetries up to rounding; if it is not, float64 decides. Declared pairs are also verified on
    the first batch, near the canonical representative, where nothing is 0 by chance. "full": all symmetries are
    verified like this on every batch (`verify_on_batches`). "none": they are trusted. Found symmetries that fail are
    left out, with a warning; a given one that fails raises ValueError.
    """

    metric: Metric = "inv"
    geodesic: str = "second"
    eps: float = 0.0
    symmetries: Symmetries | Scope = "all"
    verify: Literal["gradient", "full", "none"] = "gradient"

    def __post_init__(self) -> None:
        FixedRankQuotient(1, 1, self.metric, eps=self.eps)  # raises for an invalid metric
        check_one_of("geodesic", self.geodesic, GEODESICS)
        if not isinstance(self.symmetries, Symmetries):
            check_one_of("symmetries", self.symmetries, get_args(Scope), ", or Symmetries")
        check_one_of("verify", self.verify, ("gradient", "full", "none"))

    @property
    def name(self) -> str:
        metric = self.metric if isinstance(self.metric, str) else f"t = {self.metric:g}"
        options = ["exact" if self.geodesic == "exact" else f"{self.geodesic} order"]
        options += ["pairs alone"] * (self.symmetries == "pairs") + ["biases as rows"] * (self.symmetries == "paper")
        options += {"gradient": [], "full": ["verified in float64"], "none": ["not verified"]}[self.verify]
        return f"{metric} ({', '.join(options)})"

    def to_dict(self) -> dict[str, Any]:
        """Return kind and settings in plain JSON types; given symmetries are recorded as "given" only."""
        given = isinstance(self.symmetries, Symmetries)
        return super().to_dict() | {"symmetries": "given" if given else self.symmetries}

    def tangent_space(self, model: nn.Module, known: KnownSymmetries | None = None) -> TangentSpace:
        start = self._known_start(model, known or KnownSymmetries())
        return self._space(start.pairs, start.constant, start.point, measured_parameters(model))

    def _known_start(self, model: nn.Module, known: KnownSymmetries) -> StartPoint:
        """Return the point where a measure begins, in the precision in which the model is measured."""

        def make() -> StartPoint:
            start = measured_parameters(model)
            begin = self._start_point(model, start, dict(model.named_parameters()))
            return replace(begin, point=stored(begin.point, start))

        return known.starts.of((model, self.symmetries), make, self._is_relaxed)

    def sharded_space(self, model: ShardedModel) -> ShardedSpace:
        start = model.original
        begin = self._start_point(model.model, start, model.held(), model.layouts)
        ownership = Ownership(model.layouts, model.measured, [pair.names for pair in begin.pairs])
        share, before = ownership.gather(stored(begin.point, start)), ownership.gather(start)
        own = [pair for pair in begin.pairs if ownership.here(pair.names[0])]
        local = together(lambda: self._space(own, begin.constant, share, before))
        return ShardedSpace(local, model, ownership, begin.pairs)

    def _start_point(
        self, model: nn.Module, start: Params, every: Params, layouts: Mapping[str, Layout] | None = None
    ) -> StartPoint:
        """Return the point where a measure begins. start: the measured parameters, every: all of them.

        layouts: the layouts of a sharded model's parameters, of which the dicts hold parts.
        """
        symmetries = self._known()
        pairs = measured_pairs(symmetries.pairs, start, every, type(model).__name__)
        paired = {name for pair in pairs for name in pair.names}
        others = tuple(each for each in symmetries.reparameterizations if start.keys() >= set(each.names))
        # At the least norm, an update is absorbed by its base and its pair has lost its rank: these do not act.
        beside = [each for each in others if each.kind == BESIDE and paired.intersection(each.names)]
        others = tuple(each for each in others if each not in beside)
        doubts = tuple(f"{each.name} is not quotiented out beside its pair." for each in beside[:1])
        if not (pairs or others):  # symmetries of frozen parameters do not count
            raise ValueError(
                f"A quotient geometry needs at least one symmetric pair of measured parameters, and "
                f"{type(model).__name__} has none{_why(symmetries)}; use Adaptive(), or pass symmetries= with the "
                "pairs of the model"
            )
        if not others:  # factors of pairs are balanced one by one
            return StartPoint(pairs, (), start, doubts)
        held = {name: w.detach() for name, w in every.items()} | start
        whole = held if layouts is None else Whole(held, layouts)
        # A relaxed metric depends on the place of a pair in its orbit, so pairs must not move.
        acting = replace(symmetries, pairs=() if self.eps else of_full_rank(pairs, whole), reparameterizations=others)
        read = {name for each in acting.groups for name in each.reads}
        found = canonical(acting.groups, {name: whole[name] for name in every if name in read})
        moved = set(acting.moved)
        point = {name: found.params[name] if name in moved else w for name, w in start.items()}
        if layouts is not None:
            point = {name: w[layouts[name].box].clone() if name in moved else w for name, w in point.items()}
        constant = tuple(name for name in found.constant if name in start)
        return StartPoint([pair.without(found.zeros) for pair in pairs], constant, point, (*doubts, *found.doubts))

    def _space(
        self, pairs: list[SymmetricPair], constant: Collection[str], point: Params, start: Params
    ) -> TangentSpace:
        """Return the tangent space at the balanced representative. start: the point before canonicalization."""
        pairs, point, frames = self._balanced(pairs, point, start)
        scales = scales_outside(pairs, point)  # raises if pairs share elements
        scales |= {name: torch.zeros_like(point[name]) for name in constant if name in point}
        blocks = self._blocks(pairs, point, frames)
        # Pairs hold the parameters that they own entirely; a second copy would be as large as most of a transformer.
        point = {name: w if name in scales else w.new_empty(()).expand(w.shape) for name, w in point.items()}
        return TangentSpace(point, scales, blocks)

    def _balanced(
        self, pairs: list[SymmetricPair], point: Params, start: Params
    ) -> tuple[list[SymmetricPair], Params, dict[SymmetricPair, SingularFrame]]:
        """Return the pairs of full rank, the point where their factors are balanced, and their singular frames."""
        free = self.eps == 0  # otherwise the metric depends on the place in the orbit
        left, frames = list[Factored](), dict[SymmetricPair, SingularFrame]()
        for pair in pairs:
            factored = Factored.of(pair, point, start)
            if free:
                factored, point = of_lower_rank(factored, point, start)
            left += [factored] if has_rank(factored, point, self.metric, self.eps) else []
        if free:
            point, frames = balanced(left, point)
        return [each.pair for each in left], point, frames

    @property
    def group(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.symmetries.every) if isinstance(self.symmetries, Symmetries) else ()

    def tangent_space_in_place(self, model: nn.Module) -> TangentSpace:
        point, symmetries = trained_parameters(model), self._known()
        every = {name: w.detach() for name, w in model.named_parameters()}
        pairs = measured_pairs(symmetries.pairs, point, every, type(model).__name__)
        check_weights(point, (name for pair in pairs for name in pair.names))
        return TangentSpace(point, scales_outside(pairs, point), self._blocks(pairs, point, brief=True))

    @property
    def _is_relaxed(self) -> bool:
        """Return whether the metric depends on the place of a pair in its orbit."""
        return self.eps > 0

    def _known(self) -> Symmetries:
        if isinstance(self.symmetries, Symmetries):
            return self.symmetries
        raise ValueError(
            f"A quotient geometry must have the symmetries of its model here. Found {self.symmetries!r}; give "
            f"geometry=Quotient({self.metric!r}, symmetries=find_symmetries(model, batch))"
        )

    def _blocks(
        self,
        pairs: list[SymmetricPair],
        point: Params,
        frames: Mapping[SymmetricPair, SingularFrame] | None = None,
        *,
        brief: bool = False,
    ) -> tuple[PairBlock, ...]:
        manifolds = {pair: pair.manifold(self.metric, self.eps) for pair in pairs}
        return pair_blocks(manifolds, point, self.geodesic, frames, brief=brief)

    def verified(
        self, model: nn.Module, loss: Evaluate, batches: Sequence[Any], known: KnownSymmetries | None = None
    ) -> Geometry:
        """Return the quotient by the symmetries of the loss, given or found; see `verify`.

        Symmetries are found in one recorded run of loss(model, first batch). Those of a sharded model are verified by
        random group elements, with about ten evaluations per batch, unless they are trusted.
        """
        known = known or KnownSymmetries()
        symmetries = self._found(model, loss, batches[0], known)
        found = self if symmetries is self.symmetries else replace(self, symmetries=symmetries)
        if self.verify == "none" or not symmetries.every:
            return found
        if is_sharded(model):
            _check_same(symmetries)

            def moved() -> dict[str, str]:
                checks = (verify_sharded(model, loss, batch, symmetries).checks for batch in batches)
                why = "the loss on batch {} changes along its orbit"
                return {c.name: why.format(i) for i, those in enumerate(checks) for c in those if c.verdict == "fails"}

            return found.without(known.sharded.of((model, loss, symmetries, *batches), moved), self)
        kept = found
        if self.verify == "full":
            kept = found.without(found._verification(model, loss, batches, known).failed, self)
        elif symmetries.declared:
            declared = partial(verify_on_batches, model, loss, batches[:1], Symmetries(symmetries.declared))
            kept = found.without(known.declared.of((model, loss, symmetries, batches[0]), declared).failed, self)
        known.warned.of((model, kept._known()), partial(kept._warn_of_doubts, model, known))
        if self.verify == "full":
            kept._check_start(found._verification(model, loss, batches, known), model, loss, batches, known)
        return kept

    def _warn_of_doubts(self, model: nn.Module, known: KnownSymmetries) -> None:
        """Warn if other points of the orbit may lead to another canonical point, and so to another value."""
        try:
            doubts = self._known_start(model, known).doubts
        except ValueError:  # raised again where the measure begins
            return
        if doubts:
            warnings.warn(
                f"measures of this model are not constant on the whole orbit, which has no unique canonical point: "
                f"{doubts[0]}",
                stacklevel=4,
            )

    def horizontal(self, model: nn.Module, space: TangentSpace, known: KnownSymmetries) -> Horizontal | None:
        if self.verify != "gradient" or is_sharded(model):
            return None
        every, symmetries = {name: w.detach() for name, w in model.named_parameters()}, self._known()
        moving = symmetries.without({each.name for each in symmetries.every if not space.names >= {*each.names}})

        def make() -> Horizontal:
            return Horizontal(moving, every | space.point)

        return known.horizontal.of((model, symmetries), make, (self.metric, self.eps)) if moving.every else None

    def failing(
        self, model: nn.Module, loss: Evaluate, batch: Any, index: int, known: KnownSymmetries
    ) -> Mapping[str, str]:
        found = self._verification(model, loss, [batch], known, index)
        if not found.failed:
            self._check_start(found, model, loss, [batch], known, index)
        return found.failed

    def _verification(
        self, model: nn.Module, loss: Evaluate, batches: Sequence[Any], known: KnownSymmetries, first: int = 0
    ) -> Verification:
        """Verify symmetries in float64. first: the number of the first batch."""
        symmetries, begin = self._known(), partial(self._point, model, known)
        subjects = model, loss, symmetries, *batches

        def verify() -> Verification:
            found = verify_on_batches(model, loss, batches, symmetries, begin=begin, first=first)
            known.changes.of(subjects, str, (self.metric, self.eps))  # covers this geometry's start, too
            return found

        return known.verified.of(subjects, verify)

    def _check_start(
        self,
        found: Verification,
        model: nn.Module,
        loss: Evaluate,
        batches: Sequence[Any],
        known: KnownSymmetries,
        first: int = 0,
    ) -> None:
        """Raise ValueError if the loss where a measure begins differs from the model's, in float64."""
        begin = partial(self._point, model, known, self._known())
        there = partial(changed_by, model, loss, batches, begin, found, first=first)
        subjects = model, loss, self.symmetries, *batches
        if changed := known.changes.of(subjects, there, (self.metric, self.eps)):
            raise ValueError(canonical_changes(changed))

    def _found(self, model: nn.Module, loss: Evaluate, batch: Any, known: KnownSymmetries) -> Symmetries:
        given = self.symmetries
        if isinstance(given, Symmetries):
            by_hand = given.pairs and not (given.traced or given.reparameterizations)
            if not by_hand or is_sharded(model) or self.verify == "none":
                return given
            propose = partial(propose_symmetries, model, batch, evaluate=loss)
            return known.completed.of((model, loss, batch, given), partial(_completed, given, propose))
        if is_sharded(model):
            raise ValueError(
                f"The symmetries of a sharded model cannot be found in a run of it. Found symmetries={given!r}; find "
                f"them before it is sharded, find_symmetries(model, batch, evaluate=loss).within({given!r}), and pass "
                f"symmetries= that"
            )
        every = known.found(model, loss, batch)
        return known.scopes.of((every,), partial(every.within, given), given)

    def without(self, failed: Mapping[str, str], asked: Geometry) -> Quotient:
        own = {name for name in asked.group if name in failed}
        if false := next((name for name in failed if name in own), None):
            raise ValueError(
                f"The loss must not change along the orbit of a symmetry that is given. Found {false}: "
                f"{failed[false]}; pass symmetries= without it, use Adaptive(), or trust it by verify='none'"
            )
        if not failed:
            return self
        listed = "; ".join(f"{name}: {reason}" for name, reason in list(failed.items())[:SHOWN])
        more = f"; and {len(failed) - SHOWN} more" if len(failed) > SHOWN else ""
        warnings.warn(f"symmetries that do not hold are not quotiented out: {listed}{more}", stacklevel=2)
        return replace(self, symmetries=self._known().without(set(failed)))

    def _point(self, model: nn.Module, known: KnownSymmetries, symmetries: Symmetries, every: Params) -> Params:
        """Return the parameters at the point of the orbit where a measure begins. every: the model's parameters."""
        here, own = replace(self, symmetries=symmetries), trained_parameters(model)
        start = {name: every[name] for name in own}
        begin = here._start_point(model, start, every)
        measured = replace(begin, point=_measured(begin.point, start, own))
        # The first call is for the model itself, and is the one stored; later calls show how the point rounds.
        known.starts.of((model, symmetries), lambda: measured, self._is_relaxed)
        return every | here._balanced(begin.pairs, begin.point, start)[1]


def _measured(point: Params, start: Params, own: Params) -> Params:
    """Return a point in the precision of measures; parameters that have not moved are the model's own tensors."""
    same = {name: own[name] if w is start[name] else w for name, w in point.items()}
    return stored(same, own)


def _completed(given: Symmetries, propose: Callable[..., Symmetries]) -> Symmetries:
    """Return the declared pairs and all other symmetries of the loss."""
    try:
        every = propose(declared=given)
    except ValueError as error:  # the function cannot run in float64, or differentiates inside
        warnings.warn(f"symmetries that are given stay as they are, not completed: {error}", stacklevel=2)
        return given
    known = {each.name for each in every.reparameterizations}
    others = (each for each in given.reparameterizations if each.name not in known)
    return replace(every, reparameterizations=(*every.reparameterizations, *others))


def _check_same(symmetries: Symmetries) -> None:
    """Raise ValueError unless all processes that share a model have the same symmetries."""
    named = tuple((each.name, each.names) for each in symmetries.every)
    if any(other != named for other in from_all(named)):
        raise ValueError(
            "All processes must quotient out the same symmetries, in the same order. Found different ones; find them "
            "on one process and send them to the others by torch.distributed.broadcast_object_list"
        )


def _why(symmetries: Symmetries) -> str:
    """Describe what was found instead of measured pairs, if anything."""
    if symmetries.pairs:
        return f" (each of its {len(symmetries.pairs)} has a frozen parameter, with requires_grad=False)"
    return f" ({symmetries.refused[0]}; {HOW_TO})" if symmetries.refused else ""


def as_geometry(geometry: Geometry | str | float, **options: Any) -> Geometry:
    """Return the geometry itself, or the one named euclidean, adaptive, inv, mix or a number t, with these options.

    Raises ValueError for other names and for options that the geometry does not have, TypeError for anything that is
    neither a geometry nor a name.

    >>> as_geometry("adaptive", eta=0.01)
    Adaptive(eta=0.01, norm='l2')
    """
    if isinstance(geometry, Geometry):
        return geometry
    if isinstance(geometry, bool) or not isinstance(geometry, (str, int, float)):
        raise TypeError(
            f"geometry must be Euclidean(), Adaptive(), Quotient(...) or a name such as 'inv'. Found {geometry!r}"
        )
    kinds: dict[str | float, type[Geometry]] = {"euclidean": Euclidean, "adaptive": Adaptive}
    if isinstance(geometry, str):
        check_one_of("geometry", geometry, [*kinds, *METRICS], ", or a number t")
    kind = kinds.get(geometry, Quotient)
    own = {each.name for each in fields(kind)} - {"metric"}  # type: ignore[arg-type]
    if foreign := sorted(set(options) - own):
        near = meant(foreign[0], own)
        listed = ", ".join(sorted(own))
        raise ValueError(f"The geometry {geometry} has the options {listed}. Found {foreign[0]!r}{near}")
    return kind(**({"metric": geometry} if kind is Quotient else {}), **options)
