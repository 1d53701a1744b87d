"""The loss of a model on one batch as a function of the coordinates z: what the ascent climbs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from quotient_manifolds.geometry import TangentSpace
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.symmetries import Params

Progress = Callable[[int, int], None]

_PREFIX = "model."
_RANDOM_IN_TRAINING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase, nn.RReLU, nn.FractionalMaxPool2d)


@final
class LossOf(nn.Module):
    """L(w) = loss(model with parameters w, batch); the model is called, never written.

    Model and loss are one module, so that functional_call reaches whatever part of the model the loss uses. Every call
    gets fresh clones of the buffers: what a forward pass writes into them is dropped.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.training = False

    def forward(self, batch: Any, leaves: tuple[Tensor, ...] | None = None) -> Any:
        """The loss; with `leaves` also its gradient there, taken while the module holds them.

        A checkpointed layer runs again in the backward pass, and must find the same parameters then.
        """
        value = self.loss(self.model, batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"The loss must be a tensor with one element. Found {found}; reduce it, e.g. by .mean()")
        if leaves is None:
            return value
        if not value.requires_grad:
            return value, (None,) * len(leaves)
        return value.detach(), torch.autograd.grad(value, leaves, allow_unused=True)

    def at(self, params: Params, batch: Any) -> Tensor:
        """The loss at the parameters, differentiable in them."""
        value: Tensor = self._call(params, batch)
        return value

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
            value, grads = self._call(leaves, batch, tuple(leaves.values()))
        return value, dict(zip(leaves, grads, strict=True))

    def _call(self, params: Params, *arguments: Any) -> Any:
        state = {name: buffer.clone() for name, buffer in self.named_buffers()}
        state |= {_PREFIX + name: value for name, value in params.items()}
        return torch.func.functional_call(self, state, arguments)


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
    """Raises unless the model is in eval mode throughout (naming the module that matters most) and precise enough."""
    training = [(name, module) for name, module in model.named_modules() if module.training]
    if training:
        telling = [item for item in training if isinstance(item[1], _RANDOM_IN_TRAINING)] or training
        name, module = telling[0]
        raise ValueError(
            f"The model must be in eval mode. Found {name or 'the model itself'} ({type(module).__name__}) in train "
            f"mode; call model.eval() first"
        )
    for name, w in model.named_parameters():
        if w.requires_grad and w.dtype in (torch.float16, torch.bfloat16):
            raise TypeError(
                f"Parameters must be float32 or float64, or the steps of the ascent are lost in rounding. Found {name} "
                f"in {w.dtype}; call model.float(), and use torch.autocast inside the loss to save memory"
            )


def check_deterministic(loss: LossOf, params: Params, batch: Any) -> None:
    """Raises unless the loss at the parameters is finite and two evaluations of it agree.

    They may differ by 64 units of the loss's precision (relative, at most 1e-3): parallel sums on accelerators do.
    """
    values = [loss.value(params, batch) for _ in range(2)]
    first, second = (float(value) for value in values)
    if not (math.isfinite(first) and math.isfinite(second)):
        raise ValueError(f"The loss of the unperturbed model must be finite. Found {first} on the first batch")
    precision = torch.finfo(values[0].dtype).eps if values[0].is_floating_point() else 0.0
    if abs(first - second) > min(64 * precision, 1e-3) * max(abs(first), abs(second)):
        raise ValueError(
            f"The loss must be deterministic. Found {first!r} and then {second!r} for the same parameters and batch; "
            f"turn off whatever is random in the model and in the loss"
        )


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
