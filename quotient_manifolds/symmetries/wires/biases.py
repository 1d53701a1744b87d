"""Find biases of pairs that move by themselves: of keys, and of values into the output's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.pair import BOTTLENECK, QUERY_KEY, VALUE_OUTPUT, SymmetricPair
from quotient_manifolds.symmetries.strided_view import StridedView
from quotient_manifolds.symmetries.translations import Translation, key_bias, value_output_bias
from quotient_manifolds.symmetries.wires.blocks import zeros
from quotient_manifolds.symmetries.wires.channels import Part
from quotient_manifolds.symmetries.wires.shifts import Shifts
from quotient_manifolds.symmetries.wires.unreached import Unreached
from quotient_manifolds.symmetries.wires.unseen import Unseen
from quotient_manifolds.symmetries.wires.values import Values
from quotient_manifolds.symmetries.wires.walk import Linear, Vector, Walk

Views = tuple[list[tuple[Part, StridedView]], list[tuple[Part, StridedView]]]
Array = np.ndarray
CLOSE = 1e-7


def translations_of(walk: Walk, pairs: Sequence[tuple[SymmetricPair, Views]]) -> list[Translation]:
    """Return the biases that are rows of pairs and that may move: alone, or with one bias that makes up for it."""
    added = _added(walk)
    asked = [each for pair, views in pairs if pair.acts == "GL(h)" for each in _candidates(walk, pair, views, added)]
    if not asked:
        return []
    values = Values(walk, walk.parameters)
    unreached = Unreached(walk, values)
    shifts = Shifts(walk, values, Unseen(walk, values, unreached), unreached, apart=False)
    return asked if _holds(shifts, asked) else [each for each in asked if _holds(shifts, [each])]


def _candidates(walk: Walk, pair: SymmetricPair, views: Views, added: dict[int, Vector]) -> Iterator[Translation]:
    for part, view in views[int(pair.kind == QUERY_KEY)]:
        if not isinstance(part.source, Vector) or part.length > 1:
            continue
        if pair.kind == QUERY_KEY:
            yield key_bias(pair, view)
        elif pair.kind in (VALUE_OUTPUT, BOTTLENECK) and len(views[1]) == 1 and view.rows == 1:
            output = _output_bias(walk, views[1][0][0].source, added)
            if output is not None:
                yield value_output_bias(pair, view, output)


def _added(walk: Walk) -> dict[int, Vector]:
    """Return the bias that is added to what a linear map answers, by the first node of the answer."""
    biases = {n: vector for vector in walk.vectors if not vector.gain for n in vector.outs[0]}
    answers = {linear.outs[0][0] for linear in walk.linears}
    found: dict[int, Vector] = {}
    for flow in walk.flows:
        for names in flow.terms[0].tolist() if flow.kind == "sum" else ():
            for n in answers.intersection(names):
                found.update((n, biases[other]) for other in names if other in biases)
    return found


def _output_bias(walk: Walk, reader: Linear | Vector, added: dict[int, Vector]) -> StridedView | None:
    """Return the view (1, d, 1) of what is added to the answer of the second map of a pair."""
    bias = added.get(reader.outs[0][0])
    if bias is None or len(bias.outs) > 1 or len(bias.outs[0]) != len(reader.outs[0]):
        return None
    numbers, name = bias.entries.index().reshape(-1), bias.entries.name
    return StridedView.of(name, walk.parameters[name].numel(), numbers[:1].view(1, 1, 1), numbers - numbers[0])


def _holds(shifts: Shifts, several: Sequence[Translation]) -> bool:
    """Say whether nothing but the biases of translations has to move when these do, by any numbers.

    The sizes are drawn: what is not allowed for all of them is not allowed for these.
    """
    generator = torch.Generator().manual_seed(0)
    walk = shifts.walk
    before = {name: w.double().clone() for name, w in walk.parameters.items() if any(name in t.moved for t in several)}
    rest = {name: walk.parameters[name] for each in several for name in each.names if name not in before}
    after = {**rest, **{name: w.clone() for name, w in before.items()}}
    biases = {name: torch.zeros_like(w) for name, w in before.items()}
    for each in several:
        c = torch.randn(each.bias.shape, generator=generator, dtype=torch.float64)
        each.shift(after, c)
        each.bias.write(biases, c)
    solution = _solution(shifts, biases, {name: after[name] - w for name, w in before.items()})
    if not shifts.system.obeyed(np.zeros(len(solution), np.int64), solution, 1)[0]:
        return False
    tangent = zeros(walk)
    shifts.add_to(tangent, shifts.evaluate(solution[:, None])[:, 0])
    for name, change in tangent.items():
        expected = after[name] - before[name] if name in before else torch.zeros((), dtype=torch.float64)
        if not torch.allclose(change, expected.expand_as(change), rtol=CLOSE, atol=CLOSE):
            return False
    return True


def _solution(shifts: Shifts, biases: dict[str, Tensor], changes: dict[str, Tensor]) -> Array:
    """Return the unknowns, by name, where biases change and all that can make up for it does, but no weight."""
    found = np.zeros(shifts.count + 1)
    for vector in shifts.walk.vectors:
        if vector.gain or vector.entries.name not in biases:
            continue
        one, all_of_it = (
            (vector.entries.scale * each[vector.entries.name].reshape(-1)[vector.entries.index()]).numpy()
            for each in (biases, changes)
        )
        nodes = np.array(vector.outs)
        size = np.where(shifts.claimed[nodes] > 0, one * shifts.factor[nodes], all_of_it)
        unknown = shifts.total(nodes)
        found[unknown[unknown > 0]] = size[unknown > 0]
    return found
