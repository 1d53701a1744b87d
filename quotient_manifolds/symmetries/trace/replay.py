"""Run a recorded program again on other weights and inputs, in float64."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from quotient_manifolds.derivatives import values
from quotient_manifolds.symmetries.trace.program import Operation, Program, Ref, substituted

aten = torch.ops.aten
HELD = 3e7
"""If weights have more entries in total, autograd does not save them: they are loaded and widened again."""
_NEAR = 0.1
"""An eps that keeps a root off 0 is raised to this part of the other term, so that approximate symmetries fail."""

FLAT = {"sign", "sgn", "floor", "ceil", "round", "trunc", "heaviside", "floor_divide", "div floor", "div trunc"}
FLAT |= {f"fake_quantize_per_{part}_affine_cachemask" for part in ("tensor", "channel")}
FLAT |= {"_fake_quantize_per_tensor_affine_cachemask_tensor_qparams"}
"""Operations on real numbers that are constant between jumps, whatever gradient torch gives them."""

Looked = Callable[[str, Tensor], Tensor | None]
"""Function (name, index) -> rows of a table, or None."""
Weights = Callable[[str], Tensor]
"""Function (name) -> parameter, of any dtype."""


_ADDING = {aten.add.Tensor, aten.add_.Tensor}
_CHANGED = {aten._softmax.default, aten._log_softmax.default, aten.embedding.default, aten.sqrt.default, *_ADDING}
"""Operations whose arguments a replay changes."""


class Tap(Protocol):
    """Observe the arguments of some operations."""

    @property
    def places(self) -> Collection[int]:
        """Return the places of these operations in the program."""

    def __call__(self, place: int, operation: Operation, at: Callable[[int], Tensor]) -> None:
        """Observe one operation before it runs; `at` returns values by number."""


def arguments(operation: Operation, at: Callable[[int], Any], generic: bool) -> tuple[Any, Any]:
    """Return arguments with which an operation computes in float64, and with which no symmetry holds approximately.

    at: returns values by number. Casts to fewer bits have no effect, and lookups have their true derivative. If
    `generic`, a small constant (0 < eps < 1e-4) that is added is raised to a tenth of the mean absolute value of the
    other term. It is then a tensor, under vmap a different one for each batch. A root of 0 has derivative 0, as a norm
    of 0 has in torch.
    """
    (args, kwargs), direct = operation.in_double, operation.direct
    if direct is None:
        args, kwargs = substituted(args, at), substituted(kwargs, at)
    else:
        args = tuple(at(direct[place]) if place in direct else each for place, each in enumerate(args))
    if operation.func not in _CHANGED:
        return args, kwargs
    if operation.func in (aten._softmax.default, aten._log_softmax.default):
        args = (*args[:2], False)
    if operation.func is aten.embedding.default:
        args = args[:2]  # the others make the gradient differ from the derivative
    if operation.func is aten.sqrt.default:
        args = (torch.where(args[0] == 0, args[0].detach(), args[0]),)
    added = generic and operation.func in _ADDING and isinstance(args[1], float)
    if added and 0 < args[1] < 1e-4 and args[0].is_floating_point():
        size = args[0].detach().abs().mean()
        args = (args[0], (_NEAR * size).clamp(min=args[1]), *args[2:])
    return args, kwargs


def wide(tensor: Tensor) -> Tensor:
    """Return a floating point tensor in float64, any other tensor unchanged."""
    return tensor.double() if tensor.is_floating_point() else tensor


class _Step(NamedTuple):
    """Hold an operation, its place, and the values and memories of parameters that no later operation takes."""

    place: int
    operation: Operation
    released: tuple[int, ...]
    ended: tuple[int, ...]


class Replay:
    """Run a program in float64, with weights by name and inputs in order.

    If a table is only looked up, only the rows that are looked up are widened.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        takers = [(each.func, each.args[0] if each.args else None, each.ins) for each in program.operations]
        others = {
            n for func, first, ins in takers for n in ins if func is not aten.embedding.default or _of(first) != n
        }
        self._tables = set(program.parameters) - others - set(program.outputs)
        self._looked = {
            place: program.parameters[number]
            for place, (func, first, _) in enumerate(takers)
            if func is aten.embedding.default and (number := _of(first)) in self._tables
            if number is not None and program.layouts[number].whole
        }
        self._constants = {number: wide(tensor) for number, tensor in {**program.constants, **program.chosen}.items()}
        rooms = {program.layouts[number].memory: program.layouts[number].room for number in program.parameters}
        self._large = sum(rooms.values()) > HELD
        varies, self._varying = {*program.parameters, *program.inputs}, set[int]()
        for place, each in enumerate(program.operations):
            if not varies.isdisjoint(each.ins):
                varies.update(each.outs)
                self._varying.add(place)
        self._real = {place for place, each in enumerate(program.operations) if self._is_real(each)}
        self._steps: dict[frozenset[int], list[_Step]] = {}

    def _is_real(self, operation: Operation) -> bool:
        """Return whether a result can have a derivative; some of autograd's formulas fail otherwise."""
        kinds = (self.program.layouts[number].dtype for number in operation.outs)
        return operation.name not in FLAT and any(kind.is_floating_point or kind.is_complex for kind in kinds)

    def _needed(self, wanted: frozenset[int]) -> list[_Step]:
        """Return the operations at the wanted places, and all operations on which these or the outputs depend."""
        if wanted not in self._steps:
            layouts, chosen, found = self.program.layouts, self.program.chosen, []
            memories = {layouts[number].memory for number in self.program.outputs}
            later = set(self.program.outputs)
            parameters = {layouts[number].memory for number in self.program.parameters}
            for place, each in reversed([*enumerate(self.program.operations)]):
                made = bool(each.outs) and all(number in chosen for number in each.outs)
                if place in wanted or (not made and any(layouts[n].memory in memories for n in each.outs)):
                    values = {*each.ins, *each.outs}
                    memories.update(layouts[n].memory for n in each.ins)
                    ended = {layouts[n].memory for n in values} & parameters
                    found.append(_Step(place, each, tuple(values - later), tuple(ended)))
                    later, parameters = later | values, parameters - ended
            self._steps[wanted] = found[::-1]
        return self._steps[wanted]

    def leaf(self, weights: Weights, number: int) -> Tensor:
        """Return value `number`, which is a parameter or a view of one."""
        w, layout = weights(self.program.parameters[number]), self.program.layouts[number]
        w = w if number in self._tables else wide(w)
        plain = tuple(w.shape) == layout.shape and w.stride() == layout.stride and not layout.offset
        return w if plain else layout.of(w.reshape(-1))

    def run(
        self,
        weights: Weights,
        inputs: Sequence[Tensor],
        watch: Mapping[int, int | None],
        *,
        rows: Looked | None = None,
        generic: bool = True,
        tap: Tap | None = None,
    ) -> tuple[list[Tensor], dict[int, tuple[Tensor | None, Tensor]]]:
        """Return the outputs, and the watched argument and result of each operation in `watch`.

        rows: returns rows of a parameter that is only looked up, or None to load the whole parameter.
        tap: called before each operation at its places runs, with a function that returns values by number.
        watch: by place of an operation, the index of the argument to differentiate by in this use alone, or None. The
        tensors returned for it are part of the graph, so `torch.autograd.grad` returns the gradients of this use alone.
        """
        known = Values(self, weights, {**self._constants, **dict(zip(self.program.inputs, inputs, strict=True))})
        with saved_tensors_hooks(known.packed, known.unpacked) if self._large else nullcontext():
            return self._run(known, watch, rows, generic, tap)

    def _run(
        self, known: Values, watch: Mapping[int, int | None], rows: Looked | None, generic: bool, tap: Tap | None
    ) -> tuple[list[Tensor], dict[int, tuple[Tensor | None, Tensor]]]:
        seen, kept, wanted = {}, {}, set(self.program.outputs)
        taken = () if tap is None else tap.places
        slopes = torch.is_grad_enabled()
        for place, operation, released, ended in self._needed(frozenset((*watch, *taken))):
            if tap is not None and place in taken:
                tap(place, operation, known.__getitem__)
            if all(number in self.program.chosen for number in operation.outs):
                continue
            found = rows(self._looked[place], known[operation.ins[1]]) if rows and place in self._looked else None
            if found is None:
                args, kwargs = arguments(operation, known.__getitem__, generic and place in self._varying)
            else:
                args, kwargs = (found,), {}
            own = watch.get(place, -1)
            if own is not None and own >= 0:
                args = tuple(_apart(each) if k == own else each for k, each in enumerate(args))
            with nullcontext() if place in self._real or not slopes else torch.no_grad():
                given = found is not None or operation.func is aten.detach.default
                made = args[0] if given else operation.func(*args, **kwargs)
                made = wide(made) if operation.func is aten.embedding.default else made
            if place in watch:
                made = made if _in_graph(made) else _apart(made)
                seen[place] = (None if own is None else args[own], made)
            outs = (made,) if isinstance(made, Tensor) else [t for t in made if isinstance(t, Tensor)]
            for number, value in zip(operation.outs, outs, strict=True):
                known[number] = value
                if number in wanted:
                    kept[number] = value
            for number in released:
                known.pop(number, None)
            for memory in ended:
                known.forget(memory)
        return [kept[n] if n in kept else known[n] for n in self.program.outputs], seen


class Values(dict[int, Tensor]):
    """Hold the values of a replay by number, and load parameters on demand.

    In a large program autograd saves the numbers of parameters and of their views, which are then loaded again.
    """

    def __init__(self, replay: Replay, weights: Weights, known: Mapping[int, Tensor]) -> None:
        super().__init__(known)
        self._replay, self._weights = replay, weights
        self._numbers: dict[int, dict[int, Tensor]] = {}
        """By memory and number: the parameters that later operations take."""

    def __missing__(self, number: int) -> Tensor:
        leaf = self[number] = self._replay.leaf(self._weights, number)
        self._numbers.setdefault(self._replay.program.layouts[number].memory, {})[number] = leaf
        return leaf

    def forget(self, memory: int) -> None:
        """Drop a parameter that no later operation takes."""
        self._numbers.pop(memory, None)

    def packed(self, saved: Tensor) -> Any:
        """Return the object that autograd saves in place of a tensor."""
        place = saved.untyped_storage().data_ptr()
        for leaves in self._numbers.values():
            for number, leaf in leaves.items():
                if leaf.untyped_storage().data_ptr() == place and not leaf.requires_grad:
                    return number, saved.shape, saved.stride(), saved.storage_offset()
        return saved

    def unpacked(self, saved: Any) -> Tensor:
        """Return the tensor for a saved object."""
        if isinstance(saved, Tensor):
            return saved
        number, *layout = saved
        return self._replay.leaf(self._weights, number).as_strided(*layout)


def _of(argument: Any) -> int | None:
    return argument.number if isinstance(argument, Ref) else None


def _in_graph(tensor: Tensor) -> bool:
    """Return whether a tensor is part of the graph; a tensor wrapped by vmap does not report this itself."""
    return values(tensor).requires_grad


def _apart(tensor: Tensor) -> Tensor:
    """Return the tensor as a separate node of the graph."""
    if _in_graph(tensor):
        return tensor.view_as(tensor)
    return tensor + torch.zeros((), dtype=tensor.dtype, requires_grad=True)
