"""Act by a group on functions of parameters, such as a weight that the model normalizes, and solve for parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from quotient_manifolds.symmetries.groups.linear import Linear
from quotient_manifolds.symmetries.groups.rows import Draft, Params, Record, flattened
from quotient_manifolds.symmetries.groups.symmetry import Symmetry
from quotient_manifolds.symmetries.groups.wire import Charge

_STEPS, _MOST, _SOLVED = (1, 2, 4, 8, 16, 32), 12, 1e-12
_RANK = 1e-10
"""Singular values below this, relative to the largest, count as 0."""


@dataclass(frozen=True, eq=False)
class Chart(Record):
    r"""Define coordinates (f(theta), N^T theta) of parameters theta (n,): functions f, completed by linear ones.

    shapes: (name, shape) of each parameter. function: f; takes the parameters by name and returns all results as one
    vector (m,). made: (name, shape) of each result. across: N (n, n - m). rest: the name of N^T theta. The derivative
    of the coordinates has full rank near theta.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    made: tuple[tuple[str, tuple[int, ...]], ...]
    function: Callable[[Params], Tensor]
    across: Tensor
    rest: str

    def results(self, theta: Tensor) -> Tensor:
        """Compute f(theta) (m,) for theta (n,)."""
        sizes = [prod(shape) for _, shape in self.shapes]
        parts = zip(self.shapes, theta.split(sizes), strict=True)
        return self.function({name: part.view(shape) for (name, shape), part in parts})

    def coordinates(self, theta: Tensor) -> Tensor:
        """Compute all coordinates (n,)."""
        return torch.cat([self.results(theta), self.across.T @ theta])

    def slope(self, theta: Tensor) -> Tensor:
        """Compute the derivative of the coordinates (n, n)."""
        J: Tensor = torch.func.jacrev(self.results)(theta.detach())
        return torch.cat([J, self.across.T])

    def row(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return theta (n,), float64 on the CPU."""
        return torch.cat([flattened(params, name, shape).double().cpu() for name, shape in self.shapes])

    def named(self, coordinates: Tensor) -> Params:
        """Split coordinates (n,) by name."""
        both = (*self.made, (self.rest, (self.across.shape[1],)))
        parts = coordinates.split([prod(shape) for _, shape in both])
        return {name: part.view(shape) for (name, shape), part in zip(both, parts, strict=True)}

    def solved(self, theta: Tensor, wanted: Tensor) -> Tensor:
        """Solve for the parameters near theta with these coordinates, by Newton's method; ValueError if it fails."""
        x, size = theta.detach(), float(wanted.detach().abs().max().clamp(min=1e-300))
        for _ in range(_MOST):
            gap = self.coordinates(x) - wanted.detach()
            if float(gap.abs().max()) <= _SOLVED * size:
                slope = self.slope(x)
                return x - torch.linalg.solve(slope, self.coordinates(x) - wanted)  # differentiable by `wanted`
            step, singular = torch.linalg.solve_ex(self.slope(x), gap)
            x = x - step
            if bool(singular) or not bool(x.isfinite().all()):
                break
        raise ValueError("parameters must be found that functions of them have these values for. Found none near.")


@dataclass(frozen=True, eq=False)
class Charted(Symmetry):
    r"""Act by the flows of linear fields on the coordinates of a `Chart` and on other parameters.

    Coordinates that a field does not change are constant, so that flows form a group if the equations can be solved.
    fields: names that are not parameters are coordinates of the chart. Elements are coordinates z, as for `Linear`.
    """

    fields: Linear
    chart: Chart

    @property
    def names(self) -> tuple[str, ...]:
        made = {self.chart.rest, *(name for name, _ in self.chart.made)}
        own = tuple(name for name, _ in self.chart.shapes)
        return (*own, *(name for name in self.fields.names if name not in made))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.fields.shape

    def move(self, draft: Draft, element: Tensor) -> None:
        """Flow for unit time, in 1, 2, 4, ... steps, until the equations of all steps can be solved.

        Raises ValueError like `Symmetry.move`, and if 32 steps do not suffice.
        """
        z = self.generator(element)
        for steps in _STEPS[:-1]:
            try:
                return self._move(draft, z / steps, steps)
            except (ValueError, RuntimeError):  # the solver failed; shorter steps may succeed
                continue
        return self._move(draft, z / _STEPS[-1], _STEPS[-1])

    def _move(self, draft: Draft, z: Tensor, steps: int) -> None:
        chart, theta = self.chart, self.chart.row(draft)
        now = {**{name: w.double() for name, w in draft.items()}, **chart.named(chart.coordinates(theta))}
        for _ in range(steps):
            now = self.fields.act(now, z)
            wanted = torch.cat([now[name].reshape(-1) for name in (*dict(chart.made), chart.rest)])
            theta = chart.solved(theta, wanted)
        parts = theta.split([prod(shape) for _, shape in chart.shapes])
        own = {name: part.view(shape) for (name, shape), part in zip(chart.shapes, parts, strict=True)}
        for name in self.names:
            draft[name] = (own[name] if name in own else now[name]).to(draft[name].device)

    def element(self, generator: torch.Generator, scale: float = 1.0) -> Tensor:
        """Draw an element of the flows of the fields."""
        return self.fields.element(generator, scale)

    def condition(self, element: Tensor) -> float:
        """Return the condition number of the flow on the coordinates."""
        return self.fields.condition(element)

    def stretching(self, X: Tensor) -> Tensor:
        return self.fields.stretching(X)

    def bounded(self, element: Tensor, condition: float) -> Tensor:
        return self.fields.bounded(element, condition)

    def charge(self, params: Mapping[str, Tensor], cotangent: Mapping[str, Tensor]) -> Charge:
        """Compute the charges of the fields, with the cotangent expressed in the coordinates."""
        chart, theta = self.chart, self.chart.row(params)
        slope = chart.slope(theta)
        y = torch.linalg.solve(slope.T, chart.row(cotangent))
        return self.fields.charge(
            {**params, **chart.named(chart.coordinates(theta).detach())}, {**cotangent, **chart.named(y)}
        )

    def dimension(self, params: Mapping[str, Tensor]) -> int:
        """Return the rank of the fields in the coordinates, which equals the rank in the parameters."""
        return self.fields.dimension({**params, **self.chart.named(self.chart.coordinates(self.chart.row(params)))})
