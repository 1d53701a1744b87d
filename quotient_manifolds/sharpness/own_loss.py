"""Evaluate the loss of the unperturbed model, and check that it can be measured."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.batches import tensors_in
from quotient_manifolds.geometry.parameters import precise
from quotient_manifolds.replica import parameter_reached, private_batch
from quotient_manifolds.sharpness.objective import BatchObjective, ShardedObjective, leaves, scalar
from quotient_manifolds.symmetries import Params


def checked_loss(objective: BatchObjective) -> tuple[float, float]:
    """Return the loss of the unperturbed model, and machine epsilon of the precision that it is computed in.

    Raises ValueError unless the loss is finite and a function of the model that it is given.
    """
    if isinstance(objective, ShardedObjective):
        with _halves_noted(objective.model) as halves:
            first, second = objective.unmoved_losses()
        _warn_of_rounding(objective.sharded.original, halves)
        precision = _precision(first.dtype, halves)
        value = float(objective.mean(first, precision))
        check_repeated(value, float(objective.mean(second, precision)), precision, objective.index)
    else:
        watched, precision = _watched_loss(objective, _copied(objective))
        value = float(watched)
    if not math.isfinite(value):
        raise ValueError(f"The loss of the unperturbed model must be finite. Found {value} on batch {objective.index}")
    return value, precision


def check_repeated(first: float, second: float, precision: float, index: int) -> None:
    """Raise ValueError unless two losses at the same parameters agree, see `is_one`."""
    if not is_one(first, second, precision):
        raise ValueError(
            f"The loss must be deterministic. Found {first!r} and then {second!r} for the same parameters on batch "
            f"{index}; turn off whatever is random in the model and in the loss"
        )


def is_one(first: float, second: float, precision: float) -> bool:
    """Return whether two losses differ by rounding at most: 64 units of their precision (relative, at most 1e-3).

    Parallel sums on accelerators differ by that much.
    """
    return abs(first - second) <= min(64 * precision, 1e-3) * max(abs(first), abs(second))


def repeated_loss(objective: BatchObjective) -> float:
    """Evaluate the loss of the unperturbed model again."""
    return float(objective.detached_loss(_copied(objective)))


def _copied(objective: BatchObjective) -> Params:
    """Return copies of the parameters, because a forward pass may write to them."""
    return {name: w.to(precise(w.dtype), copy=True) for name, w in objective.space.point.items()}


def _watched_loss(objective: BatchObjective, params: Params) -> tuple[Tensor, float]:
    """Return the loss at `params` and its machine epsilon; ValueError unless it is a function of these alone.

    The forward pass runs once, on a replica with hooks, and each check uses what the hooks recorded.
    """
    inputs, own = leaves(params), objective.space.point
    model, function = objective.replica(inputs)
    versions = {name: leaf._version for name, leaf in inputs.items()}
    with_gradients = _grad_modes(model, inputs)
    with torch.enable_grad(), _halves_noted(model) as halves:
        value = scalar(function(model, private_batch(objective.batch, objective.cast)))
    _check_unwritten(inputs, own, versions)
    _warn_of_rounding(own, halves)
    _check_replica_alone(value, objective.model)
    _check_gradients_enabled(model, with_gradients)
    return value.detach(), _precision(value.dtype, halves)


def _grad_modes(model: nn.Module, inputs: Params) -> dict[nn.Module, bool]:
    """Return a dict that a run of the model fills: for modules with measured parameters, if gradients were ever on."""
    measured = {id(leaf) for leaf in inputs.values()}
    modes: dict[nn.Module, bool] = {}

    def note(module: nn.Module, inputs: Any) -> None:
        modes[module] = modes.get(module, False) or torch.is_grad_enabled()

    for module in model.modules():
        if any(id(w) in measured for w in module._parameters.values()):
            module.register_forward_pre_hook(note)
    return modes


def _check_unwritten(inputs: Params, own: Params, versions: Mapping[str, int]) -> None:
    """Raise ValueError if a forward pass wrote to a weight, whose value is then undefined."""
    for name, leaf in inputs.items():
        if leaf._version != versions[name] or not torch.equal(leaf, own[name]):
            raise ValueError(
                f"A forward pass must leave the weights alone. Found that it writes to {name}, as an embedding with "
                f"max_norm does; take that out, or freeze the parameter by requires_grad_(False)"
            )


def _check_replica_alone(value: Tensor, original: nn.Module) -> None:
    """Raise ValueError if the loss depends on a parameter of the original model, which does not move."""
    if (reached := parameter_reached(value, original)) is not None:
        raise ValueError(
            f"The loss must be computed from the model it is given, which is a copy. Found that {reached} of the "
            f"original is reached, past the copy: by a closure in the loss, or a function in the model (use the "
            f"argument `model`, or self, there), or by a tensor that the model keeps from an earlier run (clear it)"
        )


def _check_gradients_enabled(model: nn.Module, with_gradients: Mapping[nn.Module, bool]) -> None:
    """Raise ValueError if a module with measured parameters only ever ran without gradients, as if it were unused."""
    if hidden := [name for name, module in model.named_modules() if not with_gradients.get(module, True)]:
        raise ValueError(
            f"Measured parameters must get gradients. Found that {hidden[0] or 'the model'} runs with gradients turned "
            f"off (reentrant checkpointing, no_grad or inference_mode); use checkpoint(..., use_reentrant=False), or "
            f"freeze its parameters by requires_grad_(False)"
        )


# ---- models that compute in half precision although they are stored in a higher one


@contextmanager
def _halves_noted(model: nn.Module) -> Iterator[dict[torch.dtype, bool]]:
    """Yield a dict filled as the model runs: half-precision types it computes in, and whether its outputs have them.

    Autocast and the mixed precision of sharded models cause this. Outputs do not count if autocast is still on when the
    model returns, because losses are then computed in float32 from the start.
    """
    found: dict[torch.dtype, bool] = {}

    def note(module: nn.Module, inputs: object, output: Any) -> None:
        first = next((value for value in tensors_in(output) if value.is_floating_point()), None)
        if first is not None:
            device = first.device.type
            inside = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
            kind = torch.get_autocast_dtype(device) if inside else first.dtype
            found.update({kind: not inside} if kind in (torch.float16, torch.bfloat16) else {})

    hook = model.register_forward_hook(note)
    try:
        yield found
    finally:
        hook.remove()


def _precision(loss: torch.dtype, halves: Mapping[torch.dtype, bool]) -> float:
    """Return machine epsilon of a loss of this type, or of the outputs it is computed from if they are coarser."""
    return max(torch.finfo(kind).eps for kind in (loss, *(half for half, output in halves.items() if output)))


def _warn_of_rounding(point: Params, halves: Iterable[torch.dtype]) -> None:
    """Warn if a matrix lies on the grid of the half precision of its products, so that rounding hides small changes.

    Weights that were trained in float32 lie between the points of the grid, and their changes survive on average.
    Matrices that are mostly zero, such as diagonal ones, are skipped, because they lie on every grid.
    """
    for half, (name, w) in product(halves, point.items()):
        if w.ndim > 1 and 2 * int(w.count_nonzero()) > w.numel() and torch.equal(w.to(half).to(w.dtype), w):
            warnings.warn(
                f"Small changes of {name} are lost in rounding, and the value may be far off: products with it are in "
                f"{half}, and all of its numbers lie on the grid of that type, as those of a checkpoint in half "
                f"precision do; measure without autocast or mixed precision",
                stacklevel=2,
            )
            return
