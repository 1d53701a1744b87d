"""Find gains and biases of norms that the layers which read the norm can hold just as well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quotient_manifolds.symmetries.norm_scale import NormScale, Reader
from quotient_manifolds.symmetries.symmetries import Refused
from quotient_manifolds.symmetries.trace import Operation, Trace, is_plain, key

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


def find_norms(trace: Trace) -> tuple[list[NormScale], list[Refused]]:
    """Return the norms whose gain the layers that read them can hold, and the others with the reason."""
    answers: dict[str, list[_Answer]] = {}
    for operation in trace.operations:
        for each in _answers(trace, operation):
            answers.setdefault(each.gain, []).append(each)
    found: list[NormScale] = []
    refused: list[Refused] = []
    for gain, its in answers.items():
        result = _norm(trace, gain, its)
        if isinstance(result, str):
            refused.append(Refused(gain, NormScale.kind, result))
        else:
            found.append(result)
    others = dict(item for operation in trace.operations for item in _not_followed(trace, operation))
    refused += [Refused(gain, NormScale.kind, reason) for gain, reason in others.items() if gain not in answers]
    return found, refused


@dataclass(frozen=True, eq=False)
class _Answer:
    """Hold one y = gain * n + bias: y, and the operations that use the parameters for it."""

    gain: str
    bias: str
    y: Tensor
    operations: tuple[Operation, ...]


def _not_followed(trace: Trace, operation: Operation) -> Iterator[tuple[str, str]]:
    """Yield the gain of a norm that is not of the form gain * n + bias along the last axis, with that reason."""
    if operation.name in _NORMS and len(operation.inputs) > 1 and key(operation.inputs[1]) in trace.parts:
        yield trace.parts[key(operation.inputs[1])][0], f"{operation.name} does not scale the last axis alone"
    if operation.name == "add" and len(operation.inputs) == 1 and (gain := _vector(trace, operation.inputs[0])):
        total = operation.outputs[0]
        if any(user.name in _NORMS or (user.name == "mul" and len(user.inputs) == 2) for user in trace.users(total)):
            yield gain, "a number is added to it before it scales"


def _answers(trace: Trace, operation: Operation) -> Iterator[_Answer]:
    if any(output.is_nested for output in operation.outputs):  # its channels have no common shape to be followed in
        return
    if operation.name in ("native_layer_norm", "_fused_rms_norm"):
        _, _, gain, *others = operation.arguments
        bias = others[0] if operation.name == "native_layer_norm" else None
        if isinstance(gain, Tensor) and (name := _vector(trace, gain)):
            shift = _vector(trace, bias) if isinstance(bias, Tensor) else ""
            if shift or not isinstance(bias, Tensor):
                yield _Answer(name, shift, operation.outputs[0], (operation,))
    if operation.name == "mul" and len(operation.inputs) == 2:
        y = operation.outputs[0]
        for gain in operation.inputs:
            if (name := _vector(trace, gain)) and gain.numel() == y.shape[-1] > 1 and y.numel() > gain.numel():
                yield _added(trace, _Answer(name, "", y, (operation,)))


def _added(trace: Trace, answer: _Answer) -> _Answer:
    """Return the answer with the bias that is added to it and to nothing else of it, if there is one."""
    users = trace.users(answer.y)
    if len(users) == 1 and users[0].name == "add" and len(users[0].inputs) == 2 and is_plain(users[0]):
        for bias in users[0].inputs:
            if (name := _vector(trace, bias)) and bias.numel() == answer.y.shape[-1]:
                return _Answer(answer.gain, name, users[0].outputs[0], (*answer.operations, users[0]))
    return answer


def _vector(trace: Trace, tensor: Tensor) -> str:
    """Return the name of the parameter if the tensor is all of a vector of parameters, in order; else nothing."""
    name, numbers = trace.parts.get(key(tensor), ("", tensor))
    whole = bool(name) and tensor.numel() == tensor.shape[-1:].numel() == trace.params[name].numel()
    return name if whole and torch.equal(numbers.flatten(), torch.arange(len(numbers.flatten()))) else ""


def _norm(trace: Trace, gain: str, answers: list[_Answer]) -> NormScale | str:
    """Return the norm with all that read it, or why it has to keep its gain."""
    biases = {each.bias for each in answers}
    if len(biases) > 1:
        return "it is used with several biases"
    (bias,) = biases
    own = {id(operation) for each in answers for operation in each.operations}
    readers: list[Reader] = []
    reading: set[int] = set()
    for each in answers:
        channels = torch.arange(each.y.shape[-1]).expand(each.y.shape)
        for y, numbers in trace.follow(each.y, channels):
            if trace.is_output(y):
                return "the model answers with what it gives"
            for operation in trace.users(y):
                if operation.is_view or id(operation) in own:
                    continue
                reader = _reader(trace, operation, y, numbers)
                if isinstance(reader, str):
                    return reader
                readers.append(reader[0])
                reading |= {id(operation), *reader[1]}
    if not readers:
        return "nothing reads it"
    parts = [(name, torch.arange(trace.params[name].numel())) for name in (gain, bias) if name]
    parts += [(reader.weight, reader.elements) for reader in readers]
    parts += [(reader.bias, reader.bias_elements) for reader in readers if reader.bias_elements is not None]
    if tied := trace.used_besides(parts, own | reading):
        return tied
    return NormScale(
        gain, bias, tuple(_once(readers)), all(_is_centred(trace, each) for each in answers), trace.params[gain].numel()
    )


def _reader(trace: Trace, operation: Operation, y: Tensor, channels: Tensor) -> tuple[Reader, set[int]] | str:
    """Return the linear map by which an operation reads y and what else computes it, or why there is none."""
    if operation.name not in ("mm", "bmm", "addmm"):
        return f"{operation.name} reads what it gives"
    left = operation.arguments[-2]
    along = (channels if key(left) == key(y) else channels.mT).flatten(0, -2)
    if not bool((along == along[:1]).all()):
        return f"{operation.name} reads its channels in several orders"
    if key(left) != key(y):  # W y
        weight, elements = trace.part(left)
        if weight:
            return Reader(weight, elements.mT, along[0]), set()
    elif (found := trace.linear(operation)) is not None:
        return Reader(found.weight, found.elements, along[0], found.bias, found.bias_elements), {id(found.adding)}
    return f"{operation.name} multiplies what it gives by something else than a parameter"


def _once(readers: list[Reader]) -> Iterator[Reader]:
    """Yield every reader once, however often the model asks it."""
    seen: list[Reader] = []
    for reader in readers:
        if not any(reader.weight == other.weight and torch.equal(reader.elements, other.elements) for other in seen):
            seen.append(reader)
            yield reader


def _is_centred(trace: Trace, answer: _Answer) -> bool:
    """Return whether the channels of n have mean 0, up to rounding; numbers that are all 0 do not say."""
    if answer.operations[0].name == "native_layer_norm":
        return True
    gain = trace.params[answer.gain].double().flatten()
    shift = trace.params[answer.bias].double().flatten() if answer.bias else 0.0
    n = (answer.y.double() - shift) / gain
    size = n.abs().mean(dim=-1)
    return bool((n.mean(dim=-1).abs() <= CENTRED * size).all() and (size > 0).any())
