"""Find what a stream that only LayerNorms read does not tell: the means of its writers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quotient_manifolds.symmetries.freedom import Freedom, gaussian, read, typical, write
from quotient_manifolds.symmetries.linear_scale import Scaled
from quotient_manifolds.symmetries.norm_scale import Reader
from quotient_manifolds.symmetries.operations import SUMS, Key, Operation, key, looked_up
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.trace import Part, Trace


@dataclass(frozen=True, eq=False)
class UnreadMean(Freedom):
    """Describe a writer whose answers are only ever read by LayerNorms, alone or in sums, so that their mean is free.

    A LayerNorm takes the mean over channels off what it reads, so W x + b and W x + b + (u^T x + c) 1 are the same to
    it. parts: names of parameters, with flat indices (rows, channels); the mean of each row may be any number. gain:
    the name of what multiplies the answers first, "" if nothing does; rows are shifted by multiples of 1 / gain then.
    counted: how many of these dimensions are directions that the writer itself does not see, too.
    """

    parts: tuple[Part, ...]
    gain: str = ""
    counted: int = 0
    kind: ClassVar[str] = "mean"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that a move takes or touches."""
        return tuple(dict.fromkeys((*(name for name, _ in self.parts), *([self.gain] if self.gain else []))))

    @property
    def families(self) -> dict[str, int]:
        """Return the dimensions of the moves that leave the function alone, by their name."""
        return {"mean that no norm reads": sum(len(elements) for _, elements in self.parts) - self.counted}

    def fold(self, params: Params) -> None:
        """Make the mean of every row, times the gain, 0, in place."""
        for name, elements in self.parts:
            rows = read(params, name, elements)
            gain, direction = self._gain(params, rows)
            mean = (rows * gain).sum(dim=1, keepdim=True) / (gain * direction).sum()
            write(params, name, elements, rows - mean * direction)

    def move(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Add a number, over the gain, to every row, in place; with `control`, to every other channel of it."""
        for name, elements in self.parts:
            rows = read(params, name, elements)
            _, direction = self._gain(params, rows)
            shift = size * typical(rows) * gaussian(rows, generator, len(rows), 1) * direction
            if control:
                shift[:, ::2] = 0.0
            write(params, name, elements, rows + shift)

    def _gain(self, params: Params, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gain, and 1 / gain scaled to a maximum of 1; ones where no mean reaches the stream."""
        ones = torch.ones_like(rows[0])
        gain = params[self.gain].double().flatten() if self.gain else ones
        return (gain, gain.abs().min() / gain) if bool(gain.all()) else (ones, ones)


def find_means(trace: Trace, scaled: Iterable[Scaled] = ()) -> Iterator[UnreadMean]:
    """Yield the writers whose mean no norm reads. scaled: linear maps whose answers are multiplied by a gain."""
    gains = {id(each.operations[0]): each for each in scaled if bool((each.scale.factor == 1).all())}
    found: dict[tuple[str, ...], list[_Writer]] = {}
    for operation in trace.operations:
        for writer in _writers(trace, operation):
            if id(operation) in gains:
                writer = _after(writer, gains[id(operation)])
            found.setdefault(tuple(name for name, _ in writer.parts), []).append(writer)
    for writers in found.values():
        parts = writers[0].parts
        alike = all(torch.equal(a, b) for other in writers for (_, a), (_, b) in zip(parts, other.parts, strict=True))
        known = {id(operation) for writer in writers for operation in writer.operations}
        if alike and not trace.used_besides(parts, known) and all(_ends_in_norms(trace, each) for each in writers):
            yield UnreadMean(parts, writers[0].gain)


def find_head_means(trace: Trace, unseen: Iterable[Reader]) -> Iterator[UnreadMean]:
    """Yield the linear maps of whose units norms read some alone, as those of queries and keys read each head.

    unseen: the linear maps that have a direction which they do not see.
    """
    unseen = list(unseen)
    for operation in trace.operations:
        linear = trace.linear(operation)
        groups = _normed_units(trace, linear.y) if linear is not None else []
        if linear is None or not groups:
            continue
        parts = [(linear.weight, linear.elements[:, units]) for units in groups]
        if linear.bias_elements is not None:
            parts += [(linear.bias, linear.bias_elements[None, units]) for units in groups]
        seen = (torch.isin(linear.elements, one.elements).all() for one in unseen if one.weight == linear.weight)
        if not trace.used_besides(parts, {id(operation), id(linear.adding)}):
            yield UnreadMean(tuple(parts), counted=len(groups) if any(map(bool, seen)) else 0)


def _normed_units(trace: Trace, y: Tensor) -> list[Tensor]:
    """Return the groups of units of y of which nothing but LayerNorms over each group is taken."""
    count = y.shape[-1]
    views = [
        (view, numbers, [user for user in trace.users(view) if not user.is_view])
        for view, numbers in trace.follow(y, torch.arange(count).expand(y.shape))
    ]
    groups: list[Tensor] = []
    others: list[Tensor] = []
    for view, numbers, users in views:
        size = view.shape[-1:].numel()
        normed = 1 < size < count and all(_is_over(user, size) for user in users)
        if trace.is_output(view) or (users and not normed):
            others.append(numbers)
        elif users:
            groups += numbers.flatten(0, -2).unique(dim=0)
    if not groups:
        return []
    taken = torch.zeros(count, dtype=torch.bool)
    for numbers in others:
        taken[numbers.flatten()] = True
    taken |= torch.cat(groups).bincount(minlength=count) > 1
    return [units for units in groups if not bool(taken[units].any())]


def _is_over(operation: Operation, size: int) -> bool:
    """Return whether an operation is a LayerNorm over a last axis of this size."""
    return operation.name == "native_layer_norm" and list(operation.arguments[1]) == [size]


@dataclass(frozen=True, eq=False)
class _Writer:
    """Hold what writes y: numbers of parameters (rows, channels), and the operations that use them for it.

    axis: that of y along which its channels lie. gain: the name of what has multiplied them.
    """

    parts: tuple[Part, ...]
    y: Tensor
    operations: tuple[Operation, ...]
    axis: int = -1
    gain: str = ""

    @property
    def channels(self) -> Tensor:
        """Return for every entry of y which channel it is."""
        shape = [1] * self.y.ndim
        shape[self.axis] = -1
        return torch.arange(self.y.shape[self.axis]).view(shape).expand(self.y.shape)


def _after(writer: _Writer, scaled: Scaled) -> _Writer:
    """Return the writer with the gain that multiplies its answers."""
    return _Writer(writer.parts, scaled.y, scaled.operations, scaled.axis, scaled.scale.gain)


def _writers(trace: Trace, operation: Operation) -> Iterator[_Writer]:
    if (found := looked_up(operation)) is not None:
        part = trace.parts.get(key(found[0]))
        if part is not None and part[1].ndim == 2:
            yield _Writer((part,), operation.outputs[0], (operation,))
    if operation.name in (*SUMS, "cat"):  # a table, or a single vector, that is a parameter and used as it is
        for tensor in operation.inputs:
            part = trace.parts.get(key(tensor))
            if part is not None and part[1].ndim > 1 and part[1].numel():
                rows = part[1].flatten(0, -2).unique(dim=0)  # one for all examples
                yield _Writer(((part[0], rows),), operation.outputs[0], (operation,))
    if operation.name == "convolution" and operation.arguments[-1] == 1 and not operation.arguments[6]:
        given = [trace.parts.get(key(each)) for each in operation.arguments[1:3] if isinstance(each, Tensor)]
        rows_of = [(part[0], part[1].flatten(1).mT if part[1].ndim > 1 else part[1][None]) for part in given if part]
        if len(rows_of) == len(given):
            yield _Writer(tuple(rows_of), operation.outputs[0], (operation,), axis=1)
    if operation.name == "native_layer_norm" and isinstance(operation.arguments[3], Tensor):
        part = trace.parts.get(key(operation.arguments[3]))
        if part is not None and part[1].ndim == 1 and not operation.outputs[0].is_nested:
            yield _Writer(((part[0], part[1][None]),), operation.outputs[0], (operation,))
    linear = trace.linear(operation)
    if linear is not None:
        bias = ((linear.bias, linear.bias_elements[None]),) if linear.bias_elements is not None else ()
        parts = ((linear.weight, linear.elements), *bias)
        yield _Writer(parts, linear.y, (operation, *([linear.adding] if linear.adding else [])))


def _ends_in_norms(trace: Trace, writer: _Writer) -> bool:
    """Return whether the numbers of y end in LayerNorms over its channels, after sums with others or none."""
    width, seen, norms = writer.y.shape[writer.axis], set[Key](), 0
    waiting = [(writer.y, writer.channels)]
    while waiting:
        for tensor, numbers in trace.follow(*waiting.pop()):
            used = [user for user in trace.users(tensor) if not user.is_view]
            if trace.is_output(tensor):
                return False
            if key(tensor) in seen or not used:
                continue
            seen.add(key(tensor))
            averages = [(each, _averaged(each, numbers)) for each in used]
            waiting += [(each.outputs[0], channels) for each, channels in averages if channels is not None]
            used = [each for each, channels in averages if channels is None]
            alike = numbers.shape[-1:] == (width,) and torch.equal(numbers, torch.arange(width).expand(numbers.shape))
            if used and not alike:
                return False
            for operation in used:
                if not _keeps_channels(operation, width):
                    return False
                if operation.name == "native_layer_norm":
                    norms += 1
                else:
                    total = operation.outputs[0]
                    waiting.append((total, torch.arange(width).expand(total.shape)))
    return norms > 0


def _averaged(operation: Operation, channels: Tensor) -> Tensor | None:
    """Return which channels an average over tokens is of, given those of what it is taken of; None if it is none."""
    if operation.name not in ("mean", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d"):
        return None
    mean, square = (operation.call(x, *operation.arguments[1:], **operation.options) for x in _powers(channels))
    return mean.round().long() - 1 if torch.allclose(mean.square(), square, rtol=1e-9) else None


def _powers(channels: Tensor) -> tuple[Tensor, Tensor]:
    return 1 + channels.double(), (1 + channels.double()).square()


def _keeps_channels(operation: Operation, width: int) -> bool:
    """Return whether it is a sum, a sequence put together, one factor for all channels, or a LayerNorm over them."""
    if operation.name == "native_layer_norm":
        return list(operation.arguments[1]) == [width]
    if operation.outputs[0].shape[-1:] != (width,):
        return False
    if operation.name == "cat":
        along = operation.arguments[1] if len(operation.arguments) > 1 else 0
        return along % operation.outputs[0].ndim != operation.outputs[0].ndim - 1
    if operation.name in ("mul", "mul_", "div", "div_"):
        wide = [tensor for tensor in operation.inputs if tensor.shape[-1:] == (width,)]
        return len(wide) == 1 and operation.arguments[0] is wide[0]
    return operation.name in SUMS
