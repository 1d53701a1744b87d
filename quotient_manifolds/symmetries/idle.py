"""Refuse symmetries on which idle parameters may depend: experts, heads of other tasks, a mask token.

A parameter is idle if some of its entries run on none of the inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.messages import first_line
from quotient_manifolds.replica import private_batch, replica
from quotient_manifolds.symmetries.checks import ModelError, running
from quotient_manifolds.symmetries.groups import Params, Translation
from quotient_manifolds.symmetries.outputs import Evaluate, ModelOutputs, answer, doubled, floating, tensors
from quotient_manifolds.symmetries.reparameterization import gaussian, typical
from quotient_manifolds.symmetries.symmetries import Symmetries, Symmetry

Idle = Mapping[str, Tensor]
"""Masks of the entries that did not run, flat, by the name of the parameter."""

NOISE = 1e-2  # the size of the noise on inputs of modules, relative to these
ACTIVATION = 1e8  # larger numbers are not activations: they mask scores
CHANGE = 1e-8  # the relative change of outputs above which a finite group element refutes invariance
_STEP = 0.3
_NUMBER = re.compile(r"\.\d+(?=\.)")  # the number of a layer or of an expert


def did_not_run(name: str) -> str:
    """Return the reason for refusing a symmetry on which the idle parameter `name` may depend."""
    return f"{name} did not run, and may be part of it: give inputs that go everywhere"


def idle_like(idle: Idle, names: Iterable[str], params: Mapping[str, Tensor]) -> str:
    """Return an idle parameter that may play the role of one of these names elsewhere; "" if there is none.

    Either its path differs only in numbers, as for experts, or it is a matrix in a sibling module, as for branches.
    """
    names = [*names]
    kinds = {_NUMBER.sub(".*", f".{name}.") for name in names}
    homes = {_home(name) for name in names}
    for name in sorted(idle):
        matrix = params[name].numel() > params[name].shape[-1:].numel()
        if _NUMBER.sub(".*", f".{name}.") in kinds or (matrix and _home(name) in homes):
            return name
    return ""


def _home(name: str) -> str:
    """Return the path of the parent of the module that owns a parameter."""
    return name.rpartition(".")[0].rpartition(".")[0]


def held(
    model: nn.Module, batches: Sequence[Any], symmetries: Symmetries, idle: Idle, evaluate: Evaluate | None
) -> Symmetries:
    """Return the symmetries on which no idle parameter can depend, and refuse the others.

    A module is closed if it contains no idle parameter. Code that uses an idle parameter is outside of closed modules,
    so it depends only on their outputs and on parameters outside of them. A symmetry is therefore kept if it changes
    parameters of one closed module only, and leaves the outputs of closed modules unchanged up to rounding. This must
    hold for any inputs of these modules, because code that did not run may change them: noise is added to the inputs.
    """
    if not symmetries.moved:
        return symmetries
    try:
        return symmetries.refusing(_seen(model, batches, symmetries, idle, evaluate))
    except ModelError as error:  # the model does not run with noise or gradients
        why = f"{did_not_run(min(idle))} (it cannot be verified: {first_line(error)})"
        return symmetries.refusing({each.name: why for each in symmetries.every})


def _seen(
    model: nn.Module, batches: Sequence[Any], symmetries: Symmetries, idle: Idle, evaluate: Evaluate | None
) -> dict[str, str]:
    """Return the reasons, by name, for refusing symmetries on which an idle parameter may depend."""
    closed = [_ClosedModules(model, idle, evaluate or answer, batch) for batch in batches]
    inside = [names for each in closed for names in each.inside]
    reasons = {}
    for each in symmetries.every:
        if not any(names.issuperset(each.names) for names in inside):
            reasons[each.name] = _idle_near(idle, each.names)
    for batch, evaluation in zip(batches, closed, strict=True):
        outputs = ModelOutputs(model, [batch], evaluation)
        left = [each for each in symmetries.every if each.name not in reasons]
        for each in _changing(outputs, left, outputs.params()):
            reasons[each.name] = _idle_near(idle, each.names)
    return reasons


def _changing(outputs: ModelOutputs, some: Sequence[Symmetry], params: Params) -> Iterator[Symmetry]:
    """Yield the symmetries of which a finite element changes outputs, found by bisection; translations act first."""
    draw, moved = torch.Generator().manual_seed(0), params
    for symmetry in sorted((each.symmetry for each in some), key=lambda each: not isinstance(each, Translation)):
        size = 1.0
        if isinstance(symmetry, Translation):
            size = max(typical(part.rows.entries(params)) for part in symmetry.parts)
        moved = symmetry.act(moved, symmetry.element(draw, _STEP * size))
    if not some or outputs.change({name: w.clone() for name, w in moved.items()}) < CHANGE:
        return
    if len(some) == 1:
        yield some[0]
        return
    half = len(some) // 2
    yield from _changing(outputs, some[:half], params)
    yield from _changing(outputs, some[half:], params)


def _idle_near(idle: Iterable[str], names: Iterable[str]) -> str:
    """Return the reason for refusing a symmetry of these parameters, with the idle parameter of the closest path."""
    paths = [name.split(".") for name in names]

    def common(name: str) -> int:
        return len([*takewhile(lambda parts: len(set(parts)) == 1, zip(name.split("."), *paths, strict=False))])

    return did_not_run(max(sorted(idle), key=common))


class _ClosedModules:
    """Evaluate a model; return its outputs, then inputs and outputs of all closed modules (without idle parameters).

    Only closed modules that no other closed module calls count, in the order of their calls. Noise is added to their
    inputs, except to tensors computed from integers alone, such as a mask or the angles of a rotation. inside: for each
    such module, the parameters that no module outside of it has.
    """

    def __init__(self, model: nn.Module, idle: Idle, evaluate: Evaluate, batch: Any) -> None:
        params = dict(model.named_parameters())
        idlers = {id(params[name]) for name in idle}
        modules = dict(model.named_modules())
        self._names = [
            name for name, module in modules.items() if idlers.isdisjoint(id(w) for w in module.parameters())
        ]
        self._evaluate = evaluate
        self._shapes: list[torch.Size] = []
        self._called: set[str] = set()
        copied = replica(model, {}, doubled)
        with running(copied):
            outputs = [each.sum() for each in self(copied, private_batch(batch, doubled)) if each.requires_grad]
            if outputs:
                leaves = [w for w in copied.parameters() if w.requires_grad]
                torch.autograd.grad(torch.stack(outputs).sum(), leaves, allow_unused=True)
        owners: dict[int, set[int]] = {}
        for module in modules.values():
            for w in module._parameters.values():
                owners.setdefault(id(w), set()).add(id(module))
        held = [{id(each) for each in modules[name].modules()} for name in sorted(self._called)]
        self.inside = [{name for name, w in params.items() if owners[id(w)] <= each} for each in held]

    def __call__(self, model: nn.Module, inputs: Any) -> list[Tensor]:
        depth, seen, generator = 0, list[Tensor](), torch.Generator().manual_seed(0)

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            memo: dict[int, Any] = {}  # a tensor that is passed twice gets the same noise
            noisy = partial(_noisy, generator, memo)
            return (noisy(args), {name: noisy(value) for name, value in kwargs.items()}) if depth == 1 else None

        def leave(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            nonlocal depth
            depth -= 1
            if depth == 0:
                self._called.add(name)
                seen.extend(map(_numbers, tensors((args, kwargs, output))))

        for w in model.parameters():  # so that requires_grad marks tensors computed from floating point numbers
            w.requires_grad_(w.is_floating_point())
        inputs = private_batch(inputs, lambda x: x.requires_grad_().clone() if x.is_floating_point() else x)
        for name in self._names:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(enter, with_kwargs=True)
            module.register_forward_hook(partial(leave, name), with_kwargs=True, always_call=True)
        with running(model):
            found = [*floating(self._evaluate(model, inputs)), *seen]
        self._shapes = self._shapes or [each.shape for each in found]
        if [each.shape for each in found] != self._shapes:  # the model took another branch
            return [found[0].new_full(shape, torch.inf) for shape in self._shapes]
        return found


def _noisy(generator: torch.Generator, memo: dict[int, Any], given: Any) -> Any:
    """Add noise to activations, alone or in tuples; return other objects, such as a list to write to, unchanged."""
    if type(given) is tuple:
        return tuple(_noisy(generator, memo, each) for each in given)
    if not isinstance(given, Tensor) or not given.requires_grad:
        return given
    if id(given) not in memo:
        numbers = given.detach()
        numbers = numbers[numbers.abs() < ACTIVATION]
        size = NOISE * typical(numbers) if numbers.numel() else 0.0
        memo[id(given)] = given + size * gaussian(given, generator)
    return memo[id(given)]


def _numbers(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor of any type in float64, with 0 for numbers that are not activations, such as masks."""
    numbers = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
    return numbers.masked_fill(~(numbers.abs() < ACTIVATION), 0.0)
