"""Gains and biases of norms that the layers which read the norm can hold just as well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries.checks import check_model, check_weights
from quotient_manifolds.symmetries.outputs import Evaluate, ModelOutputs
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.symmetries import Refused
from quotient_manifolds.symmetries.trace import Operation, Trace, key

KIND = "norm"
HOLDS = 1e3  # times the rounding noise of the output: as much as it may change
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


@dataclass(frozen=True, eq=False)
class Reader:
    """Describe a linear map W y + b that reads a norm's answer y: which numbers of which parameters it is.

    weight: name of a parameter; elements (k, out) are flat indices into it, and row k is multiplied by channels[k] of
    the norm. bias: name of a parameter, "" if there is none; bias_elements (out,) are flat indices into it.
    """

    weight: str
    elements: Tensor
    channels: Tensor
    bias: str = ""
    bias_elements: Tensor | None = None


@dataclass(frozen=True, eq=False)
class NormScale:
    """Describe a norm y = gain * n + bias whose answer is read by linear maps alone.

    (gain, bias, W, b) and (1, 0, W diag(gain), b + W bias) are the same function, so the gain may be any vector without
    zeros, and the bias any vector if every reader has a bias of its own. centred: the channels of n have mean 0, as
    those of a LayerNorm; then each row of W may be shifted by any number, too. size: the number of channels.
    """

    gain: str
    bias: str
    readers: tuple[Reader, ...]
    centred: bool
    size: int

    @property
    def families(self) -> dict[str, int]:
        """Return the dimensions of the moves that leave the function alone, by their names."""
        seen = self.centred and (self.bias_is_free or not self.bias)
        unseen = sum(reader.elements.shape[1] for reader in self.readers if len(reader.channels) == self.size)
        found = {
            "gain of a norm": self.size,
            "bias of a norm": self.size * self.bias_is_free,
            "direction no reader of a norm sees": unseen * seen,
        }
        return {name: size for name, size in found.items() if size}

    @property
    def bias_is_free(self) -> bool:
        """Return whether the readers can hold the bias."""
        return bool(self.bias) and all(reader.bias for reader in self.readers)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that a move touches, each once."""
        others = (name for reader in self.readers for name in (reader.weight, reader.bias))
        return tuple(dict.fromkeys(name for name in (self.gain, self.bias, *others) if name))

    def fold(self, params: Params) -> None:
        """Make the gain 1, the bias 0 (or bias / gain where a reader has none) and rows of W centred, in place."""
        gain = params[self.gain].double().flatten()
        shift = params[self.bias].double().flatten() if self.bias else torch.zeros_like(gain)
        for reader in self.readers:
            flat = params[reader.weight].reshape(-1)
            W = flat[reader.elements].double()
            if self.bias_is_free and reader.bias_elements is not None:
                b = params[reader.bias].reshape(-1)
                b[reader.bias_elements] = (b[reader.bias_elements].double() + shift[reader.channels] @ W).to(b.dtype)
                params[reader.bias] = b.view_as(params[reader.bias])
            W = W * gain[reader.channels, None]
            if self.centred and (self.bias_is_free or not self.bias) and len(reader.channels) == self.size:
                W = W - W.mean(dim=0)
            flat[reader.elements] = W.to(flat.dtype)
            params[reader.weight] = flat.view_as(params[reader.weight])
        if self.bias:
            left = torch.zeros_like(shift) if self.bias_is_free else shift / gain
            params[self.bias] = left.to(params[self.bias].dtype).view_as(params[self.bias])
        params[self.gain] = torch.ones_like(params[self.gain])


@dataclass(frozen=True, eq=False)
class FoldedNorms:
    """Hold the parameters of the same function whose norms have gain 1 and bias 0, where their readers can hold them.

    params: all parameters of the model, a tied one once, in the model's precision. scales: the norms that were folded.
    constant: names of the gains that are 1 and of the biases that are 0 now. refused: norms that keep theirs, with the
    reason. change: of the output, relative, in float64, before the parameters are rounded to the model's precision.
    """

    params: Params
    scales: tuple[NormScale, ...]
    refused: tuple[Refused, ...]
    change: float

    @property
    def constant(self) -> tuple[str, ...]:
        """Return the names of gains and biases that are the same for every model of this function."""
        biases = (scale.bias for scale in self.scales if scale.bias_is_free)
        return tuple(dict.fromkeys((*(scale.gain for scale in self.scales), *biases)))


def fold_norms(model: nn.Module, inputs: Any, *, evaluate: Evaluate | None = None) -> FoldedNorms:
    """Return the parameters of the same function whose norms have gain 1 and bias 0, taken into the layers that read.

    A norm answers y = gain * n + bias. Where only linear maps read it, W y + b = (W diag(gain)) n + (b + W bias): the
    function does not tell how gain and W share their size, but every measure of the weights does. The norm's answer is
    followed in one recorded run on the inputs, through views, casts and parts, so no class needs to be known: LayerNorm
    and RMSNorm, of torch or written out, in front of Linear, Conv1D or fused projections. If the mean over channels is
    taken off n, rows of W diag(gain) have mean 0 afterwards.

    inputs and `evaluate` as for `prove_symmetries`. Each norm is tried on them in float64, and one that changes the
    output is not folded. What the model does not run on these inputs is not seen: an expert that no token goes to, a
    branch, an embedding that is tied to a reader where the inputs are embeddings. Elsewhere the function may then
    differ, so give inputs that go everywhere. A vector of gains that scales anything else is treated as a norm's.
    `constant` names what is to be frozen for measures that should not see the gains:

    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True).eval()
    >>> folded = fold_norms(layer, torch.randn(2, 3, 8))
    >>> folded.constant
    ('norm1.weight', 'norm2.weight', 'norm1.bias', 'norm2.bias')
    >>> _ = layer.load_state_dict(folded.params)

    Raises ValueError in train mode, for outputs that are empty, random or NaN, and for weights that are no finite
    floating point numbers.
    """
    check_model(model)
    own = {name: value.detach() for name, value in model.named_parameters()}
    check_weights(own, own)
    with torch.no_grad():
        outputs = ModelOutputs(model, inputs, evaluate)
        found, refused = find_norms(model, inputs, evaluate)
        most = HOLDS * outputs.rounding_noise(own, torch.Generator().manual_seed(0))

        def folded(scales: list[NormScale]) -> Params:
            params = {name: value.clone() for name, value in outputs.params.items()}
            for scale in scales:
                scale.fold(params)
            return params

        params = folded(found)
        if not outputs.change(params) <= most:
            false = [scale for scale in found if not outputs.change(folded([scale])) <= most]
            refused += [Refused(scale.gain, KIND, "taking it into its readers changes the output") for scale in false]
            found = [scale for scale in found if scale not in false]
            params = folded(found)
        change = outputs.change(params)
    stored = {name: value.to(own[name].dtype) for name, value in params.items()}
    return FoldedNorms(stored, tuple(found), tuple(refused), change)


def find_norms(
    model: nn.Module, inputs: Any, evaluate: Evaluate | None = None
) -> tuple[list[NormScale], list[Refused]]:
    """Return the norms whose gain the layers that read them can hold, and the others with the reason."""
    trace = Trace(model, inputs, evaluate)
    answers: dict[str, list[_Answer]] = {}
    for operation in trace.operations:
        for each in _answers(trace, operation):
            answers.setdefault(each.gain, []).append(each)
    found: list[NormScale] = []
    refused: list[Refused] = []
    for gain, its in answers.items():
        result = _norm(trace, gain, its)
        if isinstance(result, str):
            refused.append(Refused(gain, KIND, result))
        else:
            found.append(result)
    others = dict(item for operation in trace.operations for item in _not_followed(trace, operation))
    refused += [Refused(gain, KIND, reason) for gain, reason in others.items() if gain not in answers]
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
    if len(users) == 1 and users[0].name == "add" and len(users[0].inputs) == 2:
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
            if any(key(y) == key(output) for output in trace.outputs):
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
    if tied := _tied(trace, gain, bias, readers, own | reading):
        return tied
    return NormScale(
        gain, bias, tuple(_once(readers)), all(_is_centred(trace, each) for each in answers), trace.params[gain].numel()
    )


def _reader(trace: Trace, operation: Operation, y: Tensor, channels: Tensor) -> tuple[Reader, set[int]] | str:
    """Return the linear map by which an operation reads y and what else computes it, or why there is none."""
    places = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
    if operation.name not in places:
        return f"{operation.name} reads what it gives"
    left, right = (operation.arguments[place] for place in places[operation.name])
    first = key(left) == key(y)
    if first:
        matrix, along = right, channels.flatten(0, -2)
    else:
        matrix, along = left, channels.mT.flatten(0, -2)
    name, elements = trace.parts.get(key(matrix), ("", matrix))
    if not name or elements.ndim > 3:
        return f"{operation.name} multiplies what it gives by something else than a parameter"
    if elements.ndim == 3:
        elements = elements[0] if bool((elements == elements[:1]).all()) else elements[:0]
    if not len(elements) or not bool((along == along[:1]).all()):
        return f"{operation.name} reads its channels in several orders"
    elements = elements if first else elements.mT
    adding = operation if operation.name == "addmm" else _added_after(trace, operation)
    if first and adding is not None and _plain(adding):
        for bias, numbers in (trace.parts[key(each)] for each in adding.inputs if key(each) in trace.parts):
            if bias != name and numbers.numel() == elements.shape[1]:
                return Reader(name, elements, along[0], bias, numbers.flatten()), {id(adding)}
    return Reader(name, elements, along[0]), set()


def _plain(operation: Operation) -> bool:
    return operation.options.get("alpha", 1) == operation.options.get("beta", 1) == 1


def _added_after(trace: Trace, product: Operation) -> Operation | None:
    """Return the sum with a product that comes before anything else is done with it: torch adds biases so at times."""
    y = product.outputs[0]
    users = [user for view, _ in trace.follow(y, y) for user in trace.users(view) if not user.is_view]
    first = min(users, key=trace.operations.index, default=None)
    if first is None or len(first.inputs) != 2:
        return None
    alone = all(user is first for user in users)
    return first if first.name == "add_" or (first.name == "add" and alone) else None


def _tied(trace: Trace, gain: str, bias: str, readers: list[Reader], known: set[int]) -> str:
    """Return what else uses the numbers that a move would change; nothing if nothing does."""
    touched: dict[str, Tensor] = {}
    for name, elements in (
        *((gain, None), *([(bias, None)] if bias else [])),
        *((reader.weight, reader.elements) for reader in readers),
        *((reader.bias, reader.bias_elements) for reader in readers if reader.bias),
    ):
        mask = touched.setdefault(name, torch.zeros(trace.params[name].numel(), dtype=torch.bool))
        mask[slice(None) if elements is None else elements.flatten()] = True
    for operation in trace.operations:
        if operation.is_view or id(operation) in known:
            continue
        for tensor in operation.inputs:
            name, numbers = trace.parts.get(key(tensor), ("", tensor))
            if name in touched and bool(touched[name][numbers.flatten()].any()):
                return f"{operation.name} uses {name} too"
    return ""


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
