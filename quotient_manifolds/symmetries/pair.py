"""Represent symmetric pairs: where the two factors are among a model's named parameters, as data, never as code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from einops import EinopsError, rearrange
from torch import Tensor, nn

from quotient_manifolds.manifolds import FixedRankQuotient, Metric, RotaryQuotient
from quotient_manifolds.symmetries.strided_view import StridedView

Params = dict[str, Tensor]

Group = Literal["GL(h)", "GL+(1)", "GL(1, C)"]
"""What acts on one batch entry of a pair: an invertible matrix, a positive number (h = 1), a complex one (h = 2)."""


@dataclass(frozen=True)
class Span:
    """Select the entries start <= i < stop of one axis of a stored tensor, an axis that `axes` first opens.

    `axes` is the left side of an einops pattern: "(block out) rows" opens torch's packed in_proj_weight into blocks,
    "(heads block h) rows" opens weights that interleave query, key and value head by head. `size` is the axis' length.
    `then` is a span of what this one leaves, whose axes are all open: Span("(block out) rows", "block", 3, 0, 1,
    Span("block (heads h) rows", "h", 8, 0, 4)) is the first half of every query head of a fused weight.
    """

    axes: str
    axis: str
    size: int
    start: int
    stop: int
    then: Span | None = None

    def chain(self) -> Iterator[Span]:
        """Yield this span, and those that follow it."""
        yield self
        if self.then is not None:
            yield from self.then.chain()


@dataclass(frozen=True)
class ParameterView:
    """View (a span of) one parameter as a tensor of shape (heads, rows, h), by a linear bijection.

    `pattern` is an einops pattern from the stored tensor, its span opened and narrowed, to "heads rows h"; `sizes` are
    the axis lengths that the stored shape alone does not tell. It only rearranges, so reading is its own adjoint:
    gradients and tangent vectors are read and written by the same two calls.
    """

    name: str
    pattern: str
    sizes: tuple[tuple[str, int], ...]
    shape: tuple[int, int, int]  # (heads, rows, h)
    span: Span | None = None

    @staticmethod
    def of(
        name: str, stored: Tensor, pattern: str, sizes: Mapping[str, int], span: Span | None = None
    ) -> ParameterView:
        """Return the view that `pattern` makes of a tensor shaped like `stored`; ValueError if it does not fit."""
        narrowed = {each.axis: each.stop - each.start for each in (span.chain() if span else ())}
        known = tuple({**sizes, **narrowed}.items())
        probe = ParameterView(name, pattern, known, (0, 0, 0), span)
        shape = probe._rearranged({name: torch.empty(stored.shape, device="meta")}).shape
        if len(shape) != 3:
            raise ValueError(
                f"A pattern must lead to heads, rows and h. Found {len(shape)} axes by {pattern!r} of {name}"
            )
        return ParameterView(name, pattern, known, (shape[0], shape[1], shape[2]), span)

    @property
    def rows(self) -> int:
        """Return how many rows of the factor these are."""
        return self.shape[1]

    def read(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the entries as (heads, rows, h), in the parameter's dtype, sharing memory where strides allow it."""
        read = self._rearranged(params)
        if tuple(read.shape) != self.shape:
            raise ValueError(f"{self._misfit(params[self.name])[:-1]} into {self.shape}.")
        return read

    def _rearranged(self, params: Mapping[str, Tensor]) -> Tensor:
        view = self._opened(params)
        try:
            return rearrange(view, self.pattern, **_lengths(self.pattern, self.sizes))
        except EinopsError:
            raise ValueError(self._misfit(params[self.name])) from None

    def write(self, params: Params, value: Tensor) -> None:
        """Put `value` (heads, rows, h) where `read` found it, in place, cast to the parameter's dtype."""
        left, right = self.pattern.split("->")
        backward = f"{right} -> {left}"
        target = self._opened(params)
        if isinstance(params[self.name], nn.Parameter):
            raise ValueError(f"writing would change the model's own parameter {self.name!r}: pass a dict of clones.")
        stored = rearrange(value, backward, **_lengths(backward, self.sizes))
        if stored.shape != target.shape:
            raise ValueError(f"{self._misfit(params[self.name])[:-1]} into {self.shape}.")
        target.copy_(stored)

    def _opened(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the stored tensor's span, which shares its memory: splitting an axis and narrowing it never copies."""
        if self.name not in params:
            raise ValueError(f"the parameters given hold no {self.name!r}, which a symmetric pair of this model needs.")
        stored = params[self.name]
        view = stored
        for span in self.span.chain() if self.span else ():
            flat = span.axes.replace("(", "").replace(")", "")
            sizes = tuple(dict(self.sizes, **{span.axis: span.size}).items())
            try:
                opened = rearrange(view, f"{span.axes} -> {flat}", **_lengths(span.axes, sizes))
            except EinopsError:
                raise ValueError(self._misfit(stored)) from None
            view = opened.narrow(flat.split().index(span.axis), span.start, span.stop - span.start)
        return view

    def _misfit(self, stored: Tensor) -> str:
        spans = self.span.chain() if self.span else ()
        layout = "".join(f"{span.axes} ({span.axis}={span.size}), then " for span in spans)
        known = ", ".join(f"{axis}={size}" for axis, size in self.sizes)
        shape = tuple(stored.shape)
        return f"{self.name!r} has shape {shape}, which does not split as {layout}{self.pattern} with {known}."


@cache
def _lengths(pattern: str, sizes: tuple[tuple[str, int], ...]) -> dict[str, int]:
    """Return the known sizes of just the axes that occur in `pattern` (einops refuses others)."""
    named = set(re.findall(r"\w+", pattern))
    return {axis: size for axis, size in sizes if axis in named}


View = ParameterView | StridedView
"""What is written down by axes' names, or by offset and strides."""


@dataclass(frozen=True)
class Factor:
    """Stack views of parameters (a weight, then its bias) to one factor (heads, rows, h) of a pair."""

    views: tuple[View, ...]

    @property
    def rows(self) -> int:
        """Return how many rows the views have together."""
        return sum(part.rows for part in self.views)

    def read(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the factor as (heads, rows, h), a new tensor in the parameters' dtype."""
        return torch.cat([view.read(params) for view in self.views], dim=-2)

    def write(self, params: Params, value: Tensor) -> None:
        """Write a factor (heads, rows, h) into the dict's tensors in place (clone them first)."""
        for view, rows in zip(self.views, value.split([view.rows for view in self.views], dim=-2), strict=True):
            view.write(params, rows)


@dataclass(frozen=True)
class SymmetricPair:
    """Name two factors G, H that a model uses only through G H^T, head by head: GL(h) acts by (G A^-1, H A^T).

    A point is (heads, n + m, h), G stacked on H. `name` is the module's name and the kind, unique in a model.

    acts: which group. "GL+(1)" has h = 1: the neurons of a ReLU layer, say. "GL(1, C)" has h = 2: each batch entry is
    a frequency plane of a rotary embedding (heads = key heads x planes), columns 0 and 1 the coordinates that rotate
    into each other (real and imaginary part), and the model sees only the complex products g k^H; z acts by
    (g / z, k conj(z)).
    """

    name: str
    kind: str  # "query/key" | "value/output" | ...
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
        """Return the number of real dimensions of the group, over all heads: as many directions as change nothing."""
        return self.heads * {"GL(h)": self.h**2, "GL+(1)": 1, "GL(1, C)": 2}[self.acts]

    def manifold(self, metric: Metric = "inv", eps: float = 0.0) -> FixedRankQuotient | RotaryQuotient:
        """Return the quotient manifold of the pair's points, by its group."""
        if self.acts == "GL(1, C)":
            return RotaryQuotient(self.n, self.m, metric, eps=eps)
        return FixedRankQuotient(self.n, self.m, metric, eps=eps)

    @property
    def views(self) -> tuple[View, ...]:
        """Return the views of G, then those of H."""
        return self.G.views + self.H.views

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters the pair touches, each once."""
        return tuple(dict.fromkeys(view.name for view in self.views))

    def read(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return G stacked on H, (heads, n + m, h), a new tensor in the parameters' dtype."""
        return Factor(self.views).read(params)

    def write(self, params: Params, x: Tensor) -> None:
        """Invert `read`: write x (heads, n + m, h) into the dict's tensors in place (clone them first)."""
        expected = (self.heads, self.n + self.m, self.h)
        if tuple(x.shape) != expected:
            raise ValueError(f"a point of the pair {self.name!r} has shape {expected}. Found {tuple(x.shape)}.")
        Factor(self.views).write(params, x)
