"""Find the symmetries of a model: a walk proposes, charges at generic points decide, and a finite move has to agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from quotient_manifolds.symmetries.charges.finder import Found
from quotient_manifolds.symmetries.charges.narrow import Narrow
from quotient_manifolds.symmetries.charges.permutations import CHANGE, permutations
from quotient_manifolds.symmetries.charges.points import Points
from quotient_manifolds.symmetries.charges.walk import Walk
from quotient_manifolds.symmetries.charges.wide import Wide
from quotient_manifolds.symmetries.checks import check_eval, check_inputs, check_loaded, check_model, check_weights
from quotient_manifolds.symmetries.groups import Permutation
from quotient_manifolds.symmetries.outputs import Evaluate
from quotient_manifolds.symmetries.trace.record import movable

SMALL = 2_000
"""Parameters, up to which all unknowns are solved for at once."""


def find(
    model: nn.Module, batch: Any, evaluate: Evaluate | None = None, *, others: Sequence[Any] = (), seed: int = 0
) -> Found:
    """Return the symmetries of evaluate(model, batch), by default of the model's outputs, and the gap in the evidence.

    A Lie group leaves all outputs as they are if and only if the charges of its generators vanish at all weights and
    inputs; they are analytic between kinks, so that what vanishes at some random points vanishes everywhere, with
    probability one. Points differ in weights, inputs, numbers of examples, lengths and sizes of pictures, as far as the
    model takes them. A random finite element of everything that is found is tried last, on inputs of other shapes;
    inputs on which it fails become points themselves, as `others` are from the start.

    The groups that are returned get names and become `Symmetries` in `discovery.py`: the type that geometries take.

    Raises ModelError for a model that raises, is random or writes to its weights, and ValueError in train mode.
    """
    points = points_of(model, batch, evaluate, seed)
    for other in others:
        points.give(other)
    size = sum(w.numel() for w in points.recordings[0].parameters.values() if movable(w))
    if not size:
        return Found((), ("No parameter is of floating point",), points.held, 0.0, float("inf"), 0.0)
    finder = (Narrow if size <= SMALL else Wide)(points, torch.Generator().manual_seed(seed + 1))
    return finder.found()


def find_permutations(
    model: nn.Module, batch: Any, evaluate: Evaluate | None = None, *, seed: int = 0
) -> tuple[Permutation, ...]:
    """Return the permutations of units (neurons, heads, experts) that leave evaluate(model, batch) as it is.

    They are proposed by what each unit is connected to, and kept if one exchange of all units changes no output, at
    other weights and on inputs of other shapes. Raises as `find` does.
    """
    return permutations_at(points_of(model, batch, evaluate, seed), seed)


def permutations_at(points: Points, seed: int = 0) -> tuple[Permutation, ...]:
    """Return the permutations that hold on the recordings and answers of points."""
    answers = points.answers()
    walk = Walk(points.recordings[0], keep=True)
    draw = torch.Generator().manual_seed(seed + 1)
    return permutations(walk, lambda before, after: answers.change(before, after, enough=CHANGE)[0], draw)


def points_of(model: nn.Module, batch: Any, evaluate: Evaluate | None, seed: int) -> Points:
    """Return points of a model that is in order (see `find`)."""
    check_model(model)
    check_loaded(model)
    check_eval(model)
    check_inputs(batch)
    params = dict(model.named_parameters())
    check_weights(params, (name for name, w in params.items() if is_lazy(w) or movable(w)))
    return Points(model, batch, evaluate, seed=seed)
