"""The loss of a model on one batch as a function of the coordinates z: what the ascent climbs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from quotient_manifolds.geometry import TangentSpace
from quotient_manifolds.replica import parameter_reached, private_batch, replica
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.symmetries import Params

_RANDOM_IN_TRAINING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase, nn.RReLU, nn.FractionalMaxPool2d)


@final
class LossOf:
    """L(w) = loss(model with parameters w, batch), on a replica of the model made for every evaluation.

    The model is read, never written, and nothing that one evaluation writes is there in the next: not to buffers, not
    to weights, not to the batch. A loss that is a module is copied with the model, parts that both have included.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.model = model
        self.loss = loss

    def replica(self, params: Params) -> tuple[nn.Module, Loss]:
        """A model that computes with `params`, which a forward pass may write to, and the loss to call it with."""
        if not isinstance(self.loss, nn.Module):
            return replica(self.model, params), self.loss
        both = replica(_Both(self.model, self.loss), {f"model.{name}": value for name, value in params.items()})
        return both.model, both.loss

    def at(self, params: Params, batch: Any) -> Tensor:
        """The loss at the parameters, differentiable in them as often as asked."""
        return evaluate(*self.replica(params), batch)

    def value(self, params: Params, batch: Any) -> Tensor:
        """The loss at the parameters, computed as it is where it is differentiated.

        Where nothing asks for a gradient, modules may take another path, of other rounding or even other meaning.
        """
        with torch.enable_grad():
            return self.at(_leaves(params), batch).detach()

    def with_gradient(self, params: Params, batch: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
        """The loss at the parameters and its gradient, None for a parameter that it does not depend on."""
        leaves = _leaves(params)
        with torch.enable_grad():
            value = self.at(leaves, batch)
            if not value.requires_grad:
                return value, dict.fromkeys(leaves)
            grads = torch.autograd.grad(value, tuple(leaves.values()), allow_unused=True)
        # An embedding with sparse=True gives a sparse one.
        dense = (grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads)
        return value.detach(), dict(zip(leaves, dense, strict=True))


def evaluate(model: nn.Module, loss: Loss, batch: Any) -> Tensor:
    """loss(model, batch) on private copies of the batch's tensors, checked to be one real number."""
    value = loss(model, private_batch(batch))
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"The loss must be a tensor with one element. Found {found}; reduce it, e.g. by .mean()")
    if not value.is_floating_point() or value.is_meta or value.layout != torch.strided:
        kind = "a tensor without values (meta device)" if value.is_meta else f"{value.dtype}, {value.layout}"
        raise TypeError(f"The loss must be a dense real floating point number. Found {kind}")
    return value.reshape(())


class _Both(nn.Module):
    """Model and loss as one module, so that one copy keeps what they share shared."""

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss


def _leaves(params: Params) -> Params:
    return {name: w.detach().requires_grad_() for name, w in params.items()}


@final
class BatchObjective:
    """z -> L(gamma_z(1)) on one batch, with its gradient; counts passes and reports them."""

    def __init__(
        self, loss: LossOf, space: TangentSpace, batch: Any, where: str, out: Params, tick: Callable[[], None]
    ) -> None:
        self.loss, self.space, self.batch, self.where, self.out, self.tick = loss, space, batch, where, out, tick

    def zero(self) -> Params:
        return self.space.zero()

    def sample(self, generator: torch.Generator) -> Params:
        return self.space.sample(generator)

    def value(self, z: Params) -> float:
        with torch.no_grad(), geometry_precision(self.space):
            moved = self.space.move(z, self.out)
        return self._finite(self.loss.value(moved, self.batch))

    def value_and_gradient(self, z: Params) -> tuple[float, Params]:
        with geometry_precision(self.space):
            params, pull_back = self.space.linearise(z, self.out)
        value, grads = self.loss.with_gradient(params, self.batch)
        loss = self._finite(value)
        if all(grad is None for grad in grads.values()):
            raise ValueError(
                f"The loss on {self.where} does not depend on any measured parameter; it must be computed from the "
                f"model it is given, without detach(), no_grad() or reentrant checkpointing"
            )
        with geometry_precision(self.space):
            return loss, pull_back(grads)

    def _finite(self, value: Tensor) -> float:
        loss = float(value)
        if not math.isfinite(loss):
            raise ValueError(
                f"The loss must be finite in the whole ball. Found {loss} on {self.where}; check batch and loss, "
                f"or take a smaller radius, or float64"
            )
        self.tick()
        return loss


def check_model(model: nn.Module) -> None:
    """Raises unless the model is a module in eval mode throughout, whose measured parameters are precise enough."""
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
        if w.requires_grad and w.is_floating_point() and w.dtype.itemsize < 4:
            raise TypeError(
                f"Parameters must be float32 or float64, or the steps of the ascent are lost in rounding. Found {name} "
                f"in {w.dtype}; call model.float(), and use torch.autocast inside the loss to save memory"
            )


def check_loss(loss: LossOf, params: Params, batch: Any) -> float:
    """Raises unless the loss is finite at the parameters, the same twice, and a function of the model it is given.

    Returns the relative spacing of the numbers it is computed in, machine epsilon.

    Two evaluations may differ by 64 units of the loss's precision (relative, at most 1e-3): parallel sums on
    accelerators do. A loss that reaches the original model, past the replica, would not see its parameters move; a part
    that only ever runs without gradients, as reentrant checkpointing does, would pass for one the loss does not use.
    """
    values = [_watched(loss, _clones(params), batch), loss.value(_clones(params), batch)]
    first, second = (float(value) for value in values)
    if not (math.isfinite(first) and math.isfinite(second)):
        raise ValueError(f"The loss of the unperturbed model must be finite. Found {first} on the first batch")
    precision = torch.finfo(values[0].dtype).eps
    if abs(first - second) > min(64 * precision, 1e-3) * max(abs(first), abs(second)):
        raise ValueError(
            f"The loss must be deterministic. Found {first!r} and then {second!r} for the same parameters and batch; "
            f"turn off whatever is random in the model and in the loss"
        )
    return precision


def _watched(loss: LossOf, params: Params, batch: Any) -> Tensor:
    """The loss, with what it reaches of the original model, and what runs without gradients, refused."""
    leaves = _leaves(params)
    measured = {id(leaf): name for name, leaf in leaves.items()}
    model, function = loss.replica(leaves)
    called: dict[str, bool] = {}  # modules with measured parameters of their own: ever called with gradients on
    for name, module in model.named_modules():
        if any(id(w) in measured for w in module._parameters.values()):

            def note(module: nn.Module, inputs: Any, name: str = name) -> None:
                called[name] = called.get(name, False) or torch.is_grad_enabled()

            module.register_forward_pre_hook(note)
    with torch.enable_grad():
        value = evaluate(model, function, batch)
    reached = parameter_reached(value, loss.model)
    if reached is not None:
        raise ValueError(
            f"The loss must be computed from the model it is given, which is a copy. Found that {reached} of the "
            f"original is reached, past the copy: by a closure in the loss, or a function in the model; use the "
            f"argument `model` (or self) there"
        )
    hidden = [name for name, with_gradient in called.items() if not with_gradient]
    if hidden:
        raise ValueError(
            f"Measured parameters must get gradients. Found that {hidden[0] or 'the model'} runs with gradients turned "
            f"off (reentrant checkpointing, no_grad or inference_mode); use checkpoint(..., use_reentrant=False), or "
            f"freeze its parameters by requires_grad_(False)"
        )
    return value.detach()


def _clones(params: Params) -> Params:
    """What a forward pass may write to."""
    return {name: w.clone() for name, w in params.items()}


@contextmanager
def geometry_precision(space: TangentSpace) -> Iterator[None]:
    """Inside, autocast is off: it is for the network, and would run the geometry's algebra in half precision."""
    device = next(iter(space.point.values())).device.type
    with torch.autocast(device, enabled=False):
        yield


@contextmanager
def autograd_available() -> Iterator[None]:
    """Gradients work inside, also where the caller is in no_grad or inference_mode."""
    with torch.inference_mode(False), torch.enable_grad():
        yield
