"""Follow what turns with a residual stream: all that carries it, writes to it and reads it, unless something stops it.

Let R be an orthogonal matrix, and turn every vector x of a stream to R x. Sums of such vectors turn with them, and so
does x times a number; its length stays, and so does its mean if R 1 = 1; W x stays if W turns to W R^T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds.symmetries.norm_uses import raised_vectors
from quotient_manifolds.symmetries.operations import SUMS, Key, Operation, key
from quotient_manifolds.symmetries.trace import Part, Trace

_MOVES = ("index", "index_select", "roll", "flip")  # of tokens
_Pairs = list[tuple[Tensor, int]]  # tensors, and the axis of each, counted from the end, along which the channels lie


class _Obstacle(Exception):
    """Stop where something cannot turn."""


@dataclass(frozen=True, eq=False)
class Turning:
    """Hold what turns together: numbers (rows, channels) of parameters, each of whose rows r becomes R r.

    tables: those of them that nothing else moves, so that they can tell one R from another: tables of embeddings and
    positions, and what the model's inputs are multiplied by. met: the gains and biases of norms on the way.
    fixes_ones: R has to leave the vector of ones alone.
    """

    parts: tuple[Part, ...]
    tables: tuple[Part, ...]
    met: frozenset[str]
    fixes_ones: bool
    width: int


def find_turning(trace: Trace, constants: Mapping[str, float]) -> Iterator[Turning]:
    """Yield everything that turns. constants: parameters that are one number (0 or 1) for every channel, by name."""
    producers: dict[Key, list[Operation]] = {}
    for operation in trace.operations:
        for output in operation.outputs:
            producers.setdefault(key(output), []).append(operation)
    computed = _computed(trace)
    seen: set[Key] = set()
    for operation in trace.operations:
        start = _start(trace, operation, computed)
        if start is None or key(start[0]) in seen:
            continue
        closure = _Closure(trace, producers, constants, computed)
        with suppress(_Obstacle):
            yield closure.grown(*start)
        seen |= closure.axes.keys()


def _start(trace: Trace, operation: Operation, computed: set[Key]) -> tuple[Tensor, int] | None:
    """Return where the first layer of a model writes its answer, and along which axis."""
    weight = (
        operation.arguments[{"embedding": 0, "convolution": 1}.get(operation.name, -1)] if operation.arguments else 0
    )
    own = isinstance(weight, Tensor) and key(weight) in trace.parts
    if not own or any(key(tensor) in computed for tensor in operation.inputs):
        return None
    if operation.name in ("embedding", "mm", "addmm"):
        return operation.outputs[0], -1
    return (operation.outputs[0], 1 - operation.outputs[0].ndim) if operation.name == "convolution" else None


def _computed(trace: Trace) -> set[Key]:
    """Return the tensors that were computed from parameters, and are none themselves."""
    found: set[Key] = set()
    for operation in trace.operations:
        if any(key(tensor) in found or key(tensor) in trace.parts for tensor in operation.inputs):
            found |= {key(output) for output in operation.outputs if key(output) not in trace.parts}
    return found


class _Closure:
    """Grow the set of tensors that have to turn if one does, through all operations that give or take them."""

    def __init__(
        self,
        trace: Trace,
        producers: Mapping[Key, list[Operation]],
        constants: Mapping[str, float],
        computed: set[Key],
    ) -> None:
        self.axes: dict[Key, int] = {}
        self._trace, self._producers, self._constants, self._computed = trace, producers, constants, computed
        self._waiting: list[Tensor] = []
        self._parts: dict[tuple[Key, int], tuple[Part, bool]] = {}
        self._raised = raised_vectors(trace)
        self._known, self._norms = set[int](), set[int]()
        self._met = set[str]()
        self._fixes_ones, self._width = False, 0

    def grown(self, start: Tensor, axis: int) -> Turning:
        """Return all that turns if `start` does."""
        self._width = start.shape[axis]
        self._turn([(start, axis)])
        while self._waiting:
            tensor = self._waiting.pop()
            makers = self._producers.get(key(tensor), [])
            if not makers or self._trace.is_output(tensor):  # it is given to the model, or by it
                raise _Obstacle
            for operation in (*makers, *self._trace.users(tensor)):
                self._turn(self._follow(operation))
        parts, tables = _distinct(self._trace, self._parts.values())
        if self._width < 2 or not self._norms or self._trace.used_besides(parts, self._known):
            raise _Obstacle  # without a norm, far more than rotations is free
        return Turning(parts, tables, frozenset(self._met), self._fixes_ones, self._width)

    def _turn(self, found: _Pairs) -> None:
        for tensor, axis in found:
            strided = not tensor.is_nested and tensor.layout == torch.strided
            if not strided or tensor.ndim < -axis or tensor.shape[axis] != self._width:
                raise _Obstacle
            if key(tensor) not in self.axes and key(tensor) not in self._trace.parts:
                self._waiting.append(tensor)
            if self.axes.setdefault(key(tensor), axis) != axis:
                raise _Obstacle

    def _axis(self, tensor: Any) -> int | None:
        return self.axes.get(key(tensor)) if isinstance(tensor, Tensor) else None

    def _common(self, tensors: Iterable[Tensor]) -> int:
        """Return the axis of those of the tensors that are known to turn."""
        axes = {axis for axis in map(self._axis, tensors) if axis is not None}
        if len(axes) != 1:
            raise _Obstacle
        return axes.pop()

    def _wide(self, tensor: Tensor, axis: int) -> bool:
        return tensor.ndim >= -axis and tensor.shape[axis] == self._width

    def _constant(self, tensor: Tensor) -> float | None:
        """Return the number that a gain or bias is for every channel, if the tensor is one."""
        name, _ = self._trace.parts.get(key(tensor), ("", tensor))
        if key(tensor) in self._raised:
            name = self._raised[key(tensor)].name
        if name in self._constants:
            self._met.add(name)
        return self._constants.get(name)

    def _use(self, tensor: Tensor, axis: int, table: bool = False) -> _Pairs:
        """Return the tensor, noted down if it is numbers of a parameter."""
        name, numbers = self._trace.parts.get(key(tensor), ("", tensor))
        if name:
            rows = numbers.movedim(axis, -1).reshape(-1, numbers.shape[axis])
            if rows.numel() > self._trace.params[name].numel() or tensor.ndim > 2:
                rows = rows.unique(dim=0)  # one for all examples
            self._parts[key(tensor), axis] = (name, rows), table and len(rows) > 1
        return [(tensor, axis)]

    def _follow(self, operation: Operation) -> _Pairs:
        """Return what turns with the tensors of an operation that are known to."""
        if not operation.is_view:
            self._known.add(id(operation))
        if operation.name in _RULES:
            return _RULES[operation.name](self, operation)
        if operation.is_view or operation.name in _MOVES:
            return self._moved(operation)
        raise _Obstacle

    def _moved(self, operation: Operation) -> _Pairs:
        """Follow channels through what does the same to all of them."""
        x = operation.inputs[0]
        axis = self._axis(x)
        tried = range(-x.ndim, 0) if axis is None else [axis]
        for each in (axis for axis in tried if x.shape[axis] == self._width):
            shape = [1] * x.ndim
            shape[each] = -1
            channels = torch.arange(self._width, device=x.device, dtype=torch.float64).view(shape).expand(x.shape)
            ones = operation.moved(torch.ones_like(channels))
            found = [self._along(c / one) for c, one in zip(operation.moved(channels), ones, strict=True)]
            known = [self._axis(output) for output in operation.outputs]
            if None not in found and all(a in (None, b) for a, b in zip(known, found, strict=True)):
                return [
                    *self._use(x, each, table=True),
                    *((y, a) for y, a in zip(operation.outputs, found, strict=True) if a is not None),
                ]
        raise _Obstacle

    def _along(self, numbers: Tensor) -> int | None:
        """Return the axis along which the channels lie, in order."""
        for axis in range(-numbers.ndim, 0):
            last = numbers.movedim(axis, -1)
            if last.shape[-1] == self._width and numbers.numel():
                channels = torch.arange(self._width, device=numbers.device, dtype=numbers.dtype).expand(last.shape)
                if torch.allclose(last, channels, rtol=0, atol=1e-9):
                    return axis
        return None

    def _sum(self, operation: Operation) -> _Pairs:
        axis = self._common((*operation.inputs, operation.outputs[0]))
        found = [(operation.outputs[0], axis)]
        self._fixes_ones |= len(operation.inputs) < 2
        for addend in operation.inputs:
            constant = self._constant(addend)
            if constant is None and self._wide(addend, axis):
                found += self._use(addend, axis, table=True)
            elif constant != 0:
                self._fixes_ones = True
        return found

    def _scaled(self, operation: Operation) -> _Pairs:
        x = operation.arguments[0]
        if operation.name == "mul" and len(operation.inputs) == 2 and key(x) == key(operation.inputs[1]):
            return self._square(operation)
        axis = self._common((*operation.inputs, operation.outputs[0]))
        wide = [each for each in operation.inputs if self._wide(each, axis) and self._constant(each) != 1]
        if len(wide) != 1 or (operation.name in ("div", "div_") and wide[0] is not x):
            raise _Obstacle
        return [(wide[0], axis), (operation.outputs[0], axis)]

    def _square(self, operation: Operation) -> _Pairs:
        """Allow squares of which nothing but their sum over channels is used."""
        x, y = operation.arguments[0], operation.outputs[0]
        axis = self._axis(x)
        if axis is None or (operation.name == "pow" and operation.arguments[1] != 2):
            raise _Obstacle
        for view, _ in self._trace.follow(y, y):
            for user in self._trace.users(view):
                if view.shape != y.shape or self._trace.is_output(view):
                    raise _Obstacle
                if not user.is_view and not (user.name in ("mean", "sum") and axis in _reduced(user)):
                    raise _Obstacle
        self._norms.add(id(operation))
        return []

    def _reduce(self, operation: Operation) -> _Pairs:
        axis = self._axis(operation.arguments[0])
        if axis is None or axis not in _reduced(operation):
            return self._moved(operation)
        if operation.name == "linalg_vector_norm":
            if (operation.arguments[1:2] or (2,))[0] != 2:
                raise _Obstacle
            self._norms.add(id(operation))
        else:
            self._fixes_ones = True
        return []

    def _norm(self, operation: Operation) -> _Pairs:
        x, shape, gain, *others = operation.arguments
        bias = others[0] if operation.name == "native_layer_norm" else None
        known = self._common((x, operation.outputs[0])) == -1 and list(shape) == [self._width]
        gained = gain is None or self._constant(gain) == 1
        constant = 0 if bias is None else self._constant(bias)
        if not known or not gained or constant is None:
            raise _Obstacle
        self._fixes_ones |= operation.name == "native_layer_norm" or constant != 0
        self._norms.add(id(operation))
        return [(x, -1), (operation.outputs[0], -1)]

    def _product(self, operation: Operation) -> _Pairs:
        """Return what turns with the factors of (L R)_ij = sum_k L_ik R_kj."""
        *added, left, right = operation.arguments
        y = operation.outputs[0]
        found: _Pairs = []
        if self._axis(left) == -1 or self._axis(right) == -2:
            found += [*self._use(left, -1), *self._use(right, -2)]
        if self._axis(right) == -1 or self._axis(y) == -1:
            table = not any(key(each) in self._computed for each in operation.inputs)
            found += [*self._use(right, -1, table), (y, -1)]
            for bias in added:
                found += self._use(bias, -1)
        if self._axis(left) == -2 or self._axis(y) == -2:
            found += [*self._use(left, -2), (y, -2)]
            if added:
                raise _Obstacle
        return found

    def _cat(self, operation: Operation) -> _Pairs:
        tensors = operation.arguments[0]
        y = operation.outputs[0]
        axis = self._common((*tensors, y))
        along = operation.arguments[1] if len(operation.arguments) > 1 else 0
        if along % y.ndim == axis % y.ndim:
            raise _Obstacle
        return [(y, axis), *(pair for each in tensors for pair in self._use(each, axis, table=True))]

    def _embedding(self, operation: Operation) -> _Pairs:
        return [*self._use(operation.arguments[0], -1, table=True), (operation.outputs[0], -1)]

    def _convolution(self, operation: Operation) -> _Pairs:
        x, weight, bias, *_, transposed, _, groups = operation.arguments
        y = operation.outputs[0]
        if transposed or groups != 1 or self._axis(x) not in (None, 1 - x.ndim):
            raise _Obstacle
        found: _Pairs = []
        if self._axis(x) is not None or self._axis(weight) == 1 - weight.ndim:
            found += [(x, 1 - x.ndim), *self._use(weight, 1 - weight.ndim)]
        if self._axis(y) is not None:
            own = self._use(bias, -1) if bias is not None else []
            table = key(x) not in self._computed
            found += [(y, 1 - y.ndim), *self._use(weight, -weight.ndim, table), *own]
        return found


_RULES: dict[str, Callable[[_Closure, Operation], _Pairs]] = {
    **dict.fromkeys((*SUMS, "sub", "sub_"), _Closure._sum),
    **dict.fromkeys(("mul", "mul_", "div", "div_"), _Closure._scaled),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm"), _Closure._product),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _Closure._norm),
    **dict.fromkeys(("mean", "sum", "var", "var_mean", "std", "linalg_vector_norm"), _Closure._reduce),
    "pow": _Closure._square,
    "cat": _Closure._cat,
    "embedding": _Closure._embedding,
    "convolution": _Closure._convolution,
}


def _reduced(operation: Operation) -> set[int]:
    """Return the axes that a mean, a sum, a variance or a length is over, counted from the end."""
    x, *others = operation.arguments
    given = operation.options.get("dim", next((each for each in others if isinstance(each, (list, tuple))), None))
    if given is None and any(isinstance(each, int) and not isinstance(each, bool) for each in others):
        return set()  # an axis alone, or an order: not asked for by norms
    return {axis % x.ndim - x.ndim for axis in (given or range(x.ndim))}


def _distinct(trace: Trace, found: Iterable[tuple[Part, bool]]) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Return each part once, and the tables among them; no number may be in two of them."""
    kept: list[tuple[Part, bool]] = []
    for (name, rows), table in found:
        others = [its for (other, its), _ in kept if other == name]
        if any(torch.equal(rows, its) for its in others):
            continue
        if others and bool(trace.mask(name, others)[rows].any()):
            raise _Obstacle
        kept.append(((name, rows), table))
    return tuple(part for part, _ in kept), tuple(part for part, table in kept if table)
