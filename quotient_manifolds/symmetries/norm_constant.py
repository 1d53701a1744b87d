"""Find what a norm's bias gives to keys and values that have no bias of their own: a constant that nobody needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quotient_manifolds.symmetries.freedom import Freedom, gaussian, read, typical, write
from quotient_manifolds.symmetries.norm_scale import NormScale, Reader
from quotient_manifolds.symmetries.operations import Key, Operation
from quotient_manifolds.symmetries.pair import Factor, Params, SymmetricPair
from quotient_manifolds.symmetries.post_norm import LoneBias, bias_beside, lone_biases
from quotient_manifolds.symmetries.trace import LinearMap, Part, Trace


@dataclass(frozen=True, eq=False)
class Output:
    """Describe where attention puts what all values have in common: W_O u is added to the output bias.

    weight: name of W_O; elements (heads, m, h) are flat indices into it. bias: name; bias_elements (heads, m).
    """

    weight: str
    elements: Tensor
    bias: str
    bias_elements: Tensor


@dataclass(frozen=True, eq=False)
class NormConstant(Freedom):
    """Describe keys or values W y without a bias, of a LayerNorm y = gain * n + bias, n of mean 0.

    W diag(gain) + u 1^T answers a constant more, u sum(bias / gain): softmax over keys ignores that of keys, and
    attention hands that of values on to the output bias, which makes up for it. elements (channels, units) are flat
    indices into the parameter `weight`; their rows are the norm's channels.
    """

    pair: str
    norm: NormScale
    weight: str
    elements: Tensor
    channels: Tensor
    output: Output | None
    kind: ClassVar[str] = "constant"

    @property
    def name(self) -> str:
        """Return the name of the pair whose keys or values they are, and what it is about."""
        return f"{self.pair} {self.kind}"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that a move takes or touches."""
        outputs = (self.output.weight, self.output.bias) if self.output else ()
        return tuple(dict.fromkeys((self.weight, self.norm.gain, self.norm.bias, *outputs)))

    @property
    def families(self) -> dict[str, int]:
        """Return the dimension of the moves that leave the function alone, by their name."""
        return {f"constant of {'values' if self.output else 'keys'}": self.elements.shape[1]}

    def fold(self, params: Params) -> None:
        """Make the mean of each row of W diag(gain) 0, in place."""
        gain, _ = self.norm.read_norm(params)
        W = read(params, self.weight, self.elements)
        self._shift(params, -(W * gain[self.channels, None]).mean(dim=0))

    def move(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Shift each row of W diag(gain) by a random number; with `control`, every other channel of it; in place."""
        W = read(params, self.weight, self.elements)
        self._shift(params, size * typical(W) * gaussian(W, generator, W.shape[1]), control)

    def _shift(self, params: Params, u: Tensor, control: bool = False) -> None:
        gain, bias = self.norm.read_norm(params)
        gain, bias = gain[self.channels], bias[self.channels]
        step = u / gain[:, None]
        if control:
            step[::2] = 0.0
        write(params, self.weight, self.elements, read(params, self.weight, self.elements) + step)
        if self.output is not None and not control:
            out = self.output
            heads, _, h = out.elements.shape
            W = read(params, out.weight, out.elements.flatten()).view(out.elements.shape)
            constant = torch.einsum("kmh,kh->km", W, (u * (bias / gain).sum()).view(heads, h))
            total = torch.zeros(params[out.bias].numel(), dtype=constant.dtype, device=constant.device)
            total.index_add_(0, out.bias_elements.flatten().to(constant.device), constant.flatten())
            params[out.bias] = (params[out.bias].double() - total.view_as(params[out.bias])).to(params[out.bias].dtype)


def find_norm_constants(
    trace: Trace, pairs: Iterable[SymmetricPair], found: Iterable[Freedom]
) -> Iterator[NormConstant]:
    """Yield the keys and values without a bias, of pairs that GL(h) acts on, that read a LayerNorm with a bias."""
    readers = [
        (norm, reader)
        for norm in found
        if isinstance(norm, NormScale) and norm.bias and norm.centred
        for reader in norm.readers
        if not reader.bias and len(reader.channels) == norm.size
    ]
    biases = lone_biases(trace) if readers else {}
    for pair in pairs:
        side = {"query/key": pair.H, "value/output": pair.G}.get(pair.kind)
        if side is None or pair.acts != "GL(h)" or len(side.views) != 1:
            continue
        for norm, reader in readers:
            units = _units(trace, side, reader) if side.views[0].name == reader.weight else None
            output = _output(trace, pair.H, biases) if pair.kind == "value/output" else None
            if units is not None and (pair.kind == "query/key" or output is not None):
                elements = reader.elements[:, units]
                yield NormConstant(pair.name, norm, reader.weight, elements, reader.channels, output)


def _indices(trace: Trace, side: Factor) -> Tensor:
    """Return which numbers of its parameter the view of one side is, (heads, rows, h)."""
    name = side.views[0].name
    return side.read({name: torch.arange(trace.params[name].numel()).view(trace.params[name].shape)})


def _columns(trace: Trace, name: str, elements: Tensor) -> Tensor:
    """Return for every number of a parameter the column of `elements` that it is in, or -1."""
    columns = torch.full((trace.params[name].numel(),), -1)
    columns[elements] = torch.arange(elements.shape[1]).expand(elements.shape)
    return columns


def _units(trace: Trace, side: Factor, reader: Reader) -> Tensor | None:
    """Return the columns of the reader that the pair's units are, (heads * h,), if all of each is theirs."""
    units = _columns(trace, reader.weight, reader.elements)[_indices(trace, side)]
    whole = units.shape[1] == len(reader.channels) and bool((units >= 0).all() and (units == units[:, :1]).all())
    return units[:, 0].flatten() if whole else None


def _output(trace: Trace, side: Factor, biases: Mapping[Key, LoneBias]) -> Output | None:
    """Return where the output map of attention puts a constant, if a bias that is used for nothing else can hold it."""
    if len(side.views) != 1:
        return None
    name = side.views[0].name
    maps = [(each, found) for each in trace.operations if (found := trace.linear(each)) and found.weight == name]
    bias = _bias(trace, *maps[0], biases) if len(maps) == 1 else None
    if bias is None:
        return None
    indices = _indices(trace, side)
    units = _columns(trace, name, maps[0][1].elements)[indices]
    if not bool((units >= 0).all() and (units == units[:, :, :1]).all()):
        return None
    return Output(name, indices, bias[0], bias[1][units[:, :, 0]])


def _bias(trace: Trace, operation: Operation, found: LinearMap, biases: Mapping[Key, LoneBias]) -> Part | None:
    """Return the bias of a linear map, or of one whose answers are added to all of its own; nothing else may use it."""
    if found.bias_elements is not None:
        part, known = (found.bias, found.bias_elements), {id(operation), id(found.adding)}
        return part if not trace.used_besides([part], known) else None
    user = trace.only_user(found.y)
    channels = torch.arange(found.y.shape[-1])
    views = trace.follow(found.y, channels.expand(found.y.shape))
    ordered = all(
        torch.equal(numbers, channels.expand(numbers.shape)) for view, numbers in views if user in trace.users(view)
    )
    beside = bias_beside(trace, user, biases) if user is not None and ordered else None
    return beside.part if beside is not None and not trace.used_besides([beside.part], beside.operations) else None
