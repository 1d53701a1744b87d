"""Find the symmetries of a model: a walk proposes, charges at generic points decide, and a finite move has to agree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from quotient_manifolds.messages import first_line
from quotient_manifolds.symmetries.charges.frame import Frame
from quotient_manifolds.symmetries.charges.kernel import Point, Unknowns, null_space, solve
from quotient_manifolds.symmetries.charges.permutations import permutations
from quotient_manifolds.symmetries.charges.points import Points
from quotient_manifolds.symmetries.charges.positions import vectors
from quotient_manifolds.symmetries.charges.readings import Readings, read
from quotient_manifolds.symmetries.charges.recognition import Recognition
from quotient_manifolds.symmetries.charges.samples import Sample, Undecided, Uses
from quotient_manifolds.symmetries.charges.stacks import Stack, Stacks, read_stacks
from quotient_manifolds.symmetries.charges.tokens import dealt, read_wide
from quotient_manifolds.symmetries.charges.unfoldings import Unfoldings, read_rest, spanned, tangents
from quotient_manifolds.symmetries.charges.walk import Walk
from quotient_manifolds.symmetries.checks import check_eval, check_inputs, check_loaded, check_model, check_weights
from quotient_manifolds.symmetries.groups import Gauge, Params, Permutation, Symmetry, Torus, Translation
from quotient_manifolds.symmetries.outputs import RUN_ERRORS, Evaluate
from quotient_manifolds.symmetries.trace.record import Recording, movable

CHANGE = 1e-9
"""Relative: outputs that a finite element changes by more are not invariant."""
SMALL = 2_000
"""Parameters, up to which all unknowns are solved for at once."""
FEW = 200
"""Parameters, up to which fields that no wire has are solved for, where something is missing."""
_LOSSES = 16
"""Random losses at a point, if there are as many outputs."""
_ROUNDS, _LESSONS = 3, 4
_STEP = 0.3
_ALONG = 1e-8
"""Of unit vectors: parts below are rounding."""


@dataclass(frozen=True, eq=False)
class Found:
    """Hold what leaves the outputs of a model as they are, on all inputs that were tried.

    symmetries: groups that do at all weights. stacks: translations that do at the model's own. refused: what charges or
    a finite move spoke against, with numbers. held: what of the inputs could not be varied. largest: the largest charge
    over the sum of its absolute summands among what is kept; smallest: the smallest pivot among what is refused.
    change: the largest relative change of an output under a joint random element.
    """

    symmetries: tuple[Symmetry, ...]
    stacks: tuple[Stack, ...]
    refused: tuple[str, ...]
    held: tuple[str, ...]
    largest: float
    smallest: float
    change: float

    @property
    def every(self) -> tuple[Symmetry, ...]:
        """Return all symmetries, translations first: they hold at the weights where they were found."""
        return (*(stack.translation for stack in self.stacks), *self.symmetries)

    @property
    def together(self) -> tuple[tuple[Symmetry, ...], ...]:
        """Return sets of symmetries that may act one after another (see `Stack`), which together are all."""
        return _together(self.symmetries, self.stacks)


def find(model: nn.Module, batch: Any, evaluate: Evaluate | None = None, *, seed: int = 0) -> Found:
    """Return the symmetries of evaluate(model, batch), by default of the model's outputs, and the gap in the evidence.

    A Lie group leaves all outputs as they are if and only if the charges of its generators vanish at all weights and
    inputs; they are analytic between kinks, so that what vanishes at some random points vanishes everywhere, with
    probability one. Points differ in weights, inputs, numbers of examples, lengths and sizes of pictures, as far as the
    model takes them. A random finite element of everything that is found is tried last, on inputs of other shapes;
    inputs on which it fails become points themselves.

    Raises ModelError for a model that raises, is random or writes to its weights, and ValueError in train mode.
    """
    points = _points(model, batch, evaluate, seed)
    size = sum(w.numel() for w in points.recordings[0].parameters.values() if movable(w))
    if not size:
        return Found((), (), ("No parameter is of floating point",), points.held, 0.0, float("inf"), 0.0)
    finder = (Narrow if size <= SMALL else Wide)(points, torch.Generator().manual_seed(seed + 1))
    return finder.found()


def find_permutations(
    model: nn.Module, batch: Any, evaluate: Evaluate | None = None, *, seed: int = 0
) -> tuple[Permutation, ...]:
    """Return the permutations of units (neurons, heads, experts) that leave evaluate(model, batch) as it is.

    They are proposed by what each unit is connected to, and kept if one exchange of all units changes no output, at
    other weights and on inputs of other shapes. Raises as `find` does.
    """
    points = _points(model, batch, evaluate, seed)
    answers = points.answers()
    walk = Walk(points.recordings[0], keep=True)
    draw = torch.Generator().manual_seed(seed + 1)
    return permutations(walk, lambda before, after: answers.change(before, after)[0], draw)


def _points(model: nn.Module, batch: Any, evaluate: Evaluate | None, seed: int) -> Points:
    check_model(model)
    check_loaded(model)
    check_eval(model)
    check_inputs(batch)
    params = dict(model.named_parameters())
    check_weights(params, (name for name, w in params.items() if is_lazy(w) or movable(w)))
    return Points(model, batch, evaluate, seed=seed)


class Finder(ABC):
    """Hold what is made once, and the inputs that finite moves have failed on so far."""

    def __init__(self, points: Points, generator: torch.Generator) -> None:
        self.points, self.generator = points, generator
        self.walk = Walk(self.recording)
        self.frame = Frame(self.walk)
        self.answers = points.answers()
        known, parameters = self.answers.own, self.recording.parameters
        self.own = {name: known.get(name, w.detach().double()) for name, w in parameters.items() if movable(w)}
        self.all_own = {**parameters, **self.own}
        self.failed: list[int] = []
        self.count = 0

    @property
    @abstractmethod
    def recording(self) -> Recording:
        """Return the recording that is walked through."""

    @abstractmethod
    def everywhere(self) -> Readings:
        """Return what holds at all weights."""

    @abstractmethod
    def here(self) -> Stacks:
        """Return what holds at the model's own weights."""

    def completed(self, read: Readings, stacks: Stacks) -> tuple[Readings, Stacks]:
        """Return both with what neither has found, where that can be looked for."""
        return read, stacks

    def which(self) -> list[int] | None:
        """Return where the next point is: after a failed move every other one is where it failed."""
        self.count += 1
        return [self.failed[self.count // 2 % len(self.failed)]] if self.failed and self.count % 2 else None

    def tokens(self, points: int, losses: int) -> Iterator[tuple[Mapping[str, Tensor], Sample]]:
        """Yield samples with token vectors at generic points."""
        for _ in range(points):
            at, found = self.points.samples(losses, walk=self.walk, vectors=vectors(self.frame))
            yield from ((at.weights, sample) for sample in found)

    def found(self) -> Found:
        """Solve, move, and solve again with what the move has taught."""
        refused: list[str] = []
        for _ in range(_ROUNDS):
            read, stacks = self._read()
            change, where = self.change(read.symmetries, stacks.found)
            kept: tuple[Sequence[Symmetry], Sequence[Stack]] = read.symmetries, stacks.found
            if change < CHANGE:
                break
            refused = [f"a finite move changed outputs by {change:.1e} on inputs that then became points"]
            if not [self._learned(index) for index in where[:_LESSONS]].count(True):
                break
        if not change < CHANGE:
            kept = self._rest(kept, refused)
            change, _ = self.change(*kept)
        signed = tuple(self._with_reflections(kept[0]))
        refused += [*read.refused, *stacks.refused]
        gap = max(read.largest, stacks.largest), min(read.smallest, stacks.smallest)
        return Found(signed, tuple(kept[1]), tuple(dict.fromkeys(refused)), self.points.held, *gap, change)

    def _read(self) -> tuple[Readings, Stacks]:
        """Return what charges say, nothing if they decide nothing; of symmetries those that act at the own weights."""
        try:
            read = self.everywhere()
        except Undecided as error:
            read = Readings((), (str(error),), 0.0, float("inf"))
        try:
            stacks = self.here()
        except Undecided as error:
            stacks = Stacks((), (str(error),), 0.0, float("inf"))
        failed = {k: why for k, each in enumerate(read.symmetries) if (why := self._unable(each))}
        acting = tuple(each for k, each in enumerate(read.symmetries) if k not in failed)
        read, stacks = (
            replace(read, symmetries=acting, refused=(*read.refused, *failed.values())),
            self.apart(acting, stacks),
        )
        try:
            return self.completed(read, stacks)
        except Undecided as error:
            return replace(read, refused=(*read.refused, str(error))), stacks

    def _unable(self, symmetry: Symmetry) -> str:
        """Return why a symmetry does not act at the model's own weights, or nothing."""
        try:
            for slot in symmetry.wire.slots if isinstance(symmetry, Gauge) else ():
                slot.units(self.own)
        except ValueError as error:
            return f"{_named(symmetry)}: {error}"
        return ""

    def _rest(
        self, kept: tuple[Sequence[Symmetry], Sequence[Stack]], refused: list[str]
    ) -> tuple[Sequence[Symmetry], Sequence[Stack]]:
        """Return those of which a finite element changes nothing; name the others."""
        groups = self._bisected(list(_atoms(kept[0])), (), refused)
        stacks = []
        for outputs in (False, True):
            some = [stack for stack in kept[1] if stack.outputs == outputs]
            good = self._bisected([stack.translation for stack in some], groups, refused)
            stacks += [stack for stack in some if any(stack.translation is each for each in good)]
        return groups, stacks

    def _learned(self, index: int) -> bool:
        """Make a batch a source of points. Return whether that is possible."""
        try:
            self.failed.append(self.points.add(self.answers.batches[index]))
        except (ValueError, RuntimeError):
            return False
        return True

    # Finite moves

    def _moved(self, symmetries: Iterable[Symmetry]) -> Params:
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

    def change(self, symmetries: Sequence[Symmetry], stacks: Sequence[Stack]) -> tuple[float, list[int]]:
        """Return the largest relative change of an output under joint random elements, and on which batches."""
        changes = [self._change(each) for each in _together(symmetries, stacks)]
        return max(changes, key=lambda each: each[0], default=(0.0, []))

    def _change(self, symmetries: Iterable[Symmetry]) -> tuple[float, list[int]]:
        return self.answers.change(self.own, self._moved(symmetries))

    def _bisected(self, atoms: Sequence[Symmetry], beside: Sequence[Symmetry], refused: list[str]) -> list[Symmetry]:
        """Return those of which a finite element, with one of all that are kept beside, changes nothing."""
        change = self._change((*atoms, *beside))[0] if atoms else 0.0
        if change < CHANGE:
            return [*atoms]
        if len(atoms) == 1:
            refused.append(f"{_named(atoms[0])} changed outputs by {change:.1e}")
            return []
        half = len(atoms) // 2
        first = self._bisected(atoms[:half], beside, refused)
        return first + self._bisected(atoms[half:], (*first, *beside), refused)

    # Components

    def apart(self, symmetries: Sequence[Symmetry], stacks: Stacks) -> Stacks:
        """Return the stacks without single directions along which a group moves: a scale is a ray, and no line."""
        return stacks

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


class Narrow(Finder):
    """Find the symmetries of a net of few parameters by gradients of all of them; wires that are wide are read."""

    @property
    def recording(self) -> Recording:
        return self.points.recordings[0]

    def __init__(self, points: Points, generator: torch.Generator) -> None:
        super().__init__(points, generator)
        self.touched = torch.zeros(self.frame.entries.size, dtype=torch.bool)  # by a gradient at some generic point
        outputs = (self.recording.values[number].numel() for number in self.recording.program.outputs)
        self.losses = min(_LOSSES, 1 + sum(outputs))
        self.theta = torch.cat([self.own[name].reshape(-1) for name in self.frame.entries.shapes])

    @cached_property
    def unknowns(self) -> Unknowns:
        """Return all unknowns of narrow components."""
        return Unknowns(self.frame)

    def everywhere(self) -> Readings:
        kernel = solve(self.unknowns, self.point)
        known = Recognition(kernel, self.point(), self.generator)
        wide = read(self.frame, self.unknowns.left, self.tokens, self.generator)
        return Readings(
            (*known.symmetries, *wide.symmetries),
            (*known.refused, *wide.refused),
            max(kernel.largest, wide.largest),
            min(kernel.smallest, wide.smallest),
        )

    def completed(self, read: Readings, stacks: Stacks) -> tuple[Readings, Stacks]:
        if len(self.theta) > FEW:
            return read, stacks
        known = tangents([*(stack.translation for stack in stacks.found), *read.symmetries], self._ordered)
        missing = self._missing(known)
        if not missing:
            return read, stacks
        rest = read_rest(Unfoldings(self.frame), self.point, self._flat, self.theta, missing, known, self.generator)
        return rest.beside(read, stacks)

    def _missing(self, known: Tensor) -> int:
        """Return in how many directions beyond these (P, k) no gradient points, but those of units never on here."""
        size, rank, before, calm = len(self.theta), spanned(known).shape[1], -1, 0
        G = torch.zeros(0, size, dtype=torch.float64)
        while True:
            G = torch.cat([G, *(self._flat(self.theta) for _ in range(2 + size // self.losses))])
            idle = (G == 0).all(0) & self.touched
            missing = null_space(torch.cat([G, torch.eye(size, dtype=torch.float64)[idle]]))[0].shape[1] - rank
            calm = calm + 1 if missing == before else 0
            if missing <= 0 or calm == 2:
                return max(0, missing)
            before = missing

    def _flat(self, theta: Tensor) -> Tensor:
        """Return gradients (losses, P) of length 1 at weights in a row."""
        shapes = self.frame.entries.shapes
        parts = zip(shapes.items(), theta.split([shape.numel() for shape in shapes.values()]), strict=True)
        G = self._gradients({name: w.view(shape) for (name, shape), w in parts}, generic=False)[1]
        return G / G.norm(dim=1, keepdim=True).clamp(min=1e-300)

    def here(self) -> Stacks:
        def at(weights: Mapping[str, Tensor]) -> Tensor:
            return self._gradients(weights, generic=False)[1]

        def elsewhere(weights: Mapping[str, Tensor]) -> Tensor:
            return torch.cat([self._gradients(None)[1], self.touched[None].double()])

        return read_stacks(self.frame, at, elsewhere, self.all_own, self.generator)

    def apart(self, symmetries: Sequence[Symmetry], stacks: Stacks) -> Stacks:
        known, found = spanned(tangents(symmetries, self._ordered)), []
        for stack in stacks.found if known.shape[1] else ():
            T = tangents([stack.translation], self._ordered)
            sizes = T.norm(dim=0)
            if stack.translation.shape[1:] != (1,) or bool((sizes <= _ALONG * sizes.max()).any()):
                found.append(stack)
                continue
            T = T / sizes
            _, s, Vh = torch.linalg.svd(T - known @ (known.T @ T), full_matrices=False)
            K = Vh[s > _ALONG].T
            if K.shape[1] == len(K):
                found.append(stack)
            elif K.shape[1]:
                K = K / sizes[:, None]
                parts = (replace(p, left=K if p.left is None else p.left @ K) for p in stack.translation.parts)  # type: ignore[union-attr]
                found.append(replace(stack, translation=Translation(tuple(parts))))
        return replace(stacks, found=tuple(found)) if known.shape[1] else stacks

    @property
    def _ordered(self) -> Params:
        """Return the model's weights in the order of theta."""
        return {name: self.own[name] for name in self.frame.entries.shapes if name in self.own}

    def point(self) -> Point:
        """Return a fresh generic point."""
        weights, gradients = self._gradients(None)
        self.touched = self.touched | (gradients != 0).any(0)
        entries = self.frame.entries
        theta = torch.cat([weights[name].reshape(-1).double() for name in entries.shapes])
        return Point(theta, entries.read(weights.__getitem__), gradients)

    def _gradients(
        self, weights: Mapping[str, Tensor] | None, generic: bool = True
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        """Return weights, generic ones if none are given, and gradients (losses, P) at fresh inputs."""
        at, samples = self.points.samples(
            self.losses, vectors=list(self.own), which=self.which(), weights=weights, generic=generic
        )
        gradients = torch.zeros(len(samples), self.frame.entries.size, dtype=torch.float64)
        for name, w in self.own.items():
            start = self.frame.entries.start[name]
            every = torch.stack([sample.gradients[name] for sample in samples])
            gradients[:, start : start + w.numel()] = every.reshape(len(samples), w.numel())
        return at.weights, gradients


class Wide(Finder):
    """Find the symmetries of a net of many parameters by token vectors: no gradient of a weight is formed."""

    _shape = 0  # turn of the next sample of all uses

    @cached_property
    def recording(self) -> Recording:
        """Return the smallest recording of several examples."""
        found = [self.points.recordings[place] for place in self.points.exercised()]
        return min(found, key=lambda each: sum(each.values[n].numel() for n in each.program.inputs))

    def everywhere(self) -> Readings:
        every = torch.arange(len(self.frame.roots))
        return read(self.frame, every, self.tokens, self.generator)

    def here(self) -> Stacks:
        def elsewhere(
            weights: Mapping[str, Tensor], count: int, names: Sequence[str], some: Collection[int] | None
        ) -> Sample:
            drawn = self.points.weights()
            try:  # of other signs, so that a unit that is off at all inputs is on at some
                return self._dealt({name: self._signed(w) for name, w in drawn.items()}, count, names, some)
            except Undecided:
                return self._dealt(drawn, count, names, some)

        return read_wide(self.frame, self._dealt, elsewhere, self.all_own)

    def _signed(self, w: Tensor) -> Tensor:
        return w * (2 * torch.randint(2, w.shape, generator=self.generator) - 1).to(w) if movable(w) else w

    @cached_property
    def _sources(self) -> list[tuple[Recording, int]]:
        """Return recordings and how many tokens a use has there, in the middle; those with few for one example first.

        What has one token for each example, as a pooler, has enough of them soonest there.
        """
        recordings = [self.points.recordings[place] for place in self.points.places(self.walk.program)]
        found = []
        for recording in (*recordings, *self.points.shorter(self.recording)):
            layouts, operations = recording.program.layouts, recording.program.operations
            shapes = [(torch.Size(layouts[operations[u.operation].outs[0]].shape), len(u.out)) for u in self.walk.uses]
            rows = sorted(max(1, shape.numel() // max(1, outputs)) for shape, outputs in shapes)
            found.append((recording, rows[len(rows) // 2], rows[0] / rows[len(rows) // 2]))
        return [each[:2] for each in sorted(found, key=lambda each: -each[2])]

    def _dealt(
        self, weights: Mapping[str, Tensor], count: int, names: Sequence[str], some: Collection[int] | None
    ) -> Sample:
        """Return a sample of about so many tokens, to which all words are dealt; of the next shape if of all uses."""
        first = self._shape if some is None else 0
        self._shape += some is None
        for k in range(len(self._sources)):
            recording, rows = self._sources[(first + k) % len(self._sources)]
            inputs = self.points.inputs(recording, stacked=(-(-count // rows),))
            used = Uses(recording.program, self.walk.uses)
            try:
                return dealt(used, weights, list(zip(*inputs, strict=True)), self.generator, names, some)
            except RUN_ERRORS as error:
                why = first_line(error)
        raise Undecided(f"The model must run on other inputs of the sizes it was recorded at. Found: {why}")


def _bits(gauge: Gauge, k: int, flips: Iterable[tuple[int, int]]) -> Tensor:
    """Return which elements outside the identity component are meant by pairs of a gauge's number and theirs."""
    own = {bit for number, bit in flips if number == k}
    return torch.tensor([bit in own for bit in range(gauge.algebra.components)], dtype=torch.bool)


def _together(symmetries: Sequence[Symmetry], stacks: Sequence[Stack]) -> tuple[tuple[Symmetry, ...], ...]:
    keys = dict.fromkeys((s.outputs, s.apart) for s in stacks)
    apart = [[s.translation for s in stacks if (s.outputs, s.apart) == key] for key in keys]
    sets = [(*translations, *symmetries) for translations in apart if translations] or [tuple(symmetries)]
    return tuple(each for each in sets if each)


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
