"""Align two models: an element of the symmetry group that brings the weights of one near to those of the other."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from quotient_manifolds.check import check_integer, check_number, check_one_of
from quotient_manifolds.manifolds import Metric
from quotient_manifolds.messages import Progress
from quotient_manifolds.orbit.closest import closest, closest_order, gauss_newton, rotation, unit
from quotient_manifolds.orbit.descend import Moved, Terms, mean_loss, minimize, moved_by, precision, tried_on, verified
from quotient_manifolds.orbit.group import CANONICAL, CONDITION, Group, GroupElement, Record, acted, check_condition
from quotient_manifolds.orbit.path import check_alike, distance, parameters
from quotient_manifolds.replica import differing_tensors
from quotient_manifolds.sharpness.losses import check_loss
from quotient_manifolds.sharpness.prepared_model import listed
from quotient_manifolds.symmetries import (
    Evaluate,
    Gauge,
    Params,
    Permutation,
    Scaling,
    Shift,
    SymmetricPair,
    Symmetries,
    balance,
    find_permutations,
    zeros_of,
)
from quotient_manifolds.symmetries.checks import check_weights
from quotient_manifolds.symmetries.outputs import ModelOutputs, answer, relative_change
from quotient_manifolds.symmetries.wires.reparameterization import together
from quotient_manifolds.symmetries.wires.constants import FreeDirections
from quotient_manifolds.symmetries.wires.gauges import Part
from quotient_manifolds.symmetries.wires.labels import UNREACHED
from quotient_manifolds.symmetries.wires.uses import by_entries

ROUNDS, SWEEPS = 30, 5
INSIDE = (0.25, 0.5, 0.75)  # of the path: where its loss is evaluated when it is lowered
SLOW = 0.5  # of the distance: where a step of Gauss-Newton leaves more than that, it is the last one
EXACT = 1e-13
SETTLED = 1e-4  # relative, of the distance: what a round has to gain
TURNED = ("orthogonal", "centred", "complex")
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

    Both have the same architecture, of which only the names and shapes of parameters are checked. Gains of norms are
    absorbed first, and biases, means and what else shifts go to their canonical points. Then streams are rotated
    (orthogonal Procrustes, on the activations of both models on the inputs or on weights), units that
    `find_permutations` finds are assigned to each other, pairs (GL(h), complex planes) and scales brought together, and
    where no order changes any more, Gauss-Newton fits the continuous group at once; last, gains and shifts go to where
    they are in the other model. Where a stream has no rotation, as in post-norm blocks, its channels are permuted only.

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
    own, other = (parameters(each) for each in (model, to))
    for each in (own, other):
        check_weights(each, each)
    symmetries = verified(model, inputs, symmetries, evaluate)
    permutations = find_permutations(model, inputs, evaluate=evaluate) if permutations is None else permutations
    with torch.no_grad():
        seen = partial(_activation_moments, (model, to), inputs, evaluate) if by == "activations" else None
        element = _Aligner(own, other, symmetries, permutations, seen, condition).element(progress)
        start = element.apply(own)
        before = distance(own, other)
        if distance(start, other) > before:
            element = GroupElement()
    path: tuple[float, ...] = ()
    if loss is not None:
        start, dtype = element.apply(own), precision(own)
        group = Group(symmetries, start, condition=condition)
        places = [partial(_between, {name: w.to(dtype) for name, w in other.items()}, t) for t in INSIDE]
        values = Terms(mean_loss(loss, model, batches, dtype, places), start, dtype)
        first, _ = values(start)
        found, met, least = minimize(group, values, steps, learning_rate, 0.0, progress)
        path = (first, *met, min(first, least))
        if least < first:
            element = GroupElement(element.steps + found.steps)
    moved = moved_by(model, element, tried, evaluate)
    return Alignment(**vars(moved), before=before, distance=distance(moved.params, other), path=path)


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

    Warns of buffers that differ, by name: no symmetry changes them.
    """
    check_alike(a, b)
    check_number("tolerance", tolerance)
    if names := differing_tensors(*(dict(each.named_buffers()) for each in (a, b))):
        warnings.warn(f"the models differ in buffers, which no symmetry changes: {', '.join(names)}", stacklevel=2)
    here, there = (ModelOutputs(each, [inputs], options.get("evaluate")).own() for each in (a, b))
    change = relative_change(there, here)
    if change > tolerance:
        return "different", change
    found = align(b, a, inputs, **options)
    left = max(found.distance, _apart(b, a, names))
    return ("same" if left <= tolerance else "same outputs here, no element found"), left


def _apart(one: nn.Module, other: nn.Module, names: Collection[str]) -> float:
    """Return the largest relative distance of floating-point buffers of these names that both models have."""
    numbers = [{name: own for name, own in each.named_buffers() if own.is_floating_point()} for each in (one, other)]
    here, there = ({name: each[name] for name in names if name in each} for each in numbers)
    shared = [(w, there[name].to(w)) for name, w in here.items() if name in there and there[name].shape == w.shape]
    distances = (distance({"": w}, {"": v}) for w, v in shared)
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
    here, there = (balance(each, symmetries) for each in (a, b))
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

    Biases, means and what else can be added without being seen has no part in it: both go to the canonical point of
    these groups first, and at the end to where they are in the other model.
    """

    def __init__(
        self,
        own: Params,
        other: Params,
        symmetries: Symmetries,
        permutations: Sequence[Permutation],
        seen: Callable[..., dict[str, Tensor]] | None,
        condition: float,
    ) -> None:
        # By the processor, which holds what the records know of places and weights.
        self._here, self._there = (
            {name: w.to("cpu", torch.float64, copy=True) for name, w in each.items()} for each in (own, other)
        )
        self._symmetries, self._permutations, self._seen, self._condition = symmetries, permutations, seen, condition
        self._moving = {name for each in permutations for name in each.names}
        self._steps = list[tuple[Record, Tensor]]()
        free = symmetries.reparameterizations
        self._turned = [each for each in free if isinstance(each, Gauge) and each.acts in TURNED]
        self._scalings = [each for each in free if isinstance(each, Scaling)]
        mixed = [each for each in free if isinstance(each, Gauge) and each.acts == "linear"]
        lengths = [each for each in self._scalings if each.by_lengths]
        self._fitted: list[Record] = [*mixed, *symmetries.pairs, *lengths]
        self._added = [each for each in free if each not in (*self._turned, *self._scalings, *mixed)]

    def element(self, progress: Progress | None) -> GroupElement:
        """Return the group element that brings the one nearest to the other."""
        unfold = self._fold()
        goal = self._there
        for _ in range(ROUNDS):
            last = self._here
            for each in together(self._added):  # points that depend on each other, where both models have them
                there = acted(each, CANONICAL, self._there)
                if there is not None and self._take(each, CANONICAL):
                    self._there = there
            if distance(last, self._here) <= EXACT:
                break
        zeros = zeros_of(self._symmetries.reparameterizations, self._here)
        self._pairs = {pair: pair.without(zeros) for pair in self._symmetries.pairs}
        for number in range(ROUNDS):
            before, changed = self._distance(), False
            moving = None if number else self._moving
            moments = self._seen(self._turned, self._here, self._there) if self._seen else {}
            for gauge in self._turned:
                A = rotation(gauge, self._here, self._there, moving=moving, seen=moments.get(gauge.name))
                self._take(gauge, A)
            for permutation in self._permutations:
                order = closest_order(permutation, self._here, self._there, [*self._pairs.values()])
                if not torch.equal(order, torch.arange(permutation.size)):
                    changed = self._take(permutation, order)
            for record in self._fitted:
                self._fit(record, moving)
            if progress is not None:
                progress("alignment", number + 1, ROUNDS)
            if number and not changed:
                self._polish()
                if self._distance() < EXACT or before - self._distance() <= SETTLED * before:
                    break
        if progress is not None:
            progress("alignment", ROUNDS, ROUNDS)
        self._there = goal
        self._add()
        for _ in range(SWEEPS):
            before = self._distance()
            for record in (*self._added, *_answers(self._added)):
                self._fit(record)
            if before - self._distance() <= SETTLED * before:
                break
        return GroupElement((*self._steps, *unfold))

    def _add(self) -> None:
        """Bring means and constants to those of the other, of weights while biases that they answer to are not 0."""
        kept, taken, before = self._here, [*self._steps], self._distance()
        shifts = [each for each in self._added if isinstance(each, Shift)]
        for record in self._added:
            if isinstance(record, Gauge):
                self._fit(record, anyway=True)
        for shift in shifts:
            if not any(shift.targets):
                self._take(shift, torch.ones(len(shift.pivots), dtype=torch.float64))
        for shift in sorted(shifts, key=lambda each: each.pivots[0][0], reverse=True):
            self._fit(shift, anyway=True)
        if self._distance() >= before:
            self._here, self._steps = kept, taken

    def _polish(self) -> None:
        """Go on by Gauss-Newton over the continuous group, where records that depend on each other slow the rounds."""
        moves = [*self._turned, *self._fitted].__contains__
        group = Group(self._symmetries, self._here, condition=self._condition, moves=moves)
        last = torch.inf
        while group.records and EXACT < self._distance() < SLOW * last:
            last = self._distance()
            self._here, steps = gauss_newton(group, self._here, self._there)
            self._steps += steps

    def _fold(self) -> list[tuple[Record, Tensor]]:
        """Bring gains of both to 1, and return what brings them back to those of the other."""
        unfold = list[tuple[Record, Tensor]]()
        for scaling in self._scalings:
            if scaling.tells:
                self._take(scaling, torch.from_numpy(scaling.by_gains(self._here)))
                z = torch.from_numpy(scaling.by_gains(self._there))
                scaling.apply(self._there, z)
                unfold.insert(0, (scaling, -z))
        return unfold

    def _distance(self) -> float:
        return distance(self._here, self._there)

    def _take(self, record: Record, value: Tensor, farthest: float = torch.inf) -> bool:
        """Act unless that is impossible or leads farther away; return whether it acts."""
        moved = acted(record, value, self._here)
        if moved is None or distance(moved, self._there) >= farthest:
            return False
        self._here = moved
        self._steps.append((record, value))
        return True

    def _fit(self, record: Record, moving: Collection[str] | None = None, *, anyway: bool = False) -> None:
        """Act with what brings a record's parameters nearest; where others go farther away than that, only `anyway`."""
        told = self._pairs[record] if isinstance(record, SymmetricPair) else record  # less what shifts move
        with suppress(ValueError):  # of constants that vanish, so that weights cannot answer to them
            value = closest(told, self._here, self._there, self._condition, moving=moving)
            if bool(torch.isfinite(value).all()):
                self._take(record, value, torch.inf if anyway else self._distance())


def _answers(records: Iterable[Record]) -> Iterator[FreeDirections]:
    """Yield what weights answer to constants where these are 0: nothing reaches it there, so that it is free."""
    for shift in (each for each in records if isinstance(each, Shift)):
        names = {name for kind, name, _ in shift.pivots if kind == "weight"}
        uses = by_entries([each for each in shift.constants.walk.linears if each.entries.name in names])
        if uses:
            yield FreeDirections(shift.constants, UNREACHED, tuple((tuple(each), 0) for each in uses))


def _activation_moments(
    models: Sequence[nn.Module], inputs: Any, evaluate: Evaluate | None, gauges: Sequence[Gauge], *params: Params
) -> dict[str, Tensor]:
    """Return for each gauge the sum of a b^T over activations b of the first model and a of the second, there."""
    seen = []
    for model, own in zip(models, params, strict=True):
        found = list[tuple[str, Tensor]]()

        def watched(copied: nn.Module, batch: Any, found: list[tuple[str, Tensor]] = found) -> Any:
            found.clear()  # of a run that failed
            for gauge in gauges:
                for part in gauge.parts:
                    module = copied.get_submodule(part.entries.name.rpartition(".")[0])
                    module.register_forward_hook(partial(_record, found, gauge, part))
            return (evaluate or answer)(copied, batch)

        devices = {name: w.device for name, w in model.named_parameters()}
        ModelOutputs(model, [inputs], watched).at({name: w.to(devices[name]) for name, w in own.items()})
        seen.append(found)
    moments: dict[str, Tensor] = {}
    for (name, b), (_, a) in zip(*seen, strict=False):
        if a.shape == b.shape:
            moments[name] = moments.get(name, 0.0) + unit(a.mT @ b)
    return moments


def _record(
    found: list[tuple[str, Tensor]], gauge: Gauge, part: Part, module: nn.Module, args: Any, output: Any
) -> None:
    """Record what a module takes and gives of a stream, in coordinates in which it is rotated."""
    into = part.entries.shape[-1]
    for copies, x, width in (
        (part.out, output, into if part.constant else part.entries.shape[1]),
        (part.into, args[0] if args else None, into),
    ):
        if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1 and x.shape[-1] == width:
            for each in (each for each in copies if not each.dual and len(each.places)):
                rows = x.reshape(-1, width).cpu().double().index_select(1, each.places) / each.weights
                found.append((gauge.name, rows[:, each.channels.argsort()] * gauge.weights))
