"""Find the symmetries of a model that hold on all inputs given, and that nothing which did not run on them can see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.messages import first_line
from quotient_manifolds.replica import private_batch, replica
from quotient_manifolds.symmetries.checks import ModelError, running
from quotient_manifolds.symmetries.outputs import Evaluate, answer, doubled, floating, tensors
from quotient_manifolds.symmetries.propose import did_not_run, proposals
from quotient_manifolds.symmetries.symmetries import Symmetries
from quotient_manifolds.symmetries.verify import verify_on_batches
from quotient_manifolds.symmetries.wires.reparameterization import gaussian, typical
from quotient_manifolds.symmetries.wires.run import Run

Idle = Mapping[str, Tensor]
"""Where in a parameter, by its name, the numbers are that did not run."""

NOISE = 1e-2  # relative, of what is added to what a module is given
ACTIVATION = 1e8  # the largest: what is larger masks scores


def find_symmetries(
    model: nn.Module, batch: Any, *others: Any, evaluate: Evaluate | None = None, declared: Symmetries | None = None
) -> Symmetries:
    """Return the symmetries of `model`, the parameters in no pair, and what is refused, from runs on the inputs.

    The operations of a run tell: pairs (G, H) of which the model uses only the product (queries and keys, values and
    output, low-rank adapters, bottlenecks, neurons of a ReLU or next to a gate), and reparameterizations: redundant
    biases, and what norms and the streams they read leave free. So no class need be known. They are proposals, for
    `verify_symmetries` or a measure to verify.

    batch: inputs as `verify_symmetries` takes them, `evaluate` likewise: sequences of several tokens. The first two
    examples are used, or all where parameters would be idle else, in the model's own precision. others: more inputs;
    what is found on the first is kept where it holds on all of them: give the first again for its other examples.

    Parameters that run on none of the inputs (experts, heads of other tasks, a mask token) may depend on what the rest
    computes. Kept is what no output of a module shows that has no such parameter inside, whatever the module is given.

    declared: pairs (see `declare_pair`) that are known, in the place of what is found of the same
    parameters. A module used twice is found once, under the first name of its parameters. A model may have no
    pairs, which is no error.
    TypeError for anything but a module. ValueError in train mode, where the model does not run on the inputs, and where
    a parameter has no values, is NaN or infinite, or is in a pair and quantised, sparse or complex.
    """
    runs = proposals(model, batch, evaluate, declared)
    found, trace = next(runs)
    if trace.idle:
        found, trace = next(runs, (found, trace))
    return held(model, (batch, *others), found, trace.idle, evaluate)


def held(
    model: nn.Module, batches: Sequence[Any], symmetries: Symmetries, idle: Idle, evaluate: Evaluate | None
) -> Symmetries:
    """Return the symmetries that hold on all batches and that no idle parameter can see; the others are refused.

    idle: what did not run on the first batch, as `Run.idle`. Code that uses an idle parameter lies outside of the
    modules that hold none: all that it can depend on is what these return, and parameters outside of them. So a
    symmetry is kept that moves parameters inside of one of these modules, if nothing that these modules return changes,
    to rounding. It has to be so for any input, as what did not run may change their inputs: noise is added to these.
    """
    for batch in batches[1:]:
        if idle:
            other = Run(model, batch, evaluate).idle
            idle = {name: both for name in idle.keys() & other.keys() if (both := idle[name] & other[name]).any()}
    if not symmetries.moved or not (idle or batches[1:]):
        return symmetries
    try:
        return symmetries.refusing(_false(model, batches, symmetries, idle, evaluate))
    except ModelError as error:
        if not idle:
            raise
        # Its code takes no noise, or no gradient.
        why = f"{did_not_run(min(idle))} (it cannot be verified: {first_line(error)})"
        return symmetries.refusing({each.name: why for each in symmetries.every})


def _false(
    model: nn.Module, batches: Sequence[Any], symmetries: Symmetries, idle: Idle, evaluate: Evaluate | None
) -> dict[str, str]:
    """Return the names of symmetries that do not hold on all batches, or that an idle parameter may see, and why."""
    evaluations: list[Evaluate] = [evaluate or answer] * len(batches)
    reasons: dict[str, str] = {}
    if idle:
        closed = [_ClosedModules(model, idle, evaluate or answer, batch) for batch in batches]
        inside = [names for each in closed for names in each.inside]
        outside = (each for each in symmetries.every if not any(names.issuperset(each.names) for names in inside))
        reasons = {each.name: _idle_near(idle, each.names) for each in outside}
        evaluations = [*closed]
    for number, (batch, evaluation) in enumerate(zip(batches, evaluations, strict=True), 1):
        left = symmetries.without(reasons)
        if not left.every:
            break
        checks = verify_on_batches(model, evaluation, [batch], left).checks
        false = {check.name for check in checks if check.verdict == "fails"}
        for each in left.every:
            if each.name in false:
                other = f"it changes the output on inputs number {number}"
                reasons[each.name] = _idle_near(idle, each.names) if idle and number == 1 else other
    return reasons


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
