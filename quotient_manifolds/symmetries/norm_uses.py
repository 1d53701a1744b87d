"""Record how norms are used: what scales, what is added, which linear maps read the answer, and what else does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from quotient_manifolds.symmetries.norm_scale import Reader
from quotient_manifolds.symmetries.operations import SUMS, Key, Operation, is_plain, key
from quotient_manifolds.symmetries.trace import Trace

CENTRED = 1e-5  # of the mean size of the channels: so small is a mean of 0, where a norm computes in float32
_NORMS = frozenset(
    [
        "native_layer_norm",
        "_fused_rms_norm",
        "native_group_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_no_training",
        "_batch_norm_no_update",
        "cudnn_batch_norm",
    ]
)

_SHAPES = ("zeros_like", "empty_like", "ones_like", "full_like", "new_zeros", "new_empty", "new_ones", "new_full")
_CHOICES = ("index", "index_select")  # of rows, as those that go to an expert


@dataclass(frozen=True, eq=False)
class Reading:
    """Hold a linear map that reads a norm's answer, and the operations (by id) that compute it."""

    reader: Reader
    operations: frozenset[int]


@dataclass(frozen=True, eq=False)
class NormUse:
    """Describe y = gain * n + bias, wherever the model computes it with this gain.

    gain, bias: names of parameters, "" if there is none. offset: what is added to the parameter to make it the gain.
    operations: that use them, by id. size: the number of channels. centred: those of n have mean 0. readings: the
    linear maps that read y, each once. sums: the sums that y goes into with its channels in order. obstacles: one
    reason for everything that reads y and is no linear map. answers: every y.
    """

    gain: str
    offset: float
    bias: str
    operations: frozenset[int]
    size: int
    centred: bool
    readings: tuple[Reading, ...]
    sums: tuple[Operation, ...]
    obstacles: tuple[str, ...]
    answers: tuple[Tensor, ...]


def norm_uses(trace: Trace) -> Iterator[NormUse]:
    """Yield how every norm along the last axis is used; one without a gain, each time it is."""
    answers: dict[str, list[_Answer]] = {}
    raised = raised_vectors(trace)
    for index, operation in enumerate(trace.operations):
        for each in _answers(trace, operation, raised):
            answers.setdefault(each.gain or str(index), []).append(each)
    for alike in answers.values():
        yield _norm_use(trace, alike)


def not_followed(trace: Trace, operation: Operation) -> Iterator[tuple[str, str]]:
    """Yield the gain of a norm that is not of the form gain * n + bias along the last axis, with that reason."""
    if operation.name in _NORMS and len(operation.inputs) > 1 and key(operation.inputs[1]) in trace.parts:
        yield trace.parts[key(operation.inputs[1])][0], f"{operation.name} does not scale the last axis alone"


@dataclass(frozen=True, eq=False)
class _Gain:
    """Hold a vector of gains: a parameter, and what is added to it by which operation."""

    name: str
    offset: float = 0.0
    operations: tuple[Operation, ...] = ()


def raised_vectors(trace: Trace) -> dict[Key, _Gain]:
    """Return the sums of a vector that is a parameter and a number, such as 1 + weight."""
    found: dict[Key, _Gain] = {}
    for operation in trace.operations:
        if operation.name == "add" and len(operation.inputs) == 1 and is_plain(operation):
            name = _vector(trace, operation.inputs[0])
            numbers = [each for each in operation.arguments if isinstance(each, (int, float))]
            if name and len(numbers) == 1:
                for view, _ in trace.follow(operation.outputs[0], operation.outputs[0]):
                    found[key(view)] = _Gain(name, float(numbers[0]), (operation,))
    return found


@dataclass(frozen=True, eq=False)
class _Answer:
    """Hold one y = gain * n + bias: y, and the operations that compute it from n."""

    gain: str
    bias: str
    y: Tensor
    operations: tuple[Operation, ...]
    offset: float = 0.0


def _answers(trace: Trace, operation: Operation, raised: Mapping[Key, _Gain]) -> Iterator[_Answer]:
    if any(output.is_nested for output in operation.outputs):  # its channels have no common shape to be followed in
        return
    if operation.name in ("native_layer_norm", "_fused_rms_norm"):
        _, _, gain, *others = operation.arguments
        bias = others[0] if operation.name == "native_layer_norm" else None
        if gain is None and bias is None:
            yield _Answer("", "", operation.outputs[0], (operation,))
        if isinstance(gain, Tensor) and (found := _gain(trace, gain, raised)):
            shift = _vector(trace, bias) if isinstance(bias, Tensor) else ""
            if shift or not isinstance(bias, Tensor):
                yield _answer(found, shift, operation.outputs[0], operation)
    if operation.name == "mul" and len(operation.inputs) == 2:
        y = operation.outputs[0]
        for gain in operation.inputs:
            if gain.numel() == y.shape[-1] > 1 and y.numel() > gain.numel() and (found := _gain(trace, gain, raised)):
                yield _added(trace, _answer(found, "", y, operation))


def _gain(trace: Trace, tensor: Tensor, raised: Mapping[Key, _Gain]) -> _Gain | None:
    name = _vector(trace, tensor)
    return _Gain(name) if name else raised.get(key(tensor))


def _answer(gain: _Gain, bias: str, y: Tensor, operation: Operation) -> _Answer:
    return _Answer(gain.name, bias, y, (*gain.operations, operation), gain.offset)


def _added(trace: Trace, answer: _Answer) -> _Answer:
    """Return the answer with the bias that is added to it and to nothing else of it, if there is one."""
    users = trace.users(answer.y)
    if len(users) == 1 and users[0].name == "add" and len(users[0].inputs) == 2 and is_plain(users[0]):
        for bias in users[0].inputs:
            if (name := _vector(trace, bias)) and bias.numel() == answer.y.shape[-1]:
                return replace(answer, bias=name, y=users[0].outputs[0], operations=(*answer.operations, users[0]))
    return answer


def _vector(trace: Trace, tensor: Tensor) -> str:
    """Return the name of the parameter if the tensor is all of a vector of parameters, in order; else nothing."""
    name, numbers = trace.parts.get(key(tensor), ("", tensor))
    whole = bool(name) and tensor.numel() == tensor.shape[-1:].numel() == trace.params[name].numel()
    return name if whole and torch.equal(numbers.flatten(), torch.arange(len(numbers.flatten()))) else ""


def _norm_use(trace: Trace, answers: list[_Answer]) -> NormUse:
    own = frozenset(id(operation) for each in answers for operation in each.operations)
    obstacles: list[str] = []
    readings: list[Reading] = []
    sums: list[Operation] = []
    for each in answers:
        for y, numbers in _rows_of(trace, each.y):
            if trace.is_output(y):
                obstacles.append("the model answers with what it gives")
            for operation in trace.users(y):
                if operation.is_view or id(operation) in own or operation.name in (*_SHAPES, *_CHOICES):
                    continue
                reading = reading_of(trace, operation, y, numbers)
                if isinstance(reading, Reading):
                    readings.append(reading)
                    continue
                obstacles.append(reading)
                if operation.name in SUMS and is_plain(operation) and torch.equal(numbers, _in_order(numbers)):
                    sums.append(operation)
    if len({(each.bias, each.offset) for each in answers}) > 1:
        obstacles, readings, sums = ["it is used with several biases"], [], []
    centred = all(_is_centred(trace, each) for each in answers)
    size = answers[0].y.shape[-1]
    first = answers[0]
    found = tuple(_once(readings))
    return NormUse(
        gain=first.gain,
        offset=first.offset,
        bias=first.bias,
        operations=own,
        size=size,
        centred=centred,
        readings=found,
        sums=tuple(sums),
        obstacles=tuple(obstacles),
        answers=tuple(each.y for each in answers),
    )


def _rows_of(trace: Trace, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield y and all views of it and of rows that are chosen from it, with the channel of every entry."""
    waiting = [(y, torch.arange(y.shape[-1]).expand(y.shape))]
    while waiting:
        for view, numbers in trace.follow(*waiting.pop()):
            yield view, numbers
            for operation in trace.users(view):
                if operation.name in _CHOICES and key(operation.arguments[0]) == key(view):
                    rows = tree_map_only(Tensor, Tensor.cpu, operation.arguments[1:])
                    waiting.append((operation.outputs[0], operation.call(numbers, *rows)))


def _in_order(numbers: Tensor) -> Tensor:
    return torch.arange(numbers.shape[-1]).expand(numbers.shape)


def reading_of(trace: Trace, operation: Operation, y: Tensor, channels: Tensor) -> Reading | str:
    """Return the linear map by which an operation reads y, or why there is none."""
    if operation.name not in ("mm", "bmm", "addmm"):
        return f"{operation.name} reads what it gives"
    left = operation.arguments[-2]
    along = (channels if key(left) == key(y) else channels.mT).flatten(0, -2)
    if not bool((along == along[:1]).all()):
        return f"{operation.name} reads its channels in several orders"
    if key(left) != key(y):  # W y
        weight, elements = trace.part(left)
        if weight:
            return Reading(Reader(weight, elements.mT, along[0]), frozenset([id(operation)]))
    elif (found := trace.linear(operation)) is not None:
        reader = Reader(found.weight, found.elements, along[0], found.bias, found.bias_elements)
        return Reading(reader, frozenset([id(operation), id(found.adding)]))
    return f"{operation.name} multiplies what it gives by something else than a parameter"


def _once(readings: list[Reading]) -> Iterator[Reading]:
    """Yield every reader once, however often the model asks it, with all the operations that do."""
    left = list(readings)
    while left:
        reader = left[0].reader
        alike = [each for each in left if _same(each.reader, reader)]
        left = [each for each in left if each not in alike]
        yield Reading(reader, frozenset().union(*(each.operations for each in alike)))


def _same(reader: Reader, other: Reader) -> bool:
    return reader.weight == other.weight and torch.equal(reader.elements, other.elements)


def _is_centred(trace: Trace, answer: _Answer) -> bool:
    """Return whether the channels of n have mean 0, up to rounding; numbers that are all 0 do not say."""
    if answer.operations[0].name == "native_layer_norm":
        return True
    gain = trace.params[answer.gain].double().flatten() + answer.offset
    shift = trace.params[answer.bias].double().flatten() if answer.bias else 0.0
    n = (answer.y.double() - shift) / gain
    size = n.abs().mean(dim=-1)
    return bool((n.mean(dim=-1).abs() <= CENTRED * size).all() and (size > 0).any())
