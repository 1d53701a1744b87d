"""Find the symmetries of a network with few parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.finder import Finder
from quotient_manifolds.symmetries.charges.functions import charts, read_charted
from quotient_manifolds.symmetries.charges.kernel import Point, Unknowns, null_space, solve
from quotient_manifolds.symmetries.charges.points import Points
from quotient_manifolds.symmetries.charges.readings import Readings, is_of_means, read, sums
from quotient_manifolds.symmetries.charges.recognition import Recognition
from quotient_manifolds.symmetries.charges.samples import Undecided
from quotient_manifolds.symmetries.charges.unfoldings import Rest, read_rest, spanned, tangents
from quotient_manifolds.symmetries.groups import Params, Part, Rows, Torus, Translation
from quotient_manifolds.symmetries.outputs import RUN_ERRORS
from quotient_manifolds.symmetries.trace.record import Recording

FEW, FEW_MORE = 200, 500
"""Numbers of parameters up to which missing symmetries on no wire are solved for: as vector fields on the parameters
themselves (FEW), and on functions of them (FEW_MORE)."""
_LOSSES = 16
"""Random losses at a point; losses beyond the number of outputs add nothing."""
_STACKED, _INPUTS, _WEIGHTS = 32, 8, 4
"""Gradients in one run; most inputs that are run one after another; weights in one run if charges are cheap."""
_NEW = 1e-6
"""Components of unit vectors above this are new directions."""


class Narrow(Finder):
    """Find the symmetries of a small network from gradients of all parameters; wide wires are read off charges."""

    @property
    def recording(self) -> Recording:
        return self.points.recordings[0]

    def __init__(self, points: Points, generator: torch.Generator) -> None:
        super().__init__(points, generator)
        self.touched = torch.zeros(self.frame.entries.size, dtype=torch.bool)  # by some gradient
        # Whether words differ in a stack of inputs, tried in order: with a mask of labels, they must not.
        self._ways: tuple[bool, ...] = (True, False)
        self._drawn: list[tuple[Mapping[str, Tensor], Tensor]] = []
        """Weights and gradients of one run that `point` has yet to return."""

    @cached_property
    def unknowns(self) -> Unknowns:
        """Return the unknowns of all narrow components."""
        return Unknowns(self.frame)

    def everywhere(self) -> Readings:
        kernel = solve(self.unknowns, self.counted)
        known = Recognition(kernel, self.counted(), self.elsewhere, self.generator)
        wide = read(self.frame, self.unknowns.left, self.tokens, self.generator)
        groups, some = (*known.symmetries, *wide.symmetries), [*sums(self.frame, self.tokens)]
        shifts = self.shifts()  # uses the points that `tokens` drew
        symmetries = [each for each in groups if not is_of_means(each)]  # shifts express them with closed orbits
        means = [each for each in (*groups, *some) if is_of_means(each)]
        able, params = [each for each in symmetries if not self._unable(each)], self._ordered
        # The log-scale of an unused bias has the same tangent here, but never passes 0, so its shift is kept.
        every = spanned(tangents([each for each in able if not isinstance(each, Torus)], params))
        for each in (*shifts.symmetries, *means, *self._erased()):
            T = tangents([] if self._unable(each) else [each], params)
            rest = T / T.norm(dim=0).clamp(1e-300)
            for _ in range(2):
                rest = rest - every @ (every.T @ rest)
            rest = rest[:, rest.norm(dim=0) > _NEW]
            if rest.shape[1]:
                symmetries, every = [*symmetries, each], torch.cat([every, spanned(rest)], 1)
        return Readings(
            tuple(symmetries),
            (*known.refused, *wide.refused, *shifts.refused),
            max(kernel.largest, wide.largest, shifts.largest),
            min(kernel.smallest, wide.smallest, shifts.smallest),
        )

    def _erased(self) -> Iterator[Translation]:
        """Yield translations of entries that are multiplied by 0, as in pruned weights, and have no gradient."""
        entries = self.frame.entries
        free = torch.zeros_like(self.touched).index_fill_(0, entries.erased, True) & ~self.touched
        for name, flags in self._split(free).items():
            if bool(flags.any()):
                rows = Rows.at(name, tuple(flags.shape), torch.nonzero(flags.reshape(-1)))
                yield Translation((Part(rows),), "unread")

    def completed(self, read: Readings) -> Readings:
        size, shapes = self.frame.entries.size, self.frame.entries.shapes
        of_functions = [*charts(self.walk, self._ordered)] if size <= FEW_MORE else []
        if (size > FEW and not of_functions) or len(self._ordered) < len(shapes):
            return read
        weights = self.points.weights()
        theta = torch.cat([weights[name].double().reshape(-1) for name in shapes])
        known = tangents(read.symmetries, self._split(theta))
        kernel, idle = self._kernel(theta, spanned(known).shape[1])
        rest = Rest()
        for chart in of_functions if kernel.shape[1] > spanned(known).shape[1] else ():
            try:
                more = read_charted(chart, shapes, self.point, theta, kernel, known, self.generator)
            except Undecided as error:
                read = replace(read, refused=(*read.refused, str(error)))
                continue
            rest, known = rest.and_(more), torch.cat([known, tangents(more.symmetries, self._split(theta))], 1)
        if size <= FEW and kernel.shape[1] > spanned(known).shape[1]:
            more = read_rest(shapes, self.point, theta, kernel, known, self.generator)
            rest, known = rest.and_(more), torch.cat([known, tangents(more.symmetries, self._split(theta))], 1)
        held = tuple(name for name, flags in self._split(idle).items() if bool(flags.any()) and not bool(flags.all()))
        kept = tuple(each for each in rest.symmetries if not {*each.names} & {*held})
        if len(kept) < len(rest.symmetries):  # other lengths may exercise the other entries, in another way
            why = f"fields that move {', '.join(held)}: some of its entries have no gradient here"
            read = replace(read, refused=(*read.refused, why))
        return replace(rest, symmetries=kept).beside(read, max(0, kernel.shape[1] - spanned(known).shape[1]))

    def _kernel(self, theta: Tensor, known: int) -> tuple[Tensor, Tensor]:
        """Return the directions (columns) orthogonal to all gradients at theta, and which entries have no gradient.

        Gradients are drawn until the number of directions settles, or falls to `known`. Entries that have no gradient
        here, but have one at other points, are held: their units are inactive.
        """
        size, before, calm = len(theta), -1, 0
        G = torch.zeros(0, size, dtype=torch.float64)
        while True:
            enough = len(G) + size + _STACKED
            while len(G) < enough:
                G = torch.cat([G, *(rows for _, rows in self._gradients(self._split(theta)))])
            G = G / G.norm(dim=1, keepdim=True).clamp(min=1e-300)
            idle = (G == 0).all(0) & self.touched
            kernel = null_space(torch.cat([G, torch.eye(size, dtype=torch.float64)[idle]]))[0]
            calm = calm + 1 if kernel.shape[1] == before else 0
            if kernel.shape[1] <= known or calm == 2:
                return kernel, (G == 0).all(0)
            before = kernel.shape[1]

    def _split(self, theta: Tensor) -> Params:
        """Split a vector of all entries, (P,), into parameters by name."""
        shapes = self.frame.entries.shapes
        parts = zip(shapes.items(), theta.split([shape.numel() for shape in shapes.values()]), strict=True)
        return {name: part.view(shape) for (name, shape), part in parts}

    @property
    def _ordered(self) -> Params:
        """Return the model's weights in the order of theta."""
        return {name: self.own[name].cpu() for name in self.frame.entries.shapes if name in self.own}

    def point(self) -> Point:
        """Return a fresh generic point."""
        self._drawn = self._drawn or self._gradients(None, _WEIGHTS)
        return self._point(*self._drawn.pop())

    def counted(self) -> Point:
        """Return a fresh generic point with constants included in biases."""
        ((weights, gradients),) = self._gradients(None)
        every, constants = self.frame.entries.start, self.frame.constants
        parts = gradients.split([shape.numel() for shape in self.frame.entries.shapes.values()], 1)
        pulled = constants.pulled(weights, dict(zip(every, parts, strict=True)))
        return self._point(constants.included(weights), torch.cat([pulled[name] for name in every], 1))

    def elsewhere(self) -> Point:
        """Return other weights, with constants included in biases, and no gradients."""
        none = torch.zeros(0, self.frame.entries.size, dtype=torch.float64)
        return self._point(self.frame.constants.included(self.points.weights()), none)

    def _point(self, weights: Mapping[str, Tensor], gradients: Tensor) -> Point:
        self.touched = self.touched | (gradients != 0).any(0)
        entries = self.frame.entries
        theta = torch.cat([weights[name].reshape(-1).double() for name in entries.shapes])
        return Point(theta, entries.read(weights.__getitem__), gradients)

    def _gradients(
        self, weights: Mapping[str, Tensor] | None, several: int = 1
    ) -> list[tuple[Mapping[str, Tensor], Tensor]]:
        """Return pairs of weights and gradients (losses, P) at fresh inputs.

        If no weights are given, there are up to `several` pairs, at generic ones. One run without taps computes all
        pairs if operations can be batched, unless the model has both taps and many outputs.
        """
        outputs = _outputs(self.recording)
        while self._ways and (outputs < _LOSSES or not self.points.tapped):
            some = [self.points.weights() for _ in range(several)] if weights is None else [weights]
            count = -(-_STACKED // (len(some) * min(outputs, _LOSSES)))
            try:
                found = self.points.stacked(count, _LOSSES, [*self.own], self.which(), some, words=self._ways[0])
            except RUN_ERRORS:
                self._ways = self._ways[1:]
                continue
            if made := [(own, G) for own, each in zip(some, found, strict=True) if len(G := self._rows(each))]:
                return made
            break
        rows: list[Tensor] = []
        for _ in range(_INPUTS):
            at, samples = self.points.samples(
                min(_LOSSES, 1 + outputs), vectors=list(self.own), which=self.which(), weights=weights
            )
            weights = at.weights
            drawn = [each.gradients for each in samples[: _outputs(at.recording)]]
            rows.append(self._rows({name: torch.stack([each[name] for each in drawn]) for name in self.own}))
            if sum(map(len, rows)) >= _LOSSES:
                break
        assert weights is not None
        return [(weights, torch.cat(rows))]

    def _rows(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return gradients (losses, *shape) by name as rows (losses, P) of all parameters, 0 for missing ones."""
        losses = len(next(iter(gradients.values())))
        rows = torch.zeros(losses, self.frame.entries.size, dtype=torch.float64)
        for name, each in gradients.items():
            start, count = self.frame.entries.start[name], each[0].numel() if losses else 0
            rows[:, start : start + count] = each.reshape(losses, count)
        return rows


def _outputs(recording: Recording) -> int:
    """Return how many numbers a model outputs, at least 1."""
    program = recording.program
    return max(1, sum(prod(program.layouts[number].shape) for number in program.outputs))
