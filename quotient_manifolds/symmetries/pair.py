"""Represent symmetric pairs: two factors cut out of a model's named parameters, stored as data, never as code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from quotient_manifolds.manifolds import FixedRankQuotient, Metric, RotaryQuotient
from quotient_manifolds.symmetries.groups import GL, Algebra, Complex, DirectSum, Gauge, Rows, Slot, Wire
from quotient_manifolds.symmetries.strided_view import StridedView

Params = dict[str, Tensor]

Group = Literal["GL(h)", "GL+(1)", "GL(1, C)"]
"""The group of one batch entry of a pair: invertible matrices, positive numbers (h = 1), complex numbers (h = 2)."""

QUERY_KEY, VALUE_OUTPUT = "query/key", "value/output"
ADAPTER = "lora B/A"
BOTTLENECK, RELU, GATED = "bottleneck in/out", "relu neuron", "gated neuron"
BESIDE_ATTENTION = (BOTTLENECK, RELU, GATED)
"""Kinds of pairs that belong neither to attention nor to adapters."""


@dataclass(frozen=True)
class Factor:
    """Stack views of parameters (a weight, then its bias) into one factor (heads, rows, h) of a pair."""

    views: tuple[StridedView, ...]

    @property
    def rows(self) -> int:
        """Return the number of rows of all views."""
        return sum(part.rows for part in self.views)

    def read(self, params: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """Return the factor as (heads, rows, h), in `out` or a new tensor in the parameters' dtype."""
        return torch.cat([view.read(params) for view in self.views], dim=-2, out=out)

    def write(self, params: Params, value: Tensor) -> None:
        """Write a factor (heads, rows, h) into the dict's tensors in place (clone them first)."""
        for view, rows in zip(self.views, value.split([view.rows for view in self.views], dim=-2), strict=True):
            view.write(params, rows)


@dataclass(frozen=True)
class SymmetricPair:
    """Name two factors G, H that a model uses only through G H^T, head by head: GL(h) acts by (G A^-1, H A^T).

    A point is (heads, n + m, h), G stacked on H. name: the module's name and the kind, unique in a model.

    acts: the group. "GL+(1)" has h = 1, for the neurons of a ReLU layer, for example. "GL(1, C)" has h = 2: each batch
    entry is a frequency plane of a rotary embedding (heads = key heads x planes), and columns 0 and 1 are the real and
    imaginary part. The model depends only on the complex products g k^H, and z acts by (g / z, k conj(z)).
    """

    name: str
    kind: str  # QUERY_KEY, VALUE_OUTPUT, ... or one of your own
    G: Factor
    H: Factor
    acts: Group = "GL(h)"

    @property
    def heads(self) -> int:
        """Return the number of batch entries: heads, or heads x planes for GL(1, C)."""
        return self.G.views[0].shape[0]

    @property
    def n(self) -> int:
        """Return the number of rows of G."""
        return self.G.rows

    @property
    def m(self) -> int:
        """Return the number of rows of H."""
        return self.H.rows

    @property
    def h(self) -> int:
        """Return the number of columns of G and of H, the width of a head."""
        return self.G.views[0].shape[2]

    @property
    def group(self) -> str:
        """Return the name of the group that acts on all heads, such as GL(64)^12."""
        name = f"GL({self.h})" if self.acts == "GL(h)" else self.acts
        return f"{name}^{self.heads}"

    @property
    def group_dimension(self) -> int:
        """Return the real dimension of the group over all heads, the number of directions that change nothing."""
        return self.heads * {"GL(h)": self.h**2, "GL+(1)": 1, "GL(1, C)": 2}[self.acts]

    @cached_property
    def gauge(self) -> Gauge:
        """Return the group with its action on all heads: diagonal blocks A act by (G A^-1, H A^T), head by head."""
        channels = torch.arange(self.heads * self.h).view(self.heads, self.h)
        slots = [
            Slot(Rows.at(view.name, view.stored, view.places.mT.flatten(0, 1)), channels.flatten(), writes)
            for factor, writes in ((self.G, False), (self.H, True))
            for view in factor.views
        ]
        block: Algebra = Complex() if self.acts == "GL(1, C)" else GL(self.h)
        algebra = DirectSum(channels.numel(), ((channels, block),))
        signs = torch.ones(algebra.components, dtype=torch.bool) if self.acts == "GL(h)" else None
        return Gauge(Wire(tuple(slots), channels.numel()), algebra, signs)

    @property
    def symmetry(self) -> Gauge:
        """Return the group; the same attribute as of a reparameterization."""
        return self.gauge

    @property
    def families(self) -> dict[str, int]:
        """Return the dimension of the group by its kind."""
        return {self.kind: self.group_dimension}

    def manifold(self, metric: Metric = "inv", eps: float = 0.0) -> FixedRankQuotient | RotaryQuotient:
        """Return the quotient manifold of the pair's points, by its group."""
        if self.acts == "GL(1, C)":
            return RotaryQuotient(self.n, self.m, metric, eps=eps)
        return FixedRankQuotient(self.n, self.m, metric, eps=eps)

    @property
    def views(self) -> tuple[StridedView, ...]:
        """Return the views of G, then those of H."""
        return self.G.views + self.H.views

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that the pair changes, each once."""
        return tuple(dict.fromkeys(view.name for view in self.views))

    def without(self, zeros: Mapping[str, Tensor]) -> SymmetricPair:
        """Return the pair without views of one row that is 0. zeros: indices of entries that are 0, by parameter."""

        def stays(view: StridedView) -> bool:
            return view.rows > 1 or view.name not in zeros or not bool(torch.isin(view.places, zeros[view.name]).all())

        G, H = (Factor(tuple(filter(stays, factor.views))) for factor in (self.G, self.H))
        return replace(self, G=G, H=H)

    def read(self, params: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """Return G stacked on H, (heads, n + m, h), in `out` or a new tensor in the parameters' dtype."""
        return Factor(self.views).read(params, out)

    def act(self, A: Tensor, x: Tensor) -> Tensor:
        """Return (G A^-1, H A^T) for a point x, in the precision of A (heads, h, h), or (heads,) if complex."""
        return self.manifold().action(A.to(x.device), x.to(A.real.dtype))

    def write(self, params: Params, x: Tensor) -> None:
        """Write x (heads, n + m, h) into the dict's tensors in place (clone them first); the inverse of `read`."""
        expected = (self.heads, self.n + self.m, self.h)
        if tuple(x.shape) != expected:
            raise ValueError(f"a point of the pair {self.name!r} has shape {expected}. Found {tuple(x.shape)}.")
        Factor(self.views).write(params, x)
