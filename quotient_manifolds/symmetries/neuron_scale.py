"""Find neurons whose activation passes positive factors, as a squared ReLU does, and that are in no symmetric pair."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quotient_manifolds.symmetries.freedom import Freedom, gaussian, write
from quotient_manifolds.symmetries.norm_scale import Reader
from quotient_manifolds.symmetries.norm_uses import Reading, reading_of
from quotient_manifolds.symmetries.operations import Operation, key
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.trace import Trace

_RECTIFIERS = ("relu", "leaky_relu", "abs")


@dataclass(frozen=True, eq=False)
class NeuronScale(Freedom):
    """Describe V s(W x + b), where s(a z) = a^p s(z) for a > 0, elementwise: a ReLU has p = 1, its square p = 2.

    (diag(a) W, diag(a) b, V diag(a)^-p) is the same function. writer: W and b. reader: V, whose channels are the units
    of W. degree: p. The one place is where every row of (W, b) has length 1, or, with by_reader, every column of V.
    """

    writer: Reader
    reader: Reader
    degree: float
    by_reader: bool
    kind: ClassVar[str] = "neurons"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that a move touches, each once."""
        return tuple(dict.fromkeys((*(name for name, _ in self.writer.parts), self.reader.weight)))

    @property
    def families(self) -> dict[str, int]:
        """Return the dimension of the moves that leave the function alone, by its name."""
        return {"scale of a neuron": self.writer.elements.shape[1]}

    def fold(self, params: Params) -> None:
        """Make the length of every row, or column, 1, in place; what is 0 stays."""
        if self.by_reader:
            V = self.reader.matrix(params)
            square = V.new_zeros(self.writer.elements.shape[1])
            square.index_add_(0, self.reader.channels.to(V.device), V.square().sum(dim=1))
        else:
            square = self.writer.matrix(params).square().sum(dim=0) + self.writer.constant(params).square()
        length = torch.where(square > 0, square, 1.0).sqrt()
        self._scale(params, length ** (1 / self.degree) if self.by_reader else 1 / length)

    def move(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Multiply the rows by exp(size z / p), in place; with `control`, without what makes up for it."""
        z = gaussian(params[self.writer.weight], generator, self.writer.elements.shape[1])
        self._scale(params, (size / max(self.degree, 1.0) * z).exp(), make_up=not control)

    def _scale(self, params: Params, factor: Tensor, make_up: bool = True) -> None:
        b = self.writer.constant(params)
        self.writer.set(params, self.writer.matrix(params) * factor, b * (factor - 1))
        if make_up:
            V = self.reader.matrix(params)
            by = factor.to(V.device)[self.reader.channels, None] ** self.degree
            write(params, self.reader.weight, self.reader.elements, V / by)


def find_neuron_scales(trace: Trace, moved: Collection[str] = ()) -> Iterator[NeuronScale]:
    """Yield the neurons of two linear maps with a power of a ReLU between them, of which no pair can be made.

    moved: the parameters of symmetric pairs. A plain ReLU makes a pair, but where one of its maps is in another.
    """
    for operation in trace.operations:
        linear = trace.linear(operation)
        found = _passed(trace, linear.y) if linear is not None else None
        if linear is None or found is None:
            continue
        read, degree = found
        units = torch.arange(linear.elements.shape[1])
        writer = Reader(linear.weight, linear.elements, units, linear.bias, linear.bias_elements)
        reader = read.reader
        whole = torch.equal(reader.channels.sort().values, units)
        known = {id(operation), id(linear.adding), *read.operations}
        parts = [*writer.parts, (reader.weight, reader.elements)]
        taken = [name in moved for name, _ in (parts[0], parts[-1])]
        if not whole or all(taken) or (degree == 1 and not any(taken)) or writer.weight == reader.weight:
            continue
        if not trace.used_besides(parts, known):
            yield NeuronScale(writer, reader, degree, by_reader=taken[0])


def _passed(trace: Trace, y: Tensor) -> tuple[Reading, float] | None:
    """Return the linear map that reads a power of a ReLU of y, and the power; None if anything else is done with y."""
    degree, rectified = 1.0, False
    channels = torch.arange(y.shape[-1]).expand(y.shape)
    while True:
        user = trace.only_user(y)
        view = next((each for each in trace.follow(y, channels) if user in trace.users(each[0])), None)
        if user is None or view is None:
            return None
        y, channels = view
        power = _power(user)
        if power is None:
            found = reading_of(trace, user, y, channels)
            return (found, degree) if rectified and isinstance(found, Reading) else None
        degree, rectified, y = degree * power, True, user.outputs[0]


def _power(operation: Operation) -> float | None:
    """Return p if an operation s has s(a z) = a^p s(z) for a > 0, number by number; else None."""
    given = operation.inputs
    if operation.name in _RECTIFIERS:
        return 1.0
    if operation.name == "pow" and len(given) == 1 and operation.arguments[1] in (2, 3, 4):
        return float(operation.arguments[1])
    return 2.0 if operation.name == "mul" and len({key(each) for each in given}) == 1 and len(given) == 2 else None
