"""Rules of complex numbers: each is two channels, and products with known ones turn planes."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from quotient_manifolds.symmetries.wires.codes import VIEWS
from quotient_manifolds.symmetries.wires.record import Operation
from quotient_manifolds.symmetries.wires.rules.products import mul
from quotient_manifolds.symmetries.wires.rules.sums import total
from quotient_manifolds.symmetries.wires.rules.views import view
from quotient_manifolds.symmetries.wires.walk import Walk, rule

MUL = torch.ops.aten.mul.Tensor


@rule("view_as_complex")
def as_complex(walk: Walk, operation: Operation) -> None:
    label = walk.label(operation.args[0])
    for part, each in zip(_new_parts(walk, operation.out), label.unbind(-1), strict=True):
        walk.put(part, each)


@rule("complex")
def complex_numbers(walk: Walk, operation: Operation) -> None:
    """Do with real and imaginary parts what an operation does with complex numbers."""
    name, inputs = operation.name, operation.inputs
    moving = [each for each in inputs if ("complex", id(each)) in walk.notes]
    if name == "view_as_real":
        walk.put(operation.out, torch.stack([walk.label(part) for part in _parts(walk, inputs[0])], -1))
    elif name in VIEWS and len(moving) == len(inputs):
        outs = [_new_parts(walk, out) for out in operation.outputs]
        for place in (0, 1):
            args = tree_map_only(Tensor, partial(_part, walk, place), operation.args)
            made = [out[place] for out in outs]
            view(walk, Operation(operation.func, args, operation.kwargs, made if len(made) > 1 else made[0]))
    elif name == "mul" and len(inputs) == 2:
        _times(walk, operation, *inputs)
    else:
        for each in moving:
            for part in _parts(walk, each):
                walk.fix(walk.label(part))
        walk.settle(operation)


def _part(walk: Walk, place: int, tensor: Tensor) -> Tensor:
    return _parts(walk, tensor)[place]


def _times(walk: Walk, operation: Operation, x: Tensor, y: Tensor) -> None:
    (a, b), (c, s) = _parts(walk, x), _parts(walk, y)
    made = [torch.empty(operation.out.shape, device="meta") for _ in range(4)]
    walk.notes["kept", walk.at, "complex"] = made
    for (one, other), out in zip(((a, c), (b, s), (a, s), (b, c)), made, strict=True):
        mul(walk, Operation(MUL, (one, other), {}, out))
    real, imaginary = _new_parts(walk, operation.out)
    total(walk, real, [(made[0], 1.0), (made[1], -1.0)])
    total(walk, imaginary, [(made[2], 1.0), (made[3], 1.0)])


def _new_parts(walk: Walk, tensor: Tensor) -> list[Tensor]:
    """Make tensors without memory that stand for real and imaginary parts of what may change."""
    made = [torch.empty(tensor.shape, device="meta") for _ in range(2)]
    walk.notes["complex", id(tensor)] = walk.notes["parts", id(tensor)] = made
    return made


def _parts(walk: Walk, tensor: Tensor) -> list[Tensor]:
    """Return real and imaginary parts; they are known where the number is."""
    key = "parts", id(tensor)
    if not tensor.is_complex():
        walk.notes[key] = [tensor, torch.zeros(tensor.shape)]
    elif key not in walk.notes:
        known = walk.codes.constant(tensor)
        unknown = partial(torch.empty, tensor.shape, device="meta")
        walk.notes[key] = [tensor.real.clone(), tensor.imag.clone()] if known else [unknown(), unknown()]
    return walk.notes[key]
