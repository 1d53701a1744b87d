"""Find the symmetries of a model: a walk proposes, charges at generic points decide, and a finite move has to agree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries.charges.answers import Answers
from quotient_manifolds.symmetries.charges.frame import Frame
from quotient_manifolds.symmetries.charges.kernel import Kernel, Point, Unknowns, solve
from quotient_manifolds.symmetries.charges.points import Points
from quotient_manifolds.symmetries.charges.recognition import Recognition
from quotient_manifolds.symmetries.charges.walk import Walk
from quotient_manifolds.symmetries.checks import check_eval, check_model
from quotient_manifolds.symmetries.groups import Gauge, Params, Symmetry, Torus, Translation
from quotient_manifolds.symmetries.outputs import Evaluate
from quotient_manifolds.symmetries.trace.record import movable

CHANGE = 1e-9
"""Relative: outputs that a finite element changes by more are not invariant."""
_LOSSES = 16
_ROUNDS = 3
_STEP = 0.3


@dataclass(frozen=True, eq=False)
class Found:
    """Hold what leaves the outputs of a model as they are, on all inputs that were tried.

    symmetries: `act` of each leaves all outputs as they are; of translations at the model's own weights. refused: what
    charges or a finite move spoke against, with numbers. held: what of the inputs could not be varied. largest: the
    largest charge over the sum of its absolute summands among what is kept; smallest: the smallest pivot among what
    is refused. change: the largest relative change of an output under one joint random element of everything.
    """

    symmetries: tuple[Symmetry, ...]
    refused: tuple[str, ...]
    held: tuple[str, ...]
    largest: float
    smallest: float
    change: float
    points: int


def find(model: nn.Module, batch: Any, evaluate: Evaluate | None = None, *, seed: int = 0) -> Found:
    """Return the symmetries of evaluate(model, batch), by default of the model's outputs, and the gap in the evidence.

    A Lie group leaves all outputs as they are if and only if the charges of its generators vanish at all weights and
    inputs; they are analytic between kinks, so that what vanishes at some random points vanishes everywhere, with
    probability one. Points differ in weights, inputs, numbers of examples, lengths and sizes of pictures, as far as the
    model takes them. One random finite element of everything that is found is tried last, on inputs of other shapes;
    inputs on which it fails become points themselves.

    Raises ModelError for a model that raises, is random or writes to its weights, and ValueError in train mode.
    """
    check_model(model)
    check_eval(model)
    return _Finder(model, batch, evaluate, seed).found()


class _Finder:
    """Hold what is made once, and what finite moves have taught so far."""

    def __init__(self, model: nn.Module, batch: Any, evaluate: Evaluate | None, seed: int) -> None:
        self.points = Points(model, batch, evaluate, seed=seed)
        self.generator = torch.Generator().manual_seed(seed + 1)
        first = self.points.recordings[0]
        self.walk = Walk(first)
        self.frame = Frame(self.walk)
        self.unknowns = Unknowns(self.frame)
        self.names = [name for name, w in first.parameters.items() if movable(w)]
        self.own = {name: w.detach().double() for name, w in first.parameters.items() if movable(w)}
        self.answers: Answers = self.points.answers()
        self.failed: list[int] = []
        self.count = 0

    def point(self) -> Point:
        """Return a fresh generic point: after a failed move every other one on inputs on which it failed."""
        self.count += 1
        which = [self.failed[self.count // 2 % len(self.failed)]] if self.failed and self.count % 2 else None
        at, samples = self.points.samples(_LOSSES, vectors=self.names, which=which)
        entries = self.frame.entries
        theta = torch.cat([at.weights[name].reshape(-1).double() for name in entries.shapes])
        gradients = torch.zeros(len(samples), entries.size, dtype=torch.float64)
        for name in self.names:
            start = entries.start[name]
            for row, sample in zip(gradients, samples, strict=True):
                row[start : start + at.weights[name].numel()] = sample.gradients[name].reshape(-1)
        return Point(theta, entries.read(at.weights.__getitem__), gradients)

    def found(self) -> Found:
        """Solve, move, and solve again with what the move has taught."""
        refused: list[str] = []
        for _ in range(_ROUNDS):
            kernel = solve(self.unknowns, self.point)
            read = Recognition(kernel, self.point(), self.generator)
            symmetries = read.symmetries
            change, index = self.change(symmetries)
            if change < CHANGE:
                return self._found(kernel, symmetries, [*refused, *read.refused], change)
            refused = [f"a finite move changed outputs by {change:.1e} on inputs that then became points"]
            if not self._learned(index):
                break
        kept = list(self._bisected(list(_atoms(symmetries)), refused))
        change, _ = self.change(kept)
        return self._found(kernel, kept, [*refused, *read.refused], change)

    def _found(self, kernel: Kernel, symmetries: Sequence[Symmetry], refused: Sequence[str], change: float) -> Found:
        signed = tuple(self._with_reflections(symmetries))
        return Found(
            signed,
            tuple(dict.fromkeys(refused)),
            self.points.held,
            kernel.largest,
            kernel.smallest,
            change,
            kernel.points,
        )

    def _learned(self, index: int) -> bool:
        """Make a batch a source of points. Return whether that is possible."""
        batch = self.answers.batches[index]
        try:
            self.failed.append(self.points.add(batch))
        except (ValueError, RuntimeError):
            return False
        return True

    # Finite moves

    def moved(self, symmetries: Iterable[Symmetry]) -> Params:
        """Return the model's weights, in float64, acted on by a random element of each, one after another."""
        params: Params = dict(self.own)
        for symmetry in symmetries:
            params = symmetry.act(params, self._element(symmetry, params))
        return params

    def _element(self, symmetry: Symmetry, params: Mapping[str, Tensor]) -> Tensor:
        if not isinstance(symmetry, Translation):
            return symmetry.element(self.generator, _STEP)
        size = torch.cat([part.rows.entries(params).reshape(-1) for part in symmetry.parts]).square().mean().sqrt()
        return symmetry.element(self.generator, _STEP * float(size.clamp(min=1e-3)))

    def change(self, symmetries: Sequence[Symmetry]) -> tuple[float, int]:
        """Return the largest relative change of an output under one random element of all, and on which batch."""
        if not symmetries:
            return 0.0, 0
        return self.answers.change(self.own, self.moved(symmetries))

    def _bisected(self, atoms: list[Symmetry], refused: list[str]) -> Iterator[Symmetry]:
        """Yield those of which a finite element changes nothing; name the others."""
        if not atoms:
            return
        change, _ = self.change(atoms)
        if change < CHANGE:
            yield from atoms
        elif len(atoms) == 1:
            refused.append(f"{_named(atoms[0])} changed outputs by {change:.1e}")
        else:
            half = len(atoms) // 2
            yield from self._bisected(atoms[:half], refused)
            yield from self._bisected(atoms[half:], refused)

    # Components

    def _with_reflections(self, symmetries: Sequence[Symmetry]) -> Iterator[Symmetry]:
        """Yield the symmetries, gauges with those elements outside the identity component that are symmetries."""
        gauges = {k: each for k, each in enumerate(symmetries) if isinstance(each, Gauge)}
        flips = [(k, bit) for k, gauge in gauges.items() for bit in range(gauge.algebra.components)]
        good = self._flips(gauges, flips)
        for k, symmetry in enumerate(symmetries):
            if isinstance(symmetry, Gauge) and bool((bits := _bits(symmetry, k, good)).any()):
                yield replace(symmetry, reflections=bits)
            else:
                yield symmetry

    def _flips(self, gauges: Mapping[int, Gauge], flips: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return which reflections change nothing, by bisection."""
        if not flips:
            return []
        params: Params = dict(self.own)
        for k in dict.fromkeys(k for k, _ in flips):
            params = gauges[k].act(params, gauges[k].algebra.reflect(_bits(gauges[k], k, flips)))
        if self.answers.change(self.own, params)[0] < CHANGE:
            return flips
        if len(flips) == 1:
            return []
        half = len(flips) // 2
        return self._flips(gauges, flips[:half]) + self._flips(gauges, flips[half:])


def _bits(gauge: Gauge, k: int, flips: Iterable[tuple[int, int]]) -> Tensor:
    """Return which elements outside the identity component are meant by pairs of a gauge's number and theirs."""
    own = {bit for number, bit in flips if number == k}
    return torch.tensor([bit in own for bit in range(gauge.algebra.components)], dtype=torch.bool)


def _atoms(symmetries: Iterable[Symmetry]) -> Iterator[Symmetry]:
    """Yield symmetries that stand or fall on their own: each log-scale of a torus apart."""
    for symmetry in symmetries:
        if not isinstance(symmetry, Torus):
            yield symmetry
            continue
        for k in range(symmetry.size):
            slices = []
            for each in symmetry.slices:
                keep = each.index[1] == k
                if bool(keep.any()):
                    index = torch.stack([each.index[0][keep], torch.zeros(int(keep.sum()), dtype=torch.long)])
                    slices.append(replace(each, index=index, powers=each.powers[keep]))
            yield Torus(tuple(slices), 1)


def _named(symmetry: Symmetry) -> str:
    kind = type(symmetry.algebra).__name__ if isinstance(symmetry, Gauge) else type(symmetry).__name__
    return f"{kind} of {', '.join(symmetry.names)}"
