"""Turn a model, its loss and a batch into a function of the coordinates z, on which the measures work."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol, final

import torch
from torch import Tensor, nn

from quotient_manifolds.batches import tensors_in
from quotient_manifolds.geometry import Geometry, ShardedSpace, TangentSpace
from quotient_manifolds.geometry.pair_block import Gradients
from quotient_manifolds.geometry.parameters import precise
from quotient_manifolds.replica import Cast, TrueGradients, private_batch, replica, unchanged
from quotient_manifolds.sharded import ShardedModel, from_all
from quotient_manifolds.sharpness.data_checks import ALL_CHECKS, data_checks
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.symmetries import Params
from quotient_manifolds.symmetries.double_precision import DoublePrecision

Tick = Callable[[], None]
"""Called whenever a forward pass (or another unit of a measure's work) is done."""


def idle() -> None:
    """Do nothing: the tick of a caller that counts no passes."""


class Checks(Protocol):
    """Check the loss at z = 0 on batch `index`, and its gradient in the parameters."""

    def check_loss(self, index: int, base: float) -> None: ...
    def check_gradient(self, index: int, grads: Gradients) -> None: ...


@dataclass(frozen=True)
class BatchObjective:
    """Represent the function z -> L(gamma_z(1)) on one batch, with its gradient.

    L(w) = loss(model with parameters w, batch) is computed on a replica that is made for every evaluation. The model is
    never written, and what one evaluation writes to buffers, weights or the batch does not affect the next. gamma_z is
    the geodesic of `space` with the initial velocity z.

    index: the number of the batch, for messages and seeds. out: tensors to write moved parameters into; None for new
    ones. tick: called after every evaluation. precision: machine epsilon of the loss. start: checks loss and gradient
    whenever they are evaluated at z = 0. wide: whether everything is computed in float64, see `double`.
    """

    model: nn.Module
    loss: Loss
    space: TangentSpace
    batch: Any
    index: int = 0
    out: Params | None = None
    tick: Tick = idle
    precision: float = 0.0
    start: Checks | None = None
    wide: bool = False

    def double(self) -> BatchObjective:
        """Return the same function of the same coordinates, computed in float64, whatever the model casts to."""
        return replace(self, space=self.space.double(), out=None, start=None, wide=True)

    def zero(self) -> Params:
        return self.space.zero()

    def sample(self, generator: torch.Generator) -> Params:
        return self.space.sample(generator)

    def value(self, z: Params) -> float:
        """Return the loss at the end of gamma_z. Raises ValueError if it is not finite."""
        with torch.no_grad():
            moved = self.space.move(z, self.out)
        loss = self.finite(self.detached_loss(moved))
        if self.start is not None and is_zero(z):
            self.start.check_loss(self.index, loss)
        return loss

    def value_and_gradient(self, z: Params) -> tuple[float, Params]:
        """Return the loss at the end of gamma_z and its gradient in z, in new tensors.

        Raises ValueError if the loss is not finite, or depends on no parameter.
        """
        params, pull_back = self.space.linearise(z, self.out)
        inputs = leaves(params)
        with torch.enable_grad():
            value = self.differentiable_loss(inputs)
            # Only this dict holds the gradients, each as large as its parameter: the pull-back empties it.
            grads = dict(
                zip(inputs, torch.autograd.grad(value, tuple(inputs.values()), allow_unused=True), strict=True)
            )
        if all(grad is None for grad in grads.values()):
            raise self._no_dependence()
        for name, grad in grads.items():
            if grad is not None and grad.is_sparse:  # an embedding with sparse=True
                grads[name] = grad.to_dense()
        loss = self.finite(value)
        if self.start is not None and is_zero(z):
            self.start.check_loss(self.index, loss)
            self.start.check_gradient(self.index, grads)
        return loss, pull_back(grads)

    def differentiable_loss(self, params: Params) -> Tensor:
        """Return the loss at parameters that require grad, differentiable in them any number of times."""
        model, loss = self.replica(params)
        precise = DoublePrecision() if self.wide else nullcontext()
        with TrueGradients(), data_checks(ALL_CHECKS), precise:
            value = scalar(loss(model, private_batch(self.batch, self.cast)))
        if not value.requires_grad:
            raise self._no_dependence()
        return value

    def replica(self, params: Params) -> tuple[nn.Module, Loss]:
        """Return a model that computes with `params`, to which a forward pass may write, and the loss to call on it.

        A loss that is a module is copied together with the model, so that they still share modules and parameters.
        """
        if not isinstance(self.loss, nn.Module):
            return replica(self.model, params, self.cast), self.loss
        both = replica(
            nn.ModuleList([self.model, self.loss]), {f"0.{name}": w for name, w in params.items()}, self.cast
        )
        return both[0], both[1]

    @property
    def cast(self) -> Cast:
        """Return the cast of tensors that do not move: the identity, unless parameters move in another precision."""
        if self.wide:
            return _double
        half = any(w.dtype.itemsize < 4 for w in self.model.parameters() if w.requires_grad and w.is_floating_point())
        return _single if half else unchanged

    def finite(self, value: Tensor) -> float:
        """Return an evaluated loss as a number and count the pass. Raises ValueError if it is not finite."""
        loss = float(value.detach())
        if not math.isfinite(loss):
            raise ValueError(
                f"The loss must be finite in the whole ball. Found {loss} on batch {self.index}; check batch and loss, "
                f"or take a smaller radius, or float64"
            )
        self.tick()
        return loss

    def generator(self, seed: int) -> torch.Generator:
        """Return the random generator of this batch; each batch of a measure has another seed."""
        return torch.Generator().manual_seed(seed + self.index)

    def spacing(self, loss: float) -> float:
        """Return the distance between neighboring floating point numbers at this value of the loss."""
        return self.precision * abs(loss)

    def detached_loss(self, params: Params) -> Tensor:
        """Return the loss at the parameters, computed in the same way as when it is differentiated."""
        # Gradients are on although none is needed: without them modules may take another path, with other rounding or
        # even another meaning, but this loss is compared with losses that were computed for a gradient.
        with torch.enable_grad(), data_checks(ALL_CHECKS):
            model, loss = self.replica(leaves(params))
            return scalar(loss(model, private_batch(self.batch, self.cast))).detach()

    def _no_dependence(self) -> ValueError:
        return ValueError(
            f"The loss on batch {self.index} does not depend on any measured parameter; it must be computed from the "
            f"model it is given, without detach(), no_grad() or reentrant checkpointing (after an exception in a "
            f"backward pass of a sharded model call its reset_iter_state())"
        )


@final
@dataclass(frozen=True)
class ShardedObjective(BatchObjective):
    """Represent the function z -> L(gamma_z(1)) of a sharded model: each process holds a part of its parameters.

    L is the mean of the loss over the processes. Under FSDP each of them has a part of the data, and gradients are
    averaged, too; under tensor parallelism all compute the same number. The model's hooks work on its own tensors only,
    so no replica is evaluated: the model's own memory is written, and always restored bit for bit, with its buffers and
    gradients.
    """

    def value(self, z: Params) -> float:
        """Return the loss at the end of gamma_z. Raises ValueError if it is not finite."""
        with self.sharded.restored() as held, data_checks(ALL_CHECKS):
            with torch.no_grad():
                self._space.ownership.scatter(self.space.move(z, self._space.buffers()), held)
            loss = self._loss().detach()
        return self.finite(self.mean(loss, self.precision))

    def value_and_gradient(self, z: Params) -> tuple[float, Params]:
        """Return the loss at the end of gamma_z and this process's share of its gradient in z."""
        with self.sharded.restored() as held, data_checks(ALL_CHECKS):
            params, pull_back = self.space.linearise(z, self._space.buffers())
            self._space.ownership.scatter(params, held)
            del params  # frees parameters moved here but held elsewhere before the pass takes memory
            loss = self._loss()
            if not loss.requires_grad:
                raise self._no_dependence()
            loss.backward()
            taken = self.sharded.take_gradients()
            if not taken:
                raise self._no_dependence()
            grads = self._space.ownership.gather(taken, consume=True)
        return self.finite(self.mean(loss, self.precision)), pull_back(grads)

    def differentiable_loss(self, params: Params) -> NoReturn:
        raise NotImplementedError(
            "Measures of a sharded model must be of the first order. Found one that needs the Hessian; take the worst "
            "case, the average case or the gradient norm, or measure a model that is not sharded"
        )

    def unmoved_losses(self) -> list[Tensor]:
        """Return the loss of the unperturbed model on this process, evaluated twice."""
        losses = []
        for _ in range(2):
            with self.sharded.restored():
                losses.append(self._loss().detach())
        return losses

    @property
    def sharded(self) -> ShardedModel:
        """Return the sharded model, with the parts that processes hold."""
        return self._space.model

    @property
    def _space(self) -> ShardedSpace:
        assert isinstance(self.space, ShardedSpace)
        return self.space

    def _loss(self) -> Tensor:
        # Gradients are on because, as in BatchObjective, losses are compared with those computed for a gradient.
        with torch.enable_grad(), TrueGradients():
            return scalar(self.loss(self.model, private_batch(self.batch)))

    def mean(self, loss: Tensor, precision: float) -> Tensor:
        """Return the mean over the processes. ValueError if losses that must agree differ."""
        losses = self.sharded.values(loss)
        allowed = min(64 * max(precision, torch.finfo(loss.dtype).eps), 1e-3) * losses.abs().max()
        if self.sharded.alike and bool(losses.max() - losses.min() > allowed):
            raise ValueError(
                f"Under tensor parallelism all processes must have the same batches. Found losses from "
                f"{float(losses.min())!r} to {float(losses.max())!r} of batch {self.index}"
            )
        return losses.mean()


def check_agreed(settings: Mapping[str, Any]) -> None:
    """Raise ValueError on all processes unless they have the same settings: with different ones they deadlock."""
    for name, own in settings.items():
        every = from_all(own)
        if any(each != own for each in every):
            raise ValueError(f"All processes must measure the same. Found {name} {' and '.join(map(repr, every))}")


def check_shares(model: nn.Module, batches: Sequence[Any], geometry: Geometry) -> ShardedModel:
    """Return the sharded model, after checking that all processes measure the same.

    Raises ValueError on all processes if one of them has another geometry or number of batches, or no rows, or if
    shapes differ under tensor parallelism. Otherwise warns if shapes differ: the mean over processes is then not the
    mean over rows.
    """
    sharded = ShardedModel(model)
    check_agreed({"geometry": geometry.to_dict(), "number of batches": len(batches)})
    own = [[tuple(tensor.shape) for tensor in tensors_in(batch)] for batch in batches]
    every = from_all(own)
    different = [pair for other in every for pair in zip(own, other, strict=True) if pair[0] != pair[1]]
    if not different:
        return sharded
    found = f"Found one with tensors of shapes {different[0][0]} on this process and {different[0][1]} on another"
    if sharded.alike:
        raise ValueError(f"Under tensor parallelism all processes must have the same batches. {found}")
    if any(shape[:1] == (0,) for batches in every for shapes in batches for shape in shapes):
        raise ValueError(f"All processes must have rows of every batch. {found}")
    warnings.warn(
        f"The loss is the mean over processes, however much of a batch each of them has. {found}; give all as many "
        f"rows and labels, or read the value as such a mean",
        stacklevel=2,
    )
    return sharded


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def objective_of(model: nn.Module, loss: Loss, space: TangentSpace, *others: Any) -> BatchObjective:
    """Return the function z -> loss of a model, which is sharded if the space is."""
    return (ShardedObjective if isinstance(space, ShardedSpace) else BatchObjective)(model, loss, space, *others)


def is_zero(z: Params) -> bool:
    """Return whether all coordinates are 0."""
    return not any(bool(block.any()) for block in z.values())


def _single(tensor: Tensor) -> Tensor:
    """Cast floating point numbers to at least single precision; return other tensors unchanged."""
    return tensor.to(precise(tensor.dtype)) if tensor.is_floating_point() else tensor


def leaves(params: Params) -> Params:
    """Return the parameters as the leaves of a new graph."""
    return {name: w.detach().requires_grad_() for name, w in params.items()}


def scalar(value: Any) -> Tensor:
    """Return a loss as a tensor without axes. Raises ValueError or TypeError unless it is one real number."""
    value = value.full_tensor() if hasattr(value, "full_tensor") else value  # under tensor parallelism
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"The loss must be a tensor with one element. Found {found}; reduce it, e.g. by .mean()")
    if not value.is_floating_point():
        raise TypeError(f"The loss must be a real floating point number. Found {value.dtype}")
    return value.reshape(())


@contextmanager
def autograd_available() -> Iterator[None]:
    """Enable gradients inside, even if the caller is in no_grad or inference_mode."""
    with torch.inference_mode(False), torch.enable_grad():
        yield
