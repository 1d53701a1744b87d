"""Treat functions of parameters as parameters, such as a weight normalized by hand or weights computed by a network.

A model depends on these parameters only through the values of the functions. If the values have a derivative of full
rank, gradients by the values follow from gradients by the parameters. Together with coordinates for what they leave
open, the values form a chart, in which vector fields are linear again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.kernel import Point, null_space
from quotient_manifolds.symmetries.charges.samples import Undecided
from quotient_manifolds.symmetries.charges.unfoldings import (
    Rest,
    Unfoldings,
    beyond,
    by_parameters,
    fields,
    open_to,
    spanned,
    tangents,
)
from quotient_manifolds.symmetries.charges.walk import Walk
from quotient_manifolds.symmetries.groups import Chart, Charted, Linear, Params
from quotient_manifolds.symmetries.groups.rows import Record
from quotient_manifolds.symmetries.trace.program import Layout, Operation, Program
from quotient_manifolds.symmetries.trace.replay import arguments, wide

_TRIED = 3
"""The number of points at which gradients must factor through the values."""
_RANGE = 1e-8
"""If a larger relative part of a gradient is outside the derivative's row space, parameters have other uses."""


@dataclass(frozen=True, eq=False)
class Function(Record):
    """Compute values of a program from parameters by name, as one vector.

    operations: (name of the function, args, kwargs, outs) in order, which can be pickled. leaves: (number, layout,
    name) of parameters. constants: (number, values).
    """

    operations: tuple[tuple[str, Any, Any, tuple[int, ...]], ...]
    leaves: tuple[tuple[int, Layout, str], ...]
    constants: tuple[tuple[int, Tensor], ...]
    outs: tuple[int, ...]

    @classmethod
    def of(cls, program: Program, operations: Sequence[Operation], outs: Sequence[int]) -> Function:
        """Return the function of parameters that some operations compute."""
        taken = {n for each in operations for n in each.ins}
        leaves = tuple((n, program.layouts[n], name) for n, name in program.parameters.items() if n in taken)
        constants = tuple((n, wide(t)) for n, t in program.constants.items() if n in taken)
        named = tuple((str(each.func), each.args, dict(each.kwargs), each.outs) for each in operations)
        return cls(named, leaves, constants, tuple(outs))

    def __call__(self, params: Params) -> Tensor:
        known = dict(self.constants)
        known |= {n: layout.of(params[name].reshape(-1)) for n, layout, name in self.leaves}
        for name, args, kwargs, outs in self.operations:
            each = Operation(_named(name), args, kwargs, outs)
            args, kwargs = arguments(each, known.__getitem__, generic=False)
            made = args[0] if each.func is torch.ops.aten.detach.default else each.func(*args, **kwargs)
            parts = (made,) if isinstance(made, Tensor) else [t for t in made if isinstance(t, Tensor)]
            known.update(zip(outs, parts, strict=True))
        return torch.cat([known[n].reshape(-1) for n in self.outs])


def _named(name: str) -> Any:
    space, operation, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), operation), overload)


def charts(walk: Walk, own: Mapping[str, Tensor]) -> Iterator[Chart]:
    """Yield a chart for each set of parameters that a model uses through functions that mix entries."""
    program, layouts = walk.program, walk.program.layouts
    data, made = {layouts[n].memory for n in program.inputs}, list[Operation]()
    for each in program.operations:
        if any(layouts[n].memory in data for n in (*each.ins, *each.outs)):
            data.update(layouts[n].memory for n in each.outs)
        else:
            made.append(each)
    of: dict[int, frozenset[str]] = {n: frozenset([name]) for n, name in program.parameters.items()}
    first: dict[int, int] = {}
    for each in made:
        names = frozenset[str]().union(*(of.get(n, frozenset()) for n in each.ins))
        for n in each.outs:
            of[n] = names
            first.setdefault(layouts[n].memory, n)
    inside = {n for each in made for n in each.outs}
    others = [each for each in program.operations if not inside.issuperset(each.outs)]
    used = {n for each in others for n in each.ins} | {*program.outputs}
    roots = dict[int, int]()
    for n in sorted(used):
        memory = layouts[n].memory
        if of.get(n) and memory in first and not walk.entries.known(n):
            roots[memory] = n if layouts[n].dense else roots.get(memory, first[memory])
    left = {*roots.values()}
    directly = frozenset[str]().union(*(of.get(n, ()) for n in used if layouts[n].memory not in roots))
    while left:
        some, names = {left.pop()}, frozenset[str]()
        while some:  # values with parameters in common share a chart
            names = names.union(*(of[n] for n in some))
            together = {n for n in left if of[n] & names}
            if not together:
                break
            left -= together
            some |= together
        chart = None if names & directly else _chart(walk, made, sorted(some), sorted(names), own)
        if chart is not None:
            yield chart


def _chart(
    walk: Walk, made: Sequence[Operation], outs: Sequence[int], names: Sequence[str], own: Mapping[str, Tensor]
) -> Chart | None:
    """Return a chart at these weights; None unless the derivative of the values has full rank."""
    needed, wanted = list[Operation](), {*outs}
    for each in reversed(made):
        if wanted.intersection(each.outs):
            needed.insert(0, each)
            wanted.update(each.ins)
    layouts = [walk.program.layouts[n] for n in outs]
    if not {*names} <= {*own} or not all(layout.is_floating_point for layout in layouts):
        return None
    shapes = tuple((name, tuple(own[name].shape)) for name in names)
    title = ", ".join(names)
    values = tuple((f"value {k} of {title}", layout.shape) for k, layout in enumerate(layouts))
    size = sum(own[name].numel() for name in names)
    chart = Chart(
        shapes, values, Function.of(walk.program, needed, outs), torch.zeros(size, 0).double(), f"rest of {title}"
    )
    J = chart.slope(chart.row(own))
    N, _ = null_space(J)
    return replace(chart, across=N) if N.shape[1] == size - len(J) else None


class Charting:
    """Express weights and gradients in a chart's coordinates except `rest`, after all other parameters."""

    def __init__(self, chart: Chart, shapes: Mapping[str, torch.Size]) -> None:
        self.chart, names, start = chart, dict(chart.shapes), 0
        self.shapes = {name: shape for name, shape in shapes.items() if name not in names}
        self.shapes |= {name: torch.Size(shape) for name, shape in chart.made}
        at = dict[str, Tensor]()
        for name, shape in shapes.items():
            at[name] = torch.arange(start, start := start + shape.numel())
        self.own = torch.cat([at[name] for name in names])
        self.others = torch.cat([torch.zeros(0).long(), *(w for name, w in at.items() if name not in names)])

    def weights(self, theta: Tensor) -> Tensor:
        """Return weights theta in these coordinates."""
        return torch.cat([theta[self.others], self.chart.results(theta[self.own])])

    def gradients(self, theta: Tensor, G: Tensor) -> Tensor | None:
        """Return gradients (losses, ...) by these coordinates; None if parameters are also used in another way."""
        J = self.chart.slope(theta[self.own])[: sum(torch.Size(shape).numel() for _, shape in self.chart.made)]
        own = G[:, self.own]
        found = torch.linalg.lstsq(J.T, own.T).solution.T
        if float((found @ J - own).norm()) > _RANGE * float(own.norm()):
            return None
        return torch.cat([G[:, self.others], found], 1)

    def tangents(self, theta: Tensor, D: Tensor) -> Tensor:
        """Return tangent vectors, the columns of D, in these coordinates."""
        J = self.chart.slope(theta[self.own])[: sum(torch.Size(shape).numel() for _, shape in self.chart.made)]
        return torch.cat([D[self.others], J @ D[self.own]])

    def point(self, point: Point) -> Point:
        """Return a point in these coordinates. Raises Undecided if parameters are also used in another way."""
        G = self.gradients(point.theta, point.gradients)
        if G is None:
            raise Undecided(f"{', '.join(name for name, _ in self.chart.shapes)} are used in other ways, too")
        return replace(point, theta=self.weights(point.theta), gradients=G)


def read_charted(
    chart: Chart,
    shapes: Mapping[str, torch.Size],
    draw: Callable[[], Point],
    theta: Tensor,
    kernel: Tensor,
    known: Tensor,
    generator: torch.Generator,
) -> Rest:
    """Return vector fields in a chart that move the weights theta in directions beyond the known ones (P, k).

    These are constant along what the values leave open, or act on values and other parameters. kernel: as in
    `read_rest`.
    """
    charting, params = Charting(chart, shapes), _split(theta, shapes)
    for _ in range(_TRIED):
        charting.point(draw())
    count, rest = chart.across.shape[1], Rest()
    constants = torch.cat([torch.zeros(count, count, count), torch.eye(count)[:, :, None]], 2).double()
    alone = tangents([Charted(Linear.of({chart.rest: (count,)}, constants), chart)], params)
    if len(new := beyond(alone, known)):
        rest = Rest((Charted(Linear.of({chart.rest: (count,)}, constants[new]), chart),))
        known = torch.cat([known, alone[:, new]], 1)
    if kernel.shape[1] > spanned(known).shape[1]:
        here, before = charting.weights(theta), charting.tangents(theta, known)
        unknowns = Unfoldings(charting.shapes, open_to(charting.tangents(theta, kernel), before))
        X, *gap = fields(unknowns, lambda: charting.point(draw()), here, before, generator)
        linear = [each for each in by_parameters(unknowns.shapes, X) if dict(chart.made).keys() & {*each.names}]
        rest = rest.and_(Rest(tuple(Charted(each, chart) for each in linear), *gap))
    return rest


def _split(theta: Tensor, shapes: Mapping[str, torch.Size]) -> Params:
    parts = theta.split([shape.numel() for shape in shapes.values()])
    return {name: w.view(shape) for (name, shape), w in zip(shapes.items(), parts, strict=True)}
