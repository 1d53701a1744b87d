"""Align two models: find an element of the symmetry group that brings the weights of one close to the other's."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from quotient_manifolds.check import check_integer, check_number, check_one_of
from quotient_manifolds.manifolds import Metric
from quotient_manifolds.messages import Progress
from quotient_manifolds.orbit.activations import moments_of, unit
from quotient_manifolds.orbit.closest import fitted, shortened
from quotient_manifolds.orbit.descend import Moved, Terms, mean_loss, minimize, moved_by, precision, tried_on, verified
from quotient_manifolds.orbit.group import CONDITION, Group, GroupElement, Steps, check_condition
from quotient_manifolds.orbit.path import check_alike, distance, parameters, placed, state
from quotient_manifolds.orbit.units import Units
from quotient_manifolds.replica import differing_tensors
from quotient_manifolds.sharpness.losses import check_loss
from quotient_manifolds.sharpness.prepared_model import listed
from quotient_manifolds.symmetries import Evaluate, Params, Symmetries
from quotient_manifolds.symmetries.canonical import NoPlaceError, canonical
from quotient_manifolds.symmetries.checks import check_weights
from quotient_manifolds.symmetries.discovery import find_permutations
from quotient_manifolds.symmetries.groups import Permutation, Symmetry
from quotient_manifolds.symmetries.outputs import ModelOutputs, relative_change

ROUNDS = 30
INSIDE = (0.25, 0.5, 0.75)  # the points of the path at which the loss is minimized
EXACT, TRIES = 1e-13, 3
SETTLED = 1e-4  # the least relative decrease of the distance in a round
UNDONE = 1e-8  # the relative distance that rounding may leave after steps and their inverse
WEIGHTS = 1e-2  # the share of weights in the choice of a rotation, beside activations
By: TypeAlias = Literal["activations", "weights"]


@dataclass(frozen=True, eq=False, repr=False)
class Alignment(Moved):
    """Hold a model that was aligned to another one along its orbit.

    before, distance: the distance of all parameters from the other model's, before and after alignment, relative to the
    norm of the other's. It is 0 up to rounding if a group element that leads to the other model was found. path: the
    mean loss on the path, at each step of its minimization, if a loss was given.
    """

    before: float
    distance: float
    path: tuple[float, ...] = ()


def align(
    model: nn.Module,
    to: nn.Module,
    inputs: Any,
    *,
    by: By = "activations",
    symmetries: Symmetries | None = None,
    permutations: Sequence[Permutation] | None = None,
    held_out: Sequence[Any] = (),
    evaluate: Evaluate | None = None,
    condition: float = CONDITION,
    loss: Callable[..., Tensor] | None = None,
    batches: Iterable[Any] = (),
    steps: int = 100,
    learning_rate: float = 0.01,
    progress: Progress | None = None,
) -> Alignment:
    """Transform `model` along its symmetry orbit until no step brings its weights closer to another model's.

    Both must have the same architecture; only the names and shapes of parameters are checked. First, both are brought
    to the canonical points of their orbits. Then channels are rotated (orthogonal Procrustes, on the activations of
    both models on the inputs, or on weights), and the units that `find_permutations` finds are assigned to each other,
    with their buffers. Last, the other model's canonicalization is undone, and Gauss-Newton fits all continuous
    symmetries at once. If a stream has no rotation, as in post-norm blocks, its channels are only permuted.

    inputs, symmetries, held_out, evaluate, condition: as for `descend_orbit`. loss, batches: if given, Adam continues
    for `steps` steps over the continuous group. It minimizes the mean of loss(model, batch) at points of the straight
    path between the two models. [Ainsworth et al., 2209.04836; Theus et al., 2506.22712]

    Two points of one orbit are aligned up to rounding. Exceptions were 14 of 400 small networks and 3 of 51 models that
    were tried, mostly by weights. Some have places without a unique canonical point, such as a weight without a bias
    after a norm whose bias is 0, or the first factor of a LoRA adapter. In others, channels whose gains differ in sign
    are exchanged, or units along both axes of one weight.

    Two models trained from different seeds get closer, and in our studies the loss on the path between them decreases.
    Their mean is in general worse than either model, so do not use this to average models.

    Raises ValueError if parameters differ in name or shape, or if the function changes on any of the inputs.
    """
    check_alike(model, to)
    check_one_of("by", by, get_args(By))
    check_condition(condition)
    check_integer("steps", steps, 1)
    check_number("learning_rate", learning_rate, positive=True)
    if loss is not None:
        check_loss(loss)
        batches = listed(batches)
    elif batches:
        raise ValueError("batches must come with a loss(model, batch), which is lowered along the path. Found no loss.")
    tried = tried_on(inputs, held_out)
    own, other = (state(each) for each in (model, to))
    for each in (own, other):
        check_weights(each, each)
    symmetries = verified(model, inputs, symmetries, evaluate)
    permutations = find_permutations(model, inputs, evaluate=evaluate) if permutations is None else permutations
    held = own.keys() & other.keys() & {*parameters(model), *model.state_dict()}  # other buffers are derived, not saved
    permutations = [each for each in permutations if held.issuperset(each.names)]
    with torch.no_grad():
        seen = partial(moments_of, (model, to), inputs, evaluate) if by == "activations" else None
        element = _Aligner(own, other, symmetries, permutations, seen, condition).element(progress)
        if not distance(element.apply(own), other) < (1 - SETTLED) * distance(own, other):
            element = GroupElement()
        other = parameters(to)
        before = distance(own, other)
    path: tuple[float, ...] = ()
    if loss is not None:
        moved, dtype = element.apply(own), precision(own)
        start = {name: moved[name] for name in other}
        group = Group(symmetries, start, condition=condition)
        places = [partial(_between, {name: w.to(dtype) for name, w in other.items()}, t) for t in INSIDE]
        values = Terms(mean_loss(loss, placed(model, moved), batches, dtype, places), start, dtype)
        first, _ = values(start)
        found, met, least = minimize(group, values, steps, learning_rate, 0.0, progress)
        path = (first, *met, min(first, least))
        if least < first:
            element = GroupElement(element.steps + found.steps)
    there = moved_by(model, element, tried, evaluate)
    return Alignment(**vars(there), before=before, distance=distance(there.params, other), path=path)


def _between(other: Params, t: float, params: Params) -> Params:
    return {name: other[name].lerp(w, t) for name, w in params.items()}


def same_function(
    a: nn.Module, b: nn.Module, inputs: Any, *, tolerance: float = 1e-6, **options: Any
) -> tuple[Literal["same", "different", "same outputs here, no element found"], float]:
    """Return whether two models of one architecture are found to be the same function, and how far apart they are.

    "same": both are on one orbit, because the weights of b aligned to a agree with a's up to the relative `tolerance`;
    the number is their distance. "different": the number is the relative difference of the outputs on the inputs.
    Otherwise no group element was found that maps one to the other, and the number is the remaining distance, the
    larger one of parameters and floating-point buffers. tolerance: the default is for models in float64; in float32
    rounding alone may exceed it, so give 1e-4. options: arguments of `align`.

    Warns of buffers, by name, that still differ after units have been permuted.
    """
    check_alike(a, b)
    check_number("tolerance", tolerance)
    here, there = (ModelOutputs(each, [inputs], options.get("evaluate")).own() for each in (a, b))
    change = relative_change(there, here)
    found = align(b, a, inputs, **options) if change <= tolerance else None
    moved = b if found is None else found.model
    if names := differing_tensors(*(dict(each.named_buffers()) for each in (a, moved))):
        warnings.warn(f"the models differ in buffers, which no symmetry changes: {', '.join(names)}", stacklevel=2)
    if found is None:
        return "different", change
    left = max(found.distance, _apart(moved, a, names))
    return ("same" if left <= tolerance else "same outputs here, no element found"), left


def _apart(one: nn.Module, other: nn.Module, names: Collection[str]) -> float:
    """Return the largest relative distance of floating-point buffers of these names that both models have."""
    here, there = (state(each) for each in (one, other))
    distances = (distance(here, {name: there[name]}) for name in names if name in there)
    return max((math.inf if math.isnan(each) else each for each in distances), default=0.0)


def quotient_distance(
    a: nn.Module,
    b: nn.Module,
    inputs: Any,
    *,
    metric: Metric = "inv",
    symmetries: Symmetries | None = None,
    evaluate: Evaluate | None = None,
    progress: Progress | None = None,
) -> float:
    """Compute the distance of two models of one architecture on the quotient by their continuous symmetries.

    This is (sum over pairs of dist(x_a, x_b)^2 + |w_a - w_b|^2)^(1/2). dist is the length of the metric's geodesic
    between the orbits of a pair, and w are all other parameters at the canonical points of both models. The distance
    depends on the two orbits only, if their canonical points are unique. Permutations are not quotiented out: `align`
    models of different seeds first. symmetries, evaluate, progress: as for `align`.

    Raises `GeodesicError` if two pairs are so far apart that no geodesic is found: the distance is meant for models
    that are close, as before and after fine-tuning. Raises NotImplementedError for rotary pairs, which have no
    logarithm. Raises ValueError if parameters differ in name or shape, or if a pair has lost rank.
    """
    check_alike(a, b)
    symmetries = verified(a, inputs, symmetries, evaluate)
    here, there = (canonical(symmetries.groups, parameters(each)).params for each in (a, b))
    total, rest = 0.0, {name: torch.ones_like(w) for name, w in here.items()}
    for number, pair in enumerate(symmetries.pairs, 1):
        lengths = pair.manifold(metric).dist(*(pair.read(each).double() for each in (here, there)))
        total += float(lengths.square().sum())
        pair.write(rest, torch.zeros_like(pair.read(rest)))
        if progress is not None:
            progress("distance", number, len(symmetries.pairs))
    total += sum(float(((w - there[name]).double() * rest[name]).square().sum()) for name, w in here.items())
    return total**0.5


class _Aligner:
    """Bring parameters closer and closer to others, by elements of one symmetry after the other.

    Both are brought to the canonical points of their orbits first, so that only orthogonal elements and permutations
    separate them. Then the other's canonicalization is undone, and Gauss-Newton fits all symmetries at once.
    """

    def __init__(
        self,
        own: Params,
        other: Params,
        symmetries: Symmetries,
        permutations: Sequence[Permutation],
        seen: Callable[..., list[Tensor | None]] | None,
        condition: float,
    ) -> None:
        self._own, self._other = (
            {name: each[name].to("cpu", torch.float64, copy=True) for name in own if name in other}
            for each in (own, other)
        )
        self._groups = symmetries.groups
        self._at = canonical_with_steps(self._groups, self._own)
        axes = {name: w.ndim for name, w in own.items()}
        units = [Units(each, self._groups, axes) for each in permutations]
        self._units = [each for each in units if each.told]
        self._seen, self._condition = seen, condition
        wide = {name for name, count in axes.items() if count > 1}
        self._compared = wide if any(name in wide for each in self._groups for name in each.names) else {*axes}

    def element(self, progress: Progress | None) -> GroupElement:
        """Return the group element that brings the parameters closest to the others; permutations act last.

        Symmetries were found with the model's own buffers, which permutations change. So symmetries act between the
        model and the other model with its units in the model's order.
        """
        orders, there = GroupElement(), self._other
        for number in range(TRIES + 1):
            self._search(there, self._units if number < TRIES else ())
            if progress is not None:
                progress("alignment", number + 1, TRIES + 2)
            if not self._orders:
                break
            orders = GroupElement((*self._orders, *orders.steps))
            there = orders.inverse.apply(self._other)
        size = sum(float(w.square().sum()) for w in there.values()) ** 0.5
        steps = fitted(self._own, there, self._groups, tuple(self._steps), self._condition, EXACT * size)
        if progress is not None:
            progress("alignment", TRIES + 2, TRIES + 2)
        return GroupElement((*steps, *orders.steps))

    def _search(self, there: Params, several: Sequence[Units]) -> None:
        """Find orders of units, and steps that bring the parameters close to the others in these orders."""
        (self._here, first), (self._there, last) = self._at, canonical_with_steps(self._groups, there)
        self._moments = self._activations(first, last, there)
        self._steps, self._orders = [*first], list[tuple[Permutation, Tensor]]()
        for units in several:
            if units.exchanged:  # gains are 1 or -1 at the canonical point; matrices do the rest
                self._assign(units, {*self._there})
        several = [units for units in several if not units.exchanged]
        self._in_order(several)
        for _ in range(1, ROUNDS):
            before = distance(self._here, self._there)
            changed = [self._assign(units, self._compared) for units in several]
            for k in range(len(self._groups)):
                self._turn(k, self._compared)
            if not any(changed) and not distance(self._here, self._there) < (1 - SETTLED) * before:
                break
        back = GroupElement(last).inverse.steps
        self._steps += [(each, each.bounded(value, self._condition)) for each, value in back]  # type: ignore[union-attr]

    def _activations(self, first: Steps, last: Steps, there: Params) -> list[Tensor | None]:
        """Return the moments of activations for rotations, which the lengths of weights cannot determine; else None."""
        if self._seen is None:
            return [None] * len(self._groups)
        here, there = (GroupElement(steps).apply(w) for steps, w in ((first, self._own), (last, there)))
        scales = [torch.allclose(each.project(each.identity), each.identity) for each in self._groups]
        rotations = [None if scaled else each for each, scaled in zip(self._groups, scales, strict=True)]
        return self._seen(rotations, here, there)

    def _in_order(self, several: Sequence[Units]) -> None:
        """Rotate and assign one by one, first those with the largest share of parameters that no other one acts on."""
        left: dict[int, tuple[tuple[str, ...], tuple[int, ...], Callable[[set[str]], object]]] = {
            k: (each.names, (), partial(self._turn, k)) for k, each in enumerate(self._groups) if each.mixes
        }
        for k, units in enumerate(several, len(self._groups)):
            left[k] = units.permutation.names, units.inside, partial(self._assign, units)
        while left:
            usable = {}
            for k, (names, inside, _) in left.items():
                met = {name for n, (others, *_) in left.items() if n != k and n not in inside for name in others}
                usable[k] = (self._compared & {*names}) - met

            def share(k: int, usable: dict[int, set[str]] = usable) -> float:
                if k < len(self._groups) and self._moments[k] is not None:
                    return 2.0
                one, all_ = (sum(self._here[name].numel() for name in names) for names in (usable[k], left[k][0]))
                return one / all_

            k = max(left, key=share)
            left.pop(k)[2](usable[k] or self._compared)

    def _turn(self, k: int, names: set[str]) -> None:
        symmetry, seen = self._groups[k], self._moments[k]
        M = symmetry.overlap(self._here, self._only(names))
        if seen is not None:
            M = unit(seen) + WEIGHTS * unit(M)
        if bool(M.any()):
            R = symmetry.nearest(M)
            self._here = symmetry.act(self._here, R)
            self._steps.append((symmetry, R))
            if seen is not None:
                self._moments[k] = seen @ R.mT

    def _assign(self, units: Units, names: set[str]) -> bool:
        order = units.order(self._here, self._only(names))
        if torch.equal(order, torch.arange(len(order))):
            return False
        self._here = units.permutation.act(self._here, order)
        self._orders.append((units.permutation, order))
        return True

    def _only(self, names: set[str]) -> Params:
        """Return the other parameters, with all but these names set to 0."""
        return {name: w if name in names else torch.zeros_like(w) for name, w in self._there.items()}


def canonical_with_steps(symmetries: Sequence[Symmetry], params: Params) -> tuple[Params, Steps]:
    """Return the canonical point of an orbit, and the steps that lead there, as few as possible.

    If the limit is not a point of the orbit, steps go so far that rounding prevents undoing them. Then the parameters
    themselves are returned, without steps.
    """
    try:
        found = canonical(symmetries, params)
    except NoPlaceError:
        return params, ()
    steps = shortened(found.element, params, found.params)
    back = GroupElement(steps).inverse.apply(found.params)
    return (found.params, steps) if distance(back, params) < UNDONE else (params, ())
