"""Align two models: an element of the symmetry group that brings the weights of one near to those of the other."""

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
INSIDE = (0.25, 0.5, 0.75)  # of the path: where its loss is evaluated when it is lowered
EXACT, TRIES = 1e-13, 3
SETTLED = 1e-4  # relative, of the distance: what a round has to gain
UNDONE = 1e-8  # relative, of the distance: what rounding may leave of steps and back
WEIGHTS = 1e-2  # of what weights say of a rotation beside activations
By: TypeAlias = Literal["activations", "weights"]


@dataclass(frozen=True, eq=False, repr=False)
class Alignment(Moved):
    """Hold a model that was moved along its orbit towards another, by the distance of all parameters.

    before, distance: of the model as it was and as it is from the other, relative to the norm of that: 0, up to
    rounding, where the element that leads to the other was found.
    path: of the loss along the path, where the alignment was refined.
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
    """Move `model` along its symmetry orbit towards the weights of another model, where no step brings it nearer.

    Both have the same architecture, of which only the names and shapes of parameters are checked. Both are brought to
    the canonical points of their orbits. Then channels are rotated (orthogonal Procrustes, on the activations of both
    models on the inputs or on weights) and units that `find_permutations` finds are assigned to each other, with their
    buffers. Last, what led the other model to its canonical point is undone, and Gauss-Newton fits the continuous group
    at once. Where a stream has no rotation, as in post-norm blocks, its channels are permuted only.

    inputs, symmetries, held_out, evaluate, condition: as for `descend_orbit`. loss: with it, and batches, Adam goes on
    from there for so many steps, on the mean of loss(model, batch) at points of the straight path between the two, over
    the continuous group. [Ainsworth et al., 2209.04836; Theus et al., 2506.22712]

    Two points of one orbit are aligned up to rounding. In 14 of 400 small networks and 3 of 51 models that were tried,
    mostly by weights, they are not: where a weight without a bias reads a norm whose bias is 0 or another place that
    has no unique canonical point (so may the first factor of a LoRA adapter), channels whose gains differ in sign
    change places, or units along both axes of one weight do.
    Two models that were trained from different seeds get nearer, and in our studies the path between them lower; their
    mean is in general worse than either, so this is no way to average models.

    ValueError for models whose parameters differ in name or shape, and where the function changes on any of the inputs.
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
    held = own.keys() & other.keys() & {*parameters(model), *model.state_dict()}  # other buffers are made, not saved
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
    """Return whether two models of one architecture are one function, as far as is found, and how far apart they are.

    "same": they are on one orbit, as the weights of b aligned to a agree with a's up to `tolerance`, relative; the
    number is this distance. "different": outputs on the inputs differ by the number, relative. Else no element of the
    group was found that leads from one to the other, and the number is the distance that is left, the larger one of
    parameters and floating-point buffers. tolerance: that of models in float64; in float32 rounding alone may exceed
    it, so give 1e-4. options: of `align`.

    Warns of buffers that differ, by name, after what permutations of units change of them.
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

    (sum over pairs of dist(x_a, x_b)^2 + |w_a - w_b|^2)^(1/2): dist is the length of the geodesic of the metric between
    the orbits of a pair, w all other numbers where both models are at their canonical points. It is the same from any
    point of either orbit where these are unique. Permutations are no part of the quotient: `align` models of different
    seeds before.
    symmetries, evaluate, progress: as for `align`.

    `GeodesicError` where a pair is so far from the other that no geodesic is found: the distance is for models that are
    near, as before and after fine-tuning. NotImplementedError for rotary pairs, which have no logarithm. ValueError for
    models whose parameters differ in name or shape, and for pairs that have lost rank.
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
    """Bring parameters nearer and nearer to others, by elements of one symmetry after the other.

    Both go to the canonical points of their orbits first, so that orthogonal elements and permutations are what is
    between them; then what led the other there is undone, and Gauss-Newton fits all at once.
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
        """Return the group element that brings the one nearest to the other: permutations act last.

        Symmetries were found with the model's own buffers, which permutations move; so they act between the model and
        the other with its units in the order of the model's.
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
        """Find orders of units, and what brings parameters near to others that are in these orders."""
        (self._here, first), (self._there, last) = self._at, canonical_with_steps(self._groups, there)
        self._moments = self._activations(first, last, there)
        self._steps, self._orders = [*first], list[tuple[Permutation, Tensor]]()
        for units in several:
            if units.exchanged:  # gains are brought to 1, or -1; matrices do the rest
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
        """Return what activations say of matrices that weights cannot tell by their lengths: rotations."""
        if self._seen is None:
            return [None] * len(self._groups)
        here, there = (GroupElement(steps).apply(w) for steps, w in ((first, self._own), (last, there)))
        scales = [torch.allclose(each.project(each.identity), each.identity) for each in self._groups]
        rotations = [None if scaled else each for each, scaled in zip(self._groups, scales, strict=True)]
        return self._seen(rotations, here, there)

    def _in_order(self, several: Sequence[Units]) -> None:
        """Turn and assign first what meets nothing that is not turned and assigned yet."""
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
        """Return the other parameters, 0 but for those of these names."""
        return {name: w if name in names else torch.zeros_like(w) for name, w in self._there.items()}


def canonical_with_steps(symmetries: Sequence[Symmetry], params: Params) -> tuple[Params, Steps]:
    """Return the canonical point of an orbit, and what leads there, in few steps.

    Steps to a point that is no point of the orbit go so far that rounding keeps them from being undone; then the
    parameters themselves are returned.
    """
    try:
        found = canonical(symmetries, params)
    except NoPlaceError:
        return params, ()
    steps = shortened(found.element, params, found.params)
    back = GroupElement(steps).inverse.apply(found.params)
    return (found.params, steps) if distance(back, params) < UNDONE else (params, ())
