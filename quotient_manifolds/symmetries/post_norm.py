"""Find what is free about a norm that keeps its gain, for its answer goes into a residual stream as well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quotient_manifolds.symmetries.freedom import Freedom, gaussian, read, typical, write
from quotient_manifolds.symmetries.norm_scale import Reader
from quotient_manifolds.symmetries.norm_uses import NormUse, Reading
from quotient_manifolds.symmetries.operations import SUMS, Key, Operation, is_plain, key
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.trace import Part, Trace


@dataclass(frozen=True, eq=False)
class UnseenDirection(Freedom):
    """Describe linear maps W y + b that read y = gain * n + bias, where the channels of n have mean 0.

    With v = 1 / gain, v^T y is the constant v^T bias. So (W + u v^T, b - u v^T bias) is the same function for any u,
    which needs a b unless the norm has no bias. The one place is where W v = 0: an orthogonal projection, which
    amplifies nothing where gains are small. gain, bias: names, "" if there is none. offset: what is added to the gain.
    """

    gain: str
    offset: float
    bias: str
    readers: tuple[Reader, ...]
    kind: ClassVar[str] = "unseen direction"

    @property
    def unseen(self) -> tuple[Reader, ...]:
        """Return the readers, all of which have a direction that each of their units does not see."""
        return self.readers

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that a move takes or touches, each once."""
        held = (name for reader in self.readers for name, _ in reader.parts)
        return tuple(dict.fromkeys((*held, *(name for name in (self.gain, self.bias) if name))))

    @property
    def families(self) -> dict[str, int]:
        """Return the dimensions of the moves that leave the function alone, by their name."""
        return {"direction no reader of a norm sees": sum(reader.elements.shape[1] for reader in self.readers)}

    def fold(self, params: Params) -> None:
        """Project the rows of W onto what is orthogonal to 1 / gain, in place."""
        for reader in self.readers:
            v, constant = self._direction(params, reader)
            W = reader.matrix(params)
            u = v @ W / v.square().sum()
            reader.set(params, W - v[:, None] * u, constant * u)

    def move(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Add a multiple of 1 / gain to every row of W, in place; with `control`, of another vector of that size."""
        for reader in self.readers:
            v, constant = self._direction(params, reader)
            W = reader.matrix(params)
            u = size * typical(W) * gaussian(W, generator, W.shape[1])
            if control:
                v = gaussian(v, generator) * typical(v)
            reader.set(params, W + v[:, None] * u, -constant * u)

    def _direction(self, params: Params, reader: Reader) -> tuple[Tensor, Tensor]:
        """Return 1 / gain, scaled to a maximum of 1, and its product with the bias."""
        gain = torch.ones(len(reader.channels)).double()
        if self.gain:
            gain = params[self.gain].double().flatten() + self.offset
        bias = params[self.bias].double().flatten() if self.bias else torch.zeros_like(gain)
        smallest = gain.abs().min()
        v = smallest / gain if smallest > 0 else (gain == 0).double()
        return v.to(params[reader.weight].device)[reader.channels], (v @ bias).to(params[reader.weight].device)


@dataclass(frozen=True, eq=False)
class NormShift(Freedom):
    """Describe the bias of a norm y whose answer goes to linear maps W_i y + b_i and into sums with other linear maps.

    (bias + c, b_i - W_i c, b_j - c) is the same function, b_j being a bias that is added to the sum just as y is.
    writers: those b_j, by flat indices.
    """

    bias: str
    readers: tuple[Reader, ...]
    writers: tuple[Part, ...]
    size: int
    kind: ClassVar[str] = "bias in the residual"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that a move takes or touches, each once."""
        parts = (*(part for reader in self.readers for part in reader.parts), *self.writers)
        return tuple(dict.fromkeys((self.bias, *(name for name, _ in parts))))

    @property
    def families(self) -> dict[str, int]:
        """Return the dimension of the moves that leave the function alone, by its name."""
        return {"bias of a norm": self.size}

    @property
    def constant(self) -> tuple[str, ...]:
        """Return the bias."""
        return (self.bias,)

    def fold(self, params: Params) -> None:
        """Make the bias 0, in place."""
        self._shift(params, -params[self.bias].double().flatten())

    def move(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Shift the bias by a random vector, in place."""
        bias = params[self.bias].double().flatten()
        self._shift(params, size * typical(bias) * gaussian(bias, generator), make_up=not control)

    def _shift(self, params: Params, c: Tensor, make_up: bool = True) -> None:
        bias = params[self.bias]
        params[self.bias] = (bias.double() + c.view_as(bias)).to(bias.dtype)
        if not make_up:
            return
        for reader in self.readers:
            W = reader.matrix(params)
            reader.set(params, W, -(c[reader.channels] @ W))
        for name, elements in self.writers:
            write(params, name, elements, read(params, name, elements) - c)


def find_unseen(trace: Trace, use: NormUse) -> Iterator[UnseenDirection]:
    """Yield the readers of a norm that have a direction of their own which they do not see."""

    def has_one(reading: Reading) -> bool:
        reader = reading.reader
        whole = len(reader.channels) == use.size and bool(reader.bias or not use.bias)
        return whole and not trace.used_besides(reader.parts, reading.operations)

    readers = tuple(reading.reader for reading in use.readings if has_one(reading))
    if use.centred and readers:
        yield UnseenDirection(use.gain, use.offset, use.bias, readers)


def find_norm_shift(trace: Trace, use: NormUse, biases: Mapping[Key, LoneBias]) -> Iterator[NormShift]:
    """Yield the bias of a norm if everything that reads the norm, or is added to it, can hold it."""
    readers = tuple(reading.reader for reading in use.readings)
    if not use.bias or len(use.obstacles) > len(use.sums) or not all(reader.bias for reader in readers):
        return
    writers = [bias_beside(trace, operation, biases) for operation in use.sums]
    found = [writer for writer in writers if writer is not None]
    if not found or len(found) < len(writers):
        return
    parts = [(use.bias, torch.arange(trace.params[use.bias].numel()))]
    parts += [reader.parts[1] for reader in readers]
    parts += [writer.part for writer in found]
    known = use.operations.union(
        *(reading.operations for reading in use.readings), *(each.operations for each in found)
    )
    if not trace.used_besides(parts, known):
        yield NormShift(use.bias, readers, tuple(_distinct(found)), use.size)


@dataclass(frozen=True, eq=False)
class LoneBias:
    """Hold the bias of a linear map whose answers go into one operation only."""

    part: Part
    operations: frozenset[int]
    user: Operation


def _distinct(found: list[LoneBias]) -> Iterator[Part]:
    seen: list[Part] = []
    for each in found:
        if not any(each.part[0] == name and torch.equal(each.part[1], elements) for name, elements in seen):
            seen.append(each.part)
            yield each.part


def lone_biases(trace: Trace) -> dict[Key, LoneBias]:
    """Return the biases of linear maps by what these answer, in the form in which a single operation takes it."""
    found: dict[Key, LoneBias] = {}
    for operation in trace.operations:
        linear = trace.linear(operation)
        if linear is None or linear.bias_elements is None:
            continue
        only = trace.only_user(linear.y)
        if only is not None:
            known = frozenset([id(operation), id(linear.adding)])
            channels = torch.arange(linear.y.shape[-1]).expand(linear.y.shape)
            for view, numbers in trace.follow(linear.y, channels):
                if torch.equal(numbers, torch.arange(numbers.shape[-1]).expand(numbers.shape)):
                    found[key(view)] = LoneBias((linear.bias, linear.bias_elements), known, only)
    return found


def bias_beside(trace: Trace, first: Operation, biases: Mapping[Key, LoneBias]) -> LoneBias | None:
    """Return a bias that is added to all of a sum, once, before anything else is done with the sum."""
    waiting: list[Operation | None] = [first]
    seen = set[int]()
    while waiting:
        total = waiting.pop(0)
        if total is None or id(total) in seen or total.name not in SUMS or not is_plain(total):
            continue
        seen.add(id(total))
        for addend in total.inputs:
            bias = biases.get(key(addend))
            if bias is not None and bias.user is total and addend.shape == total.outputs[0].shape:
                return bias
        waiting.append(trace.only_user(total.outputs[0]))
    return None
