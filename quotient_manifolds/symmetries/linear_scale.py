"""Find gains and biases that come after a linear map, which can hold them just as well: batch norms, layer scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from quotient_manifolds.symmetries.freedom import Freedom, gaussian, typical
from quotient_manifolds.symmetries.norm_scale import Reader
from quotient_manifolds.symmetries.operations import Key, Operation, key
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.trace import Part, Trace

_BATCH_NORMS = {  # where eps stands; statistics come before it
    "native_batch_norm": 7,
    "cudnn_batch_norm": 7,
    "_native_batch_norm_legit_no_training": 6,
    "_batch_norm_no_update": 6,
}


@dataclass(frozen=True, eq=False)
class LinearScale(Freedom):
    """Describe y = gain * factor * (W x + b - mean) + bias, where mean and factor are no parameters.

    A batch norm in eval mode after a linear map or a convolution, or, with a mean of 0 and a factor of 1, a gain alone.
    (gain / a, diag(a) W) is the same function for any a without zeros, and so is a shift of b that the bias makes up
    for; the bias holds what is constant if there is no b. linear: W, b, and for each unit the channel of the gain.
    The gain becomes 1, and the bias 0 if there is a b.
    """

    gain: str
    bias: str
    linear: Reader
    mean: Tensor
    factor: Tensor
    kind: ClassVar[str] = "scale"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that a move takes or touches, each once."""
        return tuple(
            dict.fromkeys(name for name in (self.gain, self.bias, self.linear.weight, self.linear.bias) if name)
        )

    @property
    def families(self) -> dict[str, int]:
        """Return the dimensions of the moves that leave the function alone, by their names."""
        found = {"gain after a linear map": len(self.mean)}
        return {**found, "bias after a linear map": len(self.mean)} if self.bias_is_free else found

    @property
    def bias_is_free(self) -> bool:
        """Return whether b can hold the bias."""
        return bool(self.bias and self.linear.bias)

    @property
    def held_bias(self) -> float:
        """Return the number that the bias is for every channel after a fold."""
        return 0.0

    @property
    def constant(self) -> tuple[str, ...]:
        """Return the gain, and the bias if b can hold it."""
        return (self.gain, self.bias) if self.bias_is_free else (self.gain,)

    def fold(self, params: Params) -> None:
        """Make the gain 1, and the bias 0 if there is a b, in place."""
        gain, bias = self.read_norm(params)
        self.set_norm(params, torch.ones_like(gain), torch.zeros_like(bias))

    fold_norm = fold

    def move(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Multiply the gain by exp(size z), and shift the bias if there is a b, in place."""
        gain, bias = self.read_norm(params)
        shift = size * typical(bias) * gaussian(bias, generator) if self.bias_is_free else torch.zeros_like(bias)
        shift = torch.where(gain == 0, 0.0, shift)  # nothing can make up for that of a channel which is the bias alone
        target = gain * (size * gaussian(gain, generator)).exp()
        if control:
            self._write(params, target, bias + shift)
        else:
            self.set_norm(params, target, bias + shift)

    def read_norm(self, params: Params) -> tuple[Tensor, Tensor]:
        """Return gain and bias in float64."""
        gain = params[self.gain].double().flatten()
        return gain, params[self.bias].double().flatten() if self.bias else torch.zeros_like(gain)

    def set_norm(self, params: Params, gain: Tensor, bias: Tensor) -> None:
        """Give it a gain, and a bias if there is a b, and the linear map what makes up for it, in place."""
        before, shift = self.read_norm(params)
        mean, factor = self.mean.to(gain.device), self.factor.to(gain.device)
        ratio = torch.where(gain == 0, 1.0, before / gain)
        W = self.linear.matrix(params)
        constant = torch.zeros_like(gain)
        if self.linear.bias:
            held = self.linear.constant(params)
            moved = torch.where(gain == 0, 0.0, (shift - bias) / (gain * factor)) if self.bias else 0.0
            constant = mean + ratio * (held - mean) + moved - held
        else:
            bias = shift - before * factor * mean + gain * factor * mean
        self.linear.set(params, W * ratio, constant)
        self._write(params, gain, bias)

    def _write(self, params: Params, gain: Tensor, bias: Tensor) -> None:
        for name, numbers in ((self.gain, gain), (self.bias, bias)):
            if name:
                params[name] = numbers.to(params[name].dtype).view_as(params[name])


@dataclass(frozen=True, eq=False)
class Scaled:
    """Hold a linear scale, and what it gives: y, with its channels along an axis, by which operations."""

    scale: LinearScale
    y: Tensor
    axis: int
    operations: tuple[Operation, ...]


def find_linear_scales(trace: Trace) -> Iterator[Scaled]:
    """Yield the gains that multiply what one linear map or convolution answers, and nothing else."""
    linears = _linear_answers(trace)
    for operation in trace.operations:
        for z, gain, bias, mean, factor, axis in _scales(trace, operation):
            found = linears.get(key(z))
            if found is None or found.user is not operation or found.axis != axis - z.ndim:
                continue
            parts = [(name, torch.arange(trace.params[name].numel())) for name in (gain, bias) if name]
            known = {id(operation), *map(id, found.operations)}
            if not trace.used_besides([*parts, *found.linear.parts], known):
                scale = LinearScale(gain, bias, found.linear, mean, factor)
                yield Scaled(scale, operation.outputs[0], axis, (*found.operations, operation))


@dataclass(frozen=True, eq=False)
class _Linear:
    """Hold a linear map or convolution whose answers go into one operation, and the axis of its units, from the end."""

    linear: Reader
    user: Operation
    axis: int
    operations: tuple[Operation, ...]


def _linear_answers(trace: Trace) -> dict[Key, _Linear]:
    """Return the linear maps and convolutions by what they answer, and all views of it that keep units on one axis."""
    found: dict[Key, _Linear] = {}
    for operation in trace.operations:
        each = _linear(trace, operation)
        user = trace.only_user(each[1]) if each is not None else None
        if each is None or user is None:
            continue
        linear, y, axis, operations = each
        for view, numbers in trace.follow(y, _units(y.shape, axis)):
            for along in {axis - y.ndim, -1, 1 - view.ndim}:
                if view.ndim >= -along and torch.equal(numbers, _units(view.shape, along)):
                    found[key(view)] = _Linear(linear, user, along, operations)
    return found


def _units(shape: torch.Size, axis: int) -> Tensor:
    own = [1] * len(shape)
    own[axis] = -1
    return torch.arange(shape[axis]).view(own).expand(shape)


def _linear(trace: Trace, operation: Operation) -> tuple[Reader, Tensor, int, tuple[Operation, ...]] | None:
    """Return a linear map, its answer, the axis of its units, and what computes it."""
    if operation.name == "convolution" and not operation.arguments[6]:
        weight, *bias = (trace.parts.get(key(each)) for each in operation.arguments[1:3] if each is not None)
        if weight is None or None in bias:
            return None
        rows = weight[1].flatten(1).mT
        own: tuple[Part, ...] = tuple(part for part in bias if part is not None)
        name, elements = own[0] if own else ("", None)
        return (
            Reader(weight[0], rows, torch.arange(rows.shape[1]), name, elements),
            operation.outputs[0],
            1,
            (operation,),
        )
    found = trace.linear(operation)
    if found is None:
        return None
    channels = torch.arange(found.elements.shape[1])
    reader = Reader(found.weight, found.elements, channels, found.bias, found.bias_elements)
    adding = () if found.adding is None else (found.adding,)
    return reader, found.y, found.y.ndim - 1, (operation, *adding)


def _scales(trace: Trace, operation: Operation) -> Iterator[tuple[Tensor, str, str, Tensor, Tensor, int]]:
    """Yield what an operation scales, gain, bias, mean and factor, and along which axis."""
    if operation.name in ("mul", "mul_") and len(operation.inputs) == 2:
        for z, gain in (operation.inputs, operation.inputs[::-1]):
            name = _whole(trace, gain)
            long = [axis for axis, size in enumerate(gain.shape) if size > 1]
            if name and len(long) == 1 and z.ndim >= gain.ndim and z.numel() > gain.numel():
                zeros = torch.zeros(gain.numel(), dtype=torch.float64)
                yield z, name, "", zeros, torch.ones_like(zeros), long[0] + z.ndim - gain.ndim
    if operation.name in _BATCH_NORMS and not any(each is True for each in operation.arguments):
        z, gain, bias, mean, variance, *_ = operation.arguments
        if gain is not None and bias is not None and mean is not None and _whole(trace, gain) and _whole(trace, bias):
            eps: Any = operation.arguments[_BATCH_NORMS[operation.name]]
            factor = (variance.double() + eps).rsqrt()
            yield z, _whole(trace, gain), _whole(trace, bias), mean.double().clone(), factor, 1


def _whole(trace: Trace, tensor: Tensor) -> str:
    """Return the name of a parameter if the tensor is all of it, in order; else nothing."""
    name, numbers = trace.parts.get(key(tensor), ("", tensor))
    whole = bool(name) and numbers.numel() == trace.params[name].numel()
    return name if whole and torch.equal(numbers.flatten(), torch.arange(numbers.numel())) else ""
