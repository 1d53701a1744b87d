"""Check a model, its loss and its batches, and make them ready to be measured in one geometry."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from quotient_manifolds.geometry import Euclidean, Geometry, KnownSymmetries, TangentSpace, as_geometry
from quotient_manifolds.geometry.parameters import precise
from quotient_manifolds.geometry.sharded_space import ShardedSpace
from quotient_manifolds.messages import sentence
from quotient_manifolds.replica import parameter_reached, private_batch
from quotient_manifolds.sharded import ShardedModel, is_sharded, together
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.objective import BatchObjective, Tick, autograd_available, idle, leaves, scalar
from quotient_manifolds.sharpness.rounded_products import precisions_noted, warn_of_rounding
from quotient_manifolds.sharpness.sharded_objective import ShardedObjective, check_agreed, check_same_loss, check_shares
from quotient_manifolds.symmetries import Params

ELSEWHERE = 0.01  # of the loss: a measure that begins at another one describes another function, half precision or not
_RANDOM_IN_TRAINING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase, nn.RReLU, nn.FractionalMaxPool2d)


@final
@dataclass(frozen=True)
class PreparedModel:
    """Hold a model, its loss and its batches, checked and ready to be measured in one geometry.

    geometry: its symmetries are those that were found and verified. out: tensors for the moved parameters, the same for
    all batches; None where a sharded model itself is moved. precision: machine epsilon of the loss, or of the model's
    outputs if it is coarser there. losses: of the model as it is, by the index of the batch. complaints: what is wrong
    with batches that cannot be measured, by their index.
    """

    model: nn.Module
    loss: Loss
    geometry: Geometry
    space: TangentSpace
    batches: list[Any]
    out: Params | None
    precision: float
    losses: Mapping[int, float]
    complaints: Mapping[int, str] = field(default_factory=dict)

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
        found before of this model, as it is.
        """
        geometry, known = as_geometry(geometry), known or KnownSymmetries()
        if isinstance(model, nn.Module) and is_sharded(model):
            return cls._sharded(model, loss, together(lambda: _checked(model, batches)), geometry, known)
        found = _checked(model, batches)
        losses, complaints, precisions = dict[int, float](), dict[int, str](), list[float]()
        with autograd_available():
            plain = Euclidean().at(model)
            for index, batch in enumerate(found):
                check = partial(_check_loss, BatchObjective(model, loss, plain, batch, index))
                try:
                    losses[index], precision = known.once(check, "checked", model, loss, batch)
                    precisions.append(precision)
                except Exception as error:  # the model is the user's
                    if not some or len(complaints) == len(found) - 1:
                        raise
                    complaints[index] = sentence(error)
            geometry = geometry.verified(model, loss, [found[index] for index in losses], known)
            space = geometry.at(model)
            out = space.buffers()
        return cls(model, loss, geometry, space, found, out, max(precisions), losses, complaints)

    @classmethod
    def _sharded(
        cls,
        model: nn.Module,
        loss: Loss,
        batches: list[Any],
        geometry: Geometry,
        known: KnownSymmetries,
    ) -> PreparedModel:
        """As `of`, for a model of which every process has a part: all of them come here together."""
        check_agreed({"geometry": geometry.to_dict(), "number of batches": len(batches)})
        with autograd_available():
            sharded = ShardedModel(model)
            check_shares(sharded, batches)
            space: TangentSpace = Euclidean().over(sharded)
            losses, precision = dict[int, float](), 0.0
            for index, batch in enumerate(batches):
                plain = ShardedObjective(model, loss, space, batch, index)
                with precisions_noted(model) as precisions:
                    values = [plain.unmoved_loss() for _ in range(2)]
                precision = max(precision, precisions.of(values[0].dtype))
                losses[index] = _checked_value([sharded.mean(value) for value in values], precision, index)
                if sharded.alike:
                    check_same_loss(sharded.values(values[0]), precision, index)
            warn_of_rounding(sharded.original, precisions)
            geometry = geometry.verified(model, loss, batches, known)
            space = geometry.over(sharded)
        return cls(model, loss, geometry, space, batches, None, precision, losses)  # the model itself is moved

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
        batch = self.batches[index]
        if isinstance(self.space, ShardedSpace):
            return ShardedObjective(self.model, self.loss, self.space, batch, index, None, tick, self.precision)
        return BatchObjective(self.model, self.loss, self.space, batch, index, self.out, tick, self.precision)


def _checked(model: nn.Module, batches: Iterable[Any]) -> list[Any]:
    """Return the batches as a list, after checking both."""
    _check_model(model)
    return listed(batches)


def listed(batches: Iterable[Any]) -> list[Any]:
    """Return the batches as a list; a single batch, easily passed by mistake, is refused."""
    single = isinstance(batches, tuple) and bool(batches) and all(isinstance(item, Tensor) for item in batches)
    if not isinstance(batches, Iterable):
        raise TypeError(f"batches must be a list of batches. Found {type(batches).__name__}")
    if isinstance(batches, (Tensor, Mapping, str)) or single:
        raise TypeError(f"batches must be a list of batches. Found one {type(batches).__name__}; wrap it: [batch]")
    found = list(batches)
    if not found:
        raise ValueError("There must be at least one batch to measure on. Found none")
    return found


def _check_model(model: nn.Module) -> None:
    """Raise unless the model is a module in eval mode throughout, whose measured parameters are precise enough."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"The model must be a torch.nn.Module. Found {type(model).__name__}")
    training = [(name, module) for name, module in model.named_modules() if module.training]
    if training:
        telling = [item for item in training if isinstance(item[1], _RANDOM_IN_TRAINING)] or training
        name, module = telling[0]
        raise ValueError(
            f"The model must be in eval mode. Found {name or 'the model itself'} ({type(module).__name__}) in train "
            f"mode; call model.eval() first"
        )
    for name, w in model.named_parameters():
        if w.layout != torch.strided:
            raise TypeError(f"Parameters must be dense. Found {name} with {w.layout}; call to_dense() on it")
        if w.requires_grad and w.is_floating_point() and w.dtype.itemsize < 2:
            raise TypeError(
                f"Parameters must have 16 bits or more. Found {name} in {w.dtype}, which cannot be computed with; call "
                f"model.float()"
            )


def _check_loss(objective: BatchObjective) -> tuple[float, float]:
    """Raise unless the loss is finite at the model, the same twice, and a function of the model it is given.

    Returns the loss and the relative spacing of the numbers it is computed in, machine epsilon.

    Two evaluations may differ by 64 units of the loss's precision (relative, at most 1e-3): parallel sums on
    accelerators do. A loss that reaches the original model, past the replica, would not see its parameters move; a part
    that only ever runs without gradients, as reentrant checkpointing does, would pass for one the loss does not use. A
    weight that a forward pass writes has no value of its own.
    """
    point = objective.space.point
    # A forward pass may write to them.
    clones = ({name: w.to(precise(w.dtype), copy=True) for name, w in point.items()} for _ in range(2))
    first, precision = _watched_loss(objective, next(clones))
    return _checked_value(
        [float(first), float(objective.detached_loss(next(clones)))], precision, objective.index
    ), precision


def _checked_value(values: list[float], precision: float, index: int) -> float:
    """Return the first of two values of the loss of one model; ValueError unless they are finite and the same."""
    first, second = values
    if not (math.isfinite(first) and math.isfinite(second)):
        raise ValueError(f"The loss of the unperturbed model must be finite. Found {first} on batch {index}")
    if abs(first - second) > min(64 * precision, 1e-3) * max(abs(first), abs(second)):
        raise ValueError(
            f"The loss must be deterministic. Found {first!r} and then {second!r} for the same parameters on batch "
            f"{index}; turn off whatever is random in the model and in the loss"
        )
    return first


def _watched_loss(objective: BatchObjective, params: Params) -> tuple[Tensor, float]:
    """Return the loss and its machine epsilon.

    Raises ValueError if the loss reaches the original model, or if a measured part runs without gradients.
    """
    inputs = leaves(params)
    measured = {id(leaf) for leaf in inputs.values()}
    model, function = objective.replica(inputs)
    with_gradients: dict[str, bool] = {}  # modules with measured parameters of their own: ever called with gradients on
    for name, module in model.named_modules():
        if any(id(w) in measured for w in module._parameters.values()):

            def note(module: nn.Module, inputs: Any, name: str = name) -> None:
                with_gradients[name] = with_gradients.get(name, False) or torch.is_grad_enabled()

            module.register_forward_pre_hook(note)
    versions = {name: leaf._version for name, leaf in inputs.items()}
    with torch.enable_grad(), precisions_noted(model) as precisions:
        value = scalar(function(model, private_batch(objective.batch, objective.cast)))
    own = objective.space.point
    if written := [
        name for name, leaf in inputs.items() if leaf._version != versions[name] or not torch.equal(leaf, own[name])
    ]:
        raise ValueError(
            f"A forward pass must leave the weights alone. Found that it writes to {written[0]}, as an embedding with "
            f"max_norm does; take that out, or freeze the parameter by requires_grad_(False)"
        )
    warn_of_rounding(objective.space.point, precisions)
    reached = parameter_reached(value, objective.model)
    if reached is not None:
        raise ValueError(
            f"The loss must be computed from the model it is given, which is a copy. Found that {reached} of the "
            f"original is reached, past the copy: by a closure in the loss, or a function in the model; use the "
            f"argument `model` (or self) there"
        )
    hidden = [name for name, seen in with_gradients.items() if not seen]
    if hidden:
        raise ValueError(
            f"Measured parameters must get gradients. Found that {hidden[0] or 'the model'} runs with gradients turned "
            f"off (reentrant checkpointing, no_grad or inference_mode); use checkpoint(..., use_reentrant=False), or "
            f"freeze its parameters by requires_grad_(False)"
        )
    return value.detach(), precisions.of(value.dtype)
