"""Refuse what parameters may depend on that did not run: experts, heads of other tasks, a mask token."""

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
"""Where in a parameter, by its name, the numbers are that did not run."""

NOISE = 1e-2  # relative, of what is added to what a module is given
ACTIVATION = 1e8  # the largest: what is larger masks scores
CHANGE = 1e-8  # relative: outputs that a finite element changes by more are not invariant
_STEP = 0.3
_NUMBER = re.compile(r"\.\d+(?=\.)")  # of a layer, or of one of several experts


def did_not_run(name: str) -> str:
    """Return why a symmetry is refused that a parameter may depend on which did not run."""
    return f"{name} did not run, and may be part of it: give inputs that go everywhere"


def idle_like(idle: Idle, names: Iterable[str], params: Mapping[str, Tensor]) -> str:
    """Return an idle parameter that may do what one of these does elsewhere; "" if none is.

    One of the same path but for a number, as experts have, or a matrix of a module beside it, as branches are.
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
    """Return the path of the module in which a parameter's module stands."""
    return name.rpartition(".")[0].rpartition(".")[0]


def held(
    model: nn.Module, batches: Sequence[Any], symmetries: Symmetries, idle: Idle, evaluate: Evaluate | None
) -> Symmetries:
    """Return the symmetries that no idle parameter can see; the others are refused.

    Code that uses an idle parameter lies outside of the modules that hold none: all that it can depend on is what these
    return, and parameters outside of them. So a symmetry is kept that moves parameters inside of one of these modules,
    if nothing that these modules return changes, to rounding. It has to be so for any input, as what did not run may
    change their inputs: noise is added to these.
    """
    if not symmetries.moved:
        return symmetries
    try:
        return symmetries.refusing(_seen(model, batches, symmetries, idle, evaluate))
    except ModelError as error:  # its code takes no noise, or no gradient
        why = f"{did_not_run(min(idle))} (it cannot be verified: {first_line(error)})"
        return symmetries.refusing({each.name: why for each in symmetries.every})


def _seen(
    model: nn.Module, batches: Sequence[Any], symmetries: Symmetries, idle: Idle, evaluate: Evaluate | None
) -> dict[str, str]:
    """Return the names of symmetries that an idle parameter may see, and why."""
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
    """Yield those of which a finite element changes outputs, by bisection; of translations each set apart."""
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
    """Return why a symmetry of these parameters is refused, by the idle parameter that is nearest by its path."""
    paths = [name.split(".") for name in names]

    def common(name: str) -> int:
        return len([*takewhile(lambda parts: len(set(parts)) == 1, zip(name.split("."), *paths, strict=False))])

    return did_not_run(max(sorted(idle), key=common))


class _ClosedModules:
    """Evaluate a model and return, after what it returns, all that modules without an idle parameter take and give.

    Those that are called by none of their kind, in the order of their calls. Noise is added to what they are given, but
    to nothing that is computed from integers alone, such as a mask or the angles of a rotation. inside: for each, the
    parameters that nothing else holds.
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
            memo: dict[int, Any] = {}  # what is given twice stays the same
            noisy = partial(_noisy, generator, memo)
            return (noisy(args), {name: noisy(value) for name, value in kwargs.items()}) if depth == 1 else None

        def leave(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            nonlocal depth
            depth -= 1
            if depth == 0:
                self._called.add(name)
                seen.extend(map(_numbers, tensors((args, kwargs, output))))

        for w in model.parameters():  # by gradients torch tells what is computed from numbers
            w.requires_grad_(w.is_floating_point())
        inputs = private_batch(inputs, lambda x: x.requires_grad_().clone() if x.is_floating_point() else x)
        for name in self._names:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(enter, with_kwargs=True)
            module.register_forward_hook(partial(leave, name), with_kwargs=True, always_call=True)
        with running(model):
            found = [*floating(self._evaluate(model, inputs)), *seen]
        self._shapes = self._shapes or [each.shape for each in found]
        if [each.shape for each in found] != self._shapes:  # it went another way
            return [found[0].new_full(shape, torch.inf) for shape in self._shapes]
        return found


def _noisy(generator: torch.Generator, memo: dict[int, Any], given: Any) -> Any:
    """Return activations, alone or in tuples, with noise; anything else, as a list that is written to, as it is."""
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
    """Return a copy of a tensor of any type as numbers that can be compared: 0 for those that mask others."""
    numbers = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
    return numbers.masked_fill(~(numbers.abs() < ACTIVATION), 0.0)
