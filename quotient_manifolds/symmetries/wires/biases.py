"""Find biases of pairs that move by themselves: of keys, and of values into the output's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.pair import BOTTLENECK, QUERY_KEY, VALUE_OUTPUT, SymmetricPair
from quotient_manifolds.symmetries.strided_view import StridedView
from quotient_manifolds.symmetries.translations import Translation, key_bias, value_output_bias
from quotient_manifolds.symmetries.wires.channels import Part
from quotient_manifolds.symmetries.wires.constants import Constants
from quotient_manifolds.symmetries.wires.linear_algebra import Array
from quotient_manifolds.symmetries.wires.shifts import Shifts
from quotient_manifolds.symmetries.wires.walk import Linear, Vector, Walk

Views = tuple[list[tuple[Part, StridedView]], list[tuple[Part, StridedView]]]
CLOSE = 1e-7


def translations_of(constants: Constants, pairs: Sequence[tuple[SymmetricPair, Views]]) -> list[Translation]:
    """Return the biases that are rows of pairs and that may move: alone, or with one bias that makes up for it."""
    walk = constants.walk
    added = _added(walk)
    asked = [each for pair, views in pairs if pair.acts == "GL(h)" for each in _candidates(walk, pair, views, added)]
    count = Counter[str]()
    for number, each in enumerate(asked):
        count[each.name] += 1
        if count[each.name] > 1:
            asked[number] = replace(each, name=f"{each.name} {count[each.name]}")
    if not asked:
        return []
    shifts = constants.at(walk.parameters).shifts(walk)
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
    biases = {n: vector for vector in walk.vectors if not vector.gain for n in vector.outs[0].tolist()}
    answers = {int(linear.outs[0][0]) for linear in walk.linears}
    found: dict[int, Vector] = {}
    for flow in walk.flows:
        if flow.kind == "sum":
            for names in flow.terms[0][np.isin(flow.terms[0], list(answers)).any(1)].tolist():
                for n in answers.intersection(names):
                    found.update((n, biases[other]) for other in names if other in biases)
    return found


def _output_bias(walk: Walk, reader: Linear | Vector, added: dict[int, Vector]) -> StridedView | None:
    """Return the view (1, d, 1) of what is added to the answer of the second map of a pair."""
    bias = added.get(int(reader.outs[0][0]))
    if bias is None or len(bias.outs) > 1 or len(bias.outs[0]) != len(reader.outs[0]):
        return None
    numbers, name = bias.entries.index().reshape(-1), bias.entries.name
    return StridedView.of(name, walk.shapes[name].numel(), numbers[:1].view(1, 1, 1), numbers - numbers[0])


def _holds(shifts: Shifts, several: Sequence[Translation]) -> bool:
    """Say whether nothing but the biases of translations has to move when these do, by any numbers.

    The sizes are drawn: what is not allowed for all of them is not allowed for these.
    """
    generator = torch.Generator().manual_seed(0)
    walk = shifts.walk
    before = {name: walk.parameters[name].double().cpu() for name in {name for each in several for name in each.moved}}
    rest = {name: walk.parameters[name].cpu() for each in several for name in each.names if name not in before}
    after = {**rest, **{name: w.clone() for name, w in before.items()}}
    biases = {name: torch.zeros_like(w) for name, w in before.items()}
    for each in several:
        c = torch.randn(each.bias.shape, generator=generator, dtype=torch.float64)
        each.shift(after, c)
        each.bias.write(biases, c)
    solution = _solution(shifts, biases, {name: after[name] - w for name, w in before.items()})
    if not shifts.system.obeyed(np.zeros(len(solution), np.int64), solution, 1)[0]:
        return False
    size = shifts.evaluate(solution[:, None])[:, 0]
    if any(np.abs(answer).max() > CLOSE for _, answer in shifts.answers(size)):
        return False
    tangent = {name: torch.zeros(walk.shapes[name], dtype=torch.float64) for name in biases}
    for entries, change in shifts.biases(size):
        if entries.name in tangent:
            entries.add_to(tangent, change)
        elif float(change.abs().max()) > CLOSE:
            return False
    return all(torch.allclose(tangent[name], after[name] - w, rtol=CLOSE, atol=CLOSE) for name, w in before.items())


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
        nodes = vector.outs
        size = np.where(shifts.claimed[nodes] > 0, one * shifts.factor[nodes], all_of_it)
        unknown = shifts.total(nodes)
        found[unknown[unknown > 0]] = size[unknown > 0]
    return found
