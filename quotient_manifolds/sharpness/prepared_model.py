"""Check a model, its loss and its batches, and make them ready to be measured in one geometry."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler

from quotient_manifolds.batches import taken_apart, tensors_in
from quotient_manifolds.geometry import Euclidean, Geometry, KnownSymmetries, ShardedSpace, TangentSpace, as_geometry
from quotient_manifolds.geometry.parameters import precise
from quotient_manifolds.messages import sentence
from quotient_manifolds.replica import parameter_reached, private_batch
from quotient_manifolds.sharded import is_sharded, together
from quotient_manifolds.sharpness.data_checks import ALL_CHECKS, data_checks
from quotient_manifolds.sharpness.losses import Loss, check_loss
from quotient_manifolds.sharpness.objective import (
    BatchObjective,
    ShardedObjective,
    Tick,
    autograd_available,
    check_shares,
    idle,
    leaves,
    scalar,
)
from quotient_manifolds.symmetries import Params
from quotient_manifolds.symmetries.checks import check_eval, check_model

ELSEWHERE = 0.01  # of the loss: a measure that begins at another one describes another function, half precision or not


@final
@dataclass(frozen=True)
class PreparedModel:
    """Hold a model, its loss and its batches, checked and ready to be measured in one geometry.

    geometry: its symmetries are those that were found and verified. out: tensors for the moved parameters; None where a
    sharded model itself is moved. precision: machine epsilon of the loss, or of the model's outputs if it is coarser
    there. losses: of the model as it is, and complaints: what is wrong with batches that cannot be measured, by index.
    """

    model: nn.Module
    loss: Loss
    geometry: Geometry
    space: TangentSpace
    batches: list[Any]
    out: Params | None
    precision: float
    losses: dict[int, float]
    complaints: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        loss: Loss,
        batches: Iterable[Any],
        geometry: Geometry | str | float,
        *,
        some: bool = False,
        known: KnownSymmetries | None = None,
    ) -> PreparedModel:
        """Check what is to be measured; ValueError or TypeError, one sentence, where it cannot be.

        The loss is tried on every batch: finite, the same twice, and unchanged along symmetries that are quotiented
        out. some: go on as long as one batch can be measured, and keep the complaints about the others. known: what was
        found before of this model, as it is. All processes that share a model come here together.
        """
        check_loss(loss)
        geometry, known, sharded = as_geometry(geometry), known or KnownSymmetries(), None
        if isinstance(model, nn.Module) and is_sharded(model):
            found = together(lambda: _checked(model, batches))
            sharded = check_shares(model, found, geometry)
        else:
            found = _checked(model, batches)
        losses, complaints, precisions = dict[int, float](), dict[int, str](), list[float]()
        with autograd_available(), data_checks():
            plain = Euclidean().at(model) if sharded is None else Euclidean().over(sharded)
            for index, batch in enumerate(found):
                check = partial(_checked_loss, _objective(model, loss, plain, batch, index))
                try:
                    losses[index], precision = known.once(check, "checked", model, loss, batch)
                    precisions.append(precision)
                except Exception as error:  # the model is the user's
                    if not some or len(complaints) == len(found) - 1:
                        check_dtypes(model, batch, error)
                        raise
                    complaints[index] = sentence(error)
            with data_checks(ALL_CHECKS):
                geometry = geometry.verified(model, loss, [found[index] for index in losses], known)
            space = geometry.at(model, known) if sharded is None else geometry.over(sharded)
            out = space.buffers() if sharded is None else None
        return cls(model, loss, geometry, space, found, out, max(precisions), losses, complaints)

    @property
    def processes_on(self) -> torch.device | None:
        """Return the device of this process's share, if the model is sharded; None if it is not."""
        return self.space.model.device if isinstance(self.space, ShardedSpace) else None

    def check_start(self, index: int, base: float) -> None:
        """Raise ValueError unless a measure of batch `index` began at the model: an alarm for all causes."""
        own = self.losses[index]
        if not abs(base - own) <= ELSEWHERE * max(1.0, abs(own)):
            raise ValueError(
                f"A measure must begin at the loss of the model. Found {base!r} for {own!r} on batch {index}; the "
                f"model or the loss is random, or a symmetry of the geometry is none: use Adaptive(), or verify='all'"
            )

    def objective(self, index: int, tick: Tick = idle) -> BatchObjective:
        """Return z -> loss on batch `index`; tick is called after every forward pass."""
        if index in self.complaints:
            raise ValueError(self.complaints[index])
        given = (self.model, self.loss, self.space, self.batches[index], index)
        return _objective(*given, self.out, tick, self.precision)


def _objective(model: nn.Module, loss: Loss, space: TangentSpace, *others: Any) -> BatchObjective:
    return (ShardedObjective if isinstance(space, ShardedSpace) else BatchObjective)(model, loss, space, *others)


def listed(batches: Iterable[Any]) -> list[Any]:
    """Return the batches as a list; a single batch, easily passed by mistake, is refused."""
    single = isinstance(batches, tuple) and bool(batches) and all(isinstance(item, Tensor) for item in batches)
    if single or not isinstance(batches, Iterable) or isinstance(batches, (Tensor, Mapping, str)):
        raise TypeError(f"batches must be a list of batches. Found one {type(batches).__name__}; wrap it: [batch]")
    if isinstance(getattr(batches, "sampler", None), RandomSampler):
        warnings.warn(
            "a shuffled DataLoader gives other batches, and so another value, at every call: pass list(loader), made "
            "once, or a loader with shuffle=False",
            stacklevel=2,
        )
    found = list(batches)
    if not found:
        raise ValueError("There must be at least one batch to measure on. Found none")
    return found


def check_dtypes(model: nn.Module, batch: Any, error: Exception) -> None:
    """Raise TypeError where a model cannot compute because a batch holds arrays, or another precision than its own."""
    own = {w.dtype for w in model.parameters() if w.is_floating_point()}
    if any(type(leaf).__module__ == "numpy" for _, leaf in taken_apart(batch)):
        raise TypeError("A batch must hold tensors. Found numpy.ndarray; convert it by torch.as_tensor") from error
    given = [tensor.dtype for tensor in tensors_in(batch) if tensor.is_floating_point()]
    if isinstance(error, RuntimeError) and len(own) == 1 and (other := [dtype for dtype in given if dtype not in own]):
        name = str(next(iter(own))).removeprefix("torch.")
        raise TypeError(
            f"A batch must have the dtype of the model, {name}. Found {str(other[0]).removeprefix('torch.')}; convert "
            f"the batch by .to(torch.{name}), or the model"
        ) from error


def _checked(model: nn.Module, batches: Iterable[Any]) -> list[Any]:
    """Return the batches as a list; TypeError or ValueError unless the model is a module in eval mode throughout."""
    check_model(model)
    check_eval(model)
    return listed(batches)


def _checked_loss(objective: BatchObjective) -> tuple[float, float]:
    """Return the loss at the model, and the relative spacing of the numbers it is computed in, machine epsilon.

    Raises ValueError unless it is finite, the same twice, and a function of the model it is given. It may differ by 64
    units of its precision (relative, at most 1e-3): parallel sums on accelerators do.
    """
    if isinstance(objective, ShardedObjective):
        with _halves_noted(objective.model) as halves:
            losses = objective.unmoved_losses()
        _warn_of_rounding(objective.sharded.original, halves)
        precision = _precision(losses[0].dtype, halves)
        first, second = (float(objective.mean(loss, precision)) for loss in losses)
    else:
        # Copies, for a forward pass may write to them.
        point = objective.space.point
        clones = ({name: w.to(precise(w.dtype), copy=True) for name, w in point.items()} for _ in range(2))
        value, precision = _watched_loss(objective, next(clones))
        first, second = float(value), float(objective.detached_loss(next(clones)))
    if not (math.isfinite(first) and math.isfinite(second)):
        raise ValueError(f"The loss of the unperturbed model must be finite. Found {first} on batch {objective.index}")
    if abs(first - second) > min(64 * precision, 1e-3) * max(abs(first), abs(second)):
        raise ValueError(
            f"The loss must be deterministic. Found {first!r} and then {second!r} for the same parameters on batch "
            f"{objective.index}; turn off whatever is random in the model and in the loss"
        )
    return first, precision


def _watched_loss(objective: BatchObjective, params: Params) -> tuple[Tensor, float]:
    """Return the loss and its machine epsilon.

    Raises ValueError if a weight that a forward pass writes has no value of its own, if the loss reaches the original
    model, past the replica, and would not see its parameters move, or if a measured part only ever runs without
    gradients, as under reentrant checkpointing, and would pass for one the loss does not use.
    """
    inputs, own = leaves(params), objective.space.point
    measured = {id(leaf) for leaf in inputs.values()}
    model, function = objective.replica(inputs)
    with_gradients: dict[nn.Module, bool] = {}  # modules with measured parameters: ever called with gradients on

    def note(module: nn.Module, inputs: Any) -> None:
        with_gradients[module] = with_gradients.get(module, False) or torch.is_grad_enabled()

    for module in model.modules():
        if any(id(w) in measured for w in module._parameters.values()):
            module.register_forward_pre_hook(note)
    versions = {name: leaf._version for name, leaf in inputs.items()}
    with torch.enable_grad(), _halves_noted(model) as halves:
        value = scalar(function(model, private_batch(objective.batch, objective.cast)))
    if written := [
        name for name, leaf in inputs.items() if leaf._version != versions[name] or not torch.equal(leaf, own[name])
    ]:
        raise ValueError(
            f"A forward pass must leave the weights alone. Found that it writes to {written[0]}, as an embedding with "
            f"max_norm does; take that out, or freeze the parameter by requires_grad_(False)"
        )
    _warn_of_rounding(own, halves)
    if (reached := parameter_reached(value, objective.model)) is not None:
        raise ValueError(
            f"The loss must be computed from the model it is given, which is a copy. Found that {reached} of the "
            f"original is reached, past the copy: by a closure in the loss, or a function in the model (use the "
            f"argument `model`, or self, there), or by a tensor that the model keeps from an earlier run (clear it)"
        )
    if hidden := [name for name, module in model.named_modules() if not with_gradients.get(module, True)]:
        raise ValueError(
            f"Measured parameters must get gradients. Found that {hidden[0] or 'the model'} runs with gradients turned "
            f"off (reentrant checkpointing, no_grad or inference_mode); use checkpoint(..., use_reentrant=False), or "
            f"freeze its parameters by requires_grad_(False)"
        )
    return value.detach(), _precision(value.dtype, halves)


# ---- what is computed in half precision, although it is stored in more


@contextmanager
def _halves_noted(model: nn.Module) -> Iterator[dict[torch.dtype, bool]]:
    """Yield what is filled as the model runs: types of half precision it computes in, and whether its outputs do.

    That is what autocast brings, and mixed precision of sharded models. Outputs do not where autocast is still on when
    the model returns: losses are then computed in float32 from the start.
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
    """Return machine epsilon of a loss of this type: that of the outputs it comes from, where theirs is coarser."""
    return max(torch.finfo(kind).eps for kind in (loss, *(half for half, output in halves.items() if output)))


def _warn_of_rounding(point: Params, halves: Iterable[torch.dtype]) -> None:
    """Warn if a matrix lies on the grid of the precision that its products have: a small move is rounded away.

    Weights that were trained in float32 lie anywhere between its points, and their moves survive on average. Nothing
    is told of a matrix that is mostly zero, as diagonal ones are: they lie on every grid.
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
