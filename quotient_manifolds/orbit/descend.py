"""Minimize an objective over the symmetry orbit of a model: other parameters, the same function."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.check import check_integer, check_number
from quotient_manifolds.messages import Progress, sentence
from quotient_manifolds.orbit.group import CONDITION, Group, GroupElement, Walk, names_of
from quotient_manifolds.orbit.objectives import Objective, WeightObjective
from quotient_manifolds.orbit.path import Model, parameters, placed, state
from quotient_manifolds.replica import TrueGradients, private_batch, replica
from quotient_manifolds.sharpness.losses import check_loss
from quotient_manifolds.sharpness.prepared_model import listed
from quotient_manifolds.symmetries import Evaluate, Params, Symmetries
from quotient_manifolds.symmetries.checks import check_eval, check_list, check_model, check_weights
from quotient_manifolds.symmetries.discovery import find_symmetries
from quotient_manifolds.symmetries.outputs import RUN_ERRORS, ModelOutputs
from quotient_manifolds.symmetries.symmetries import check_symmetries

HOLDS = 1e3  # the output may change by this times its rounding noise times the condition number of the element
PATIENCE = 20  # the number of steps in which the objective has to decrease
FLAT = 1e-6  # relative to the objective: slopes far below are rounding, which Adam would take for a direction


@dataclass(frozen=True, eq=False, repr=False)
class Moved:
    """Hold a model at another point of its orbit.

    params: all parameters, in the model's precision: `element` applied to the original ones. change: the relative
    change of the output on the inputs and those held out, in float64, before parameters are rounded to the model's
    precision. stored: the same after rounding.
    """

    model: nn.Module
    params: Params
    element: GroupElement
    change: float
    stored: float

    @property
    def condition(self) -> float:
        """Return the condition number of the group element, the largest over its factors."""
        return self.element.condition

    def __repr__(self) -> str:
        """Return the numbers alone, because a model and its parameters would fill pages."""
        shown = [name for name in ("before", "after", "distance", "condition", "change") if hasattr(self, name)]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name):.3g}' for name in shown)})"


@dataclass(frozen=True, eq=False, repr=False)
class Descent(Moved):
    """Hold the point where an objective is least on an orbit, and its values during the descent, the model's own first.

    The last value is the objective at `params`, the best point that was found.
    """

    path: tuple[float, ...]

    @property
    def before(self) -> float:
        """Return the objective at the model's own parameters."""
        return self.path[0]

    @property
    def after(self) -> float:
        """Return the objective at the parameters returned."""
        return self.path[-1]


def descend_orbit(
    model: Model,
    objective: WeightObjective | Callable[..., Tensor],
    inputs: Any,
    *,
    symmetries: Symmetries | None = None,
    batches: Iterable[Any] | None = None,
    held_out: Sequence[Any] = (),
    evaluate: Evaluate | None = None,
    steps: int = 200,
    learning_rate: float = 0.02,
    tolerance: float = 1e-4,
    condition: float = CONDITION,
    progress: Progress | None = None,
) -> Descent:
    """Minimize an objective over the symmetry orbit of a model: find other parameters of the same function.

    objective: `RoundingError`, `Sparsity`, or any differentiable function of all named parameters (a dict) that returns
    a number. With batches it is a loss(model, batch), whose mean over batches is minimized.
    inputs: as for `find_symmetries`, which finds the symmetries unless they are given.
    held_out: more inputs, on which the function is verified too.

    Adam starts from the identity, with a learning rate that decreases to 0, and takes at most `steps` steps. It ends
    when 20 steps lower the objective by less than `tolerance`, relative. condition: a bound on the condition number of
    every factor of the group element. The descent computes in float64 for models in float64, else in float32; the group
    element is applied in float64. progress(what, done, total) is called after every step.

    >>> model = torch.nn.Sequential(torch.nn.Linear(5, 2), torch.nn.Linear(2, 4)).eval()
    >>> x = torch.randn(3, 5)
    >>> found = descend_orbit(model, Sparsity(), x)
    >>> found.after < found.before, torch.allclose(found.model(x), model(x), atol=1e-5)
    (True, True)

    Raises ValueError if the model is in train mode, because its outputs cannot be verified, or has no symmetry by
    scales, matrices or rotations. Raises ValueError if the objective is not a finite number or not differentiable in
    the parameters that these change, or if the function changes on any of the inputs.
    """
    check_model(model)
    check_eval(model)
    if isinstance(objective, type) or not (callable(objective) or isinstance(objective, WeightObjective)):
        given = f"the class {objective.__name__}" if isinstance(objective, type) else repr(objective)
        raise TypeError(f"objective must be RoundingError(bits=4), Sparsity() or a function. Found {given}")
    if batches is not None:
        if isinstance(objective, WeightObjective):
            raise ValueError(f"batches must come with a loss(model, batch). Found {objective!r}, which takes none.")
        check_loss(objective)
    elif not isinstance(objective, WeightObjective):
        with suppress(ValueError):  # some functions have no signature
            try:
                inspect.signature(objective).bind({})
            except TypeError as error:
                raise TypeError(
                    f"objective must be a function of the parameters, or come with batches as loss(model, batch). "
                    f"Found {getattr(objective, '__name__', objective)} without batches ({error}): give batches="
                ) from error
    tried = tried_on(inputs, held_out)
    check_integer("steps", steps, 1)
    check_number("learning_rate", learning_rate, positive=True)
    check_number("tolerance", tolerance)
    own = parameters(model)
    check_weights(own, own)
    symmetries = verified(model, inputs, symmetries, evaluate)
    moves = objective.moves if isinstance(objective, WeightObjective) else None
    group = Group(symmetries, own, condition=condition, fold=moves is not None, moves=moves)
    if not group.symmetries:
        raise ValueError(
            f"{type(model).__name__} must have a symmetry along which the objective can descend: a pair, scale or "
            "rotation. Found no continuous symmetry of these kinds that changes it."
        )
    dtype = precision(own)
    if isinstance(objective, WeightObjective):
        terms = [objective.on(model, group)]
    else:
        terms = [objective] if batches is None else mean_loss(objective, model, batches, dtype)
    values = Terms(terms, own, dtype)
    first, _ = values(own)
    found, path, least = minimize(group, values, steps, learning_rate, tolerance, progress)
    moved = moved_by(model, found if least < first else GroupElement(), tried, evaluate)
    last, _ = values(moved.params)
    return Descent(**vars(moved), path=(first, *path, last))


def tried_on(inputs: Any, held_out: Iterable[Any]) -> list[Any]:
    """Return all inputs on which the function is verified: the inputs and those held out."""
    check_list("held_out", held_out)
    return [inputs, *held_out]


def precision(params: Params) -> torch.dtype:
    """Return float64 if any parameter is in it, else float32."""
    return torch.float64 if any(w.dtype == torch.float64 for w in params.values()) else torch.float32


def verified(model: nn.Module, inputs: Any, symmetries: Symmetries | None, evaluate: Evaluate | None) -> Symmetries:
    """Return the given symmetries, or find them."""
    if symmetries is not None:
        check_symmetries(symmetries)
        check_weights(dict(model.named_parameters()), symmetries.moved)
        return symmetries
    return find_symmetries(model, inputs, evaluate=evaluate)


def moved_by(model: Model, element: GroupElement, batches: Sequence[Any], evaluate: Evaluate | None) -> Moved:
    """Return the model transformed by a group element; ValueError if its function changes on one of the batches."""
    own, names = state(model), dict(model.named_parameters())
    with torch.no_grad():
        wide = element.apply(own, torch.float64)
        params = {name: w.to(own[name].dtype) for name, w in wide.items()}
        change, stored = 0.0, 0.0
        for number, batch in enumerate(batches, 1):
            outputs = ModelOutputs(model, [batch], evaluate)
            try:
                outputs.own()
            except RUN_ERRORS as error:
                raise ValueError(f"on inputs number {number}: {sentence(error)}") from error
            noise, here = outputs.noise(), outputs.change({name: wide[name].clone() for name in element.names})
            if not here <= HOLDS * noise * max(1.0, element.condition):
                raise ValueError(
                    f"the function must stay on inputs number {number}. Found that it changes by {here:.1e}, where "
                    f"rounding explains {noise:.1e}: verify_symmetries on these inputs names the cause."
                )
            change = max(change, here)
            stored = max(stored, outputs.change({name: params[name].double() for name in element.names}))
    there = placed(model, {name: params[name] for name in element.names})
    return Moved(there, {name: params[name] for name in names}, element, change, stored)


def mean_loss(
    loss: Callable[..., Tensor],
    model: nn.Module,
    batches: Iterable[Any],
    dtype: torch.dtype,
    places: Sequence[Callable[[Params], Params]] = (dict,),
) -> list[Objective]:
    """Return the terms of the mean of a loss(model, batch) over batches and over `places`, maps of the parameters."""
    given = listed(batches)

    def cast(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    def term(place: Callable[[Params], Params], batch: Any, params: Params) -> Tensor:
        with TrueGradients():
            return loss(replica(model, place(params), cast), private_batch(batch, cast)) / (len(places) * len(given))

    return [partial(term, place, batch) for place in places for batch in given]


class Terms:
    """Evaluate a sum of functions of parameters and its gradient in some of them; only one term's graph is held."""

    def __init__(self, terms: Sequence[Objective], own: Params, dtype: torch.dtype) -> None:
        self.terms, self.dtype = terms, dtype
        self.own = {name: w.to(dtype) for name, w in own.items()}

    @torch.enable_grad()
    def __call__(self, params: Params, names: Sequence[str] = ()) -> tuple[float, list[Tensor]]:
        """Return the value at these parameters and its gradient in the parameters of these names."""
        leaves = self.own | {name: w.detach().to(self.dtype) for name, w in params.items()}
        chosen = [leaves[name].requires_grad_() for name in names]
        total, grads, depends = 0.0, [torch.zeros_like(w) for w in chosen], not names
        for term in self.terms:
            value: Any = term(dict(leaves))
            if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
                found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"the objective must return one floating point number as a tensor. Found {found}.")
            total += float(value.detach())
            if names and value.requires_grad:
                slopes = torch.autograd.grad(value, chosen, allow_unused=True)
                depends = depends or any(new is not None for new in slopes)
                grads = [g if new is None else g + new for g, new in zip(grads, slopes, strict=True)]
        if not depends:
            raise ValueError(
                "the objective must be differentiable in the parameters that symmetries change. Found that it depends "
                f"on none: use {', '.join(names[:2])} as given, by torch operations, without detach or no_grad."
            )
        return total, grads


def minimize(
    group: Group, values: Terms, steps: int, learning_rate: float, tolerance: float, progress: Progress | None
) -> tuple[GroupElement, list[float], float]:
    """Return the group element of the least value met, in float64, all values in order, and the least value.

    Adam steps by exp(X) of each symmetry. It makes X from the charges of the gradient, the slopes along the generators.
    """
    if not group.symmetries:  # the identity alone
        return group.start, [], math.inf
    walk, path, least = Walk(group, values.own), list[float](), math.inf
    best = walk.element
    first = second = [torch.zeros((), dtype=torch.float64)] * len(group.symmetries)
    names, eps = names_of(group.symmetries), 0.0
    for step in range(steps):
        value, grads = values(walk.params, names)
        if value < least:
            best, least = walk.element, value
        if not math.isfinite(value):
            if not path:
                raise ValueError(f"the objective must be a finite number. Found {value} at the model's own parameters.")
            break
        charges = walk.charges(dict(zip(names, grads, strict=True)))
        if not step:  # eps is small compared with the slopes, in any unit of the objective
            squares = torch.cat([C.square().flatten() for C in charges])
            eps = max(1e-8 * min(1.0, float(squares.mean().sqrt())), FLAT * abs(value)) or 1e-8
        first = [m.lerp(C, 0.1) for m, C in zip(first, charges, strict=True)]
        second = [v.lerp(C.square(), 0.001) for v, C in zip(second, charges, strict=True)]
        a, b, rate = 1 - 0.9 ** (step + 1), 1 - 0.999 ** (step + 1), learning_rate * (1 - step / steps)
        walk.go([-rate * m / a / ((v / b).sqrt() + eps) for m, v in zip(first, second, strict=True)])
        path.append(value)
        if progress is not None:
            progress("descent", step + 1, steps)
        if step >= PATIENCE and min(path[:-PATIENCE]) - min(path) <= tolerance * abs(min(path)):
            break
    return best, path, least
