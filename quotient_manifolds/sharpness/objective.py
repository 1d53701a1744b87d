"""Turn a model, its loss and a batch into a function of the coordinates z, which is what the measures look at."""

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
    """Do nothing: the tick of whoever counts no passes."""


class Checks(Protocol):
    """Check what is computed at z = 0 on the batch of this index: the loss, and its gradient in the parameters."""

    def check_loss(self, index: int, base: float) -> None: ...
    def check_gradient(self, index: int, grads: Gradients) -> None: ...


@dataclass(frozen=True)
class BatchObjective:
    """Represent the function z -> L(gamma_z(1)) on one batch, with its gradient.

    L(w) = loss(model with parameters w, batch) is computed on a replica that is made for every evaluation: the model is
    read, never written, and nothing that one evaluation writes is there in the next, not to buffers, not to weights,
    not to the batch. gamma_z is the geodesic of `space` with the initial velocity z.

    index: of the batch, for messages and seeds. out: tensors that moved parameters are written into; new ones where it
    is None. tick: called after every evaluation. precision: machine epsilon of the loss. start: what checks loss and
    gradient whenever they are evaluated at z = 0. wide: whether all is computed in float64, see `double`.
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
        """Return the loss at the end of gamma_z and its gradient in z, in tensors of its own.

        Raises ValueError if the loss is not finite, or depends on no parameter.
        """
        params, pull_back = self.space.linearise(z, self.out)
        inputs = leaves(params)
        with torch.enable_grad():
            value = self.differentiable_loss(inputs)
            # In the dict alone, which the pull-back empties: each is as large as its parameter.
            grads = dict(
                zip(inputs, torch.autograd.grad(value, tuple(inputs.values()), allow_unused=True), strict=True)
            )
        if all(grad is None for grad in grads.values()):
            raise self._no_dependence()
        for name, grad in grads.items():
            if grad is not None and grad.is_sparse:  # of an embedding with sparse=True
                grads[name] = grad.to_dense()
        loss = self.finite(value)
        if self.start is not None and is_zero(z):
            self.start.check_loss(self.index, loss)
            self.start.check_gradient(self.index, grads)
        return loss, pull_back(grads)

    def differentiable_loss(self, params: Params) -> Tensor:
        """Return the loss at parameters that require grad, differentiable in them as often as asked."""
        model, loss = self.replica(params)
        precise = DoublePrecision() if self.wide else nullcontext()
        with TrueGradients(), data_checks(ALL_CHECKS), precise:
            value = scalar(loss(model, private_batch(self.batch, self.cast)))
        if not value.requires_grad:
            raise self._no_dependence()
        return value

    def replica(self, params: Params) -> tuple[nn.Module, Loss]:
        """Return a model that computes with `params`, which a forward pass may write to, and the loss to call it with.

        A loss that is a module is copied together with the model, so that what they share stays shared.
        """
        if not isinstance(self.loss, nn.Module):
            return replica(self.model, params, self.cast), self.loss
        both = replica(
            nn.ModuleList([self.model, self.loss]), {f"0.{name}": w for name, w in params.items()}, self.cast
        )
        return both[0], both[1]

    @property
    def cast(self) -> Cast:
        """Return what is done to all that does not move: as it is, unless what moves is in another precision."""
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
        """Return the source of what is random on this batch: no two batches of a measure share theirs."""
        return torch.Generator().manual_seed(seed + self.index)

    def spacing(self, loss: float) -> float:
        """Return the distance between neighbouring floating point numbers at this value of the loss."""
        return self.precision * abs(loss)

    def detached_loss(self, params: Params) -> Tensor:
        """Return the loss at the parameters, computed as it is where it is differentiated."""
        # With gradients on although nobody asks for any: without them modules may take another path, of other
        # rounding or even other meaning, and losses are compared with those that were computed for a gradient.
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
    """Represent the function z -> L(gamma_z(1)) of a model whose processes have a part of its parameters each.

    L is the mean over the processes of what the loss gives on each: of parts of the data under FSDP, where gradients
    are averaged, too; of the same number under tensor parallelism. Hooks of the model do not see other tensors than
    its own, so it is no replica that is evaluated: the model's own memory is moved, and put back bit for bit, with its
    buffers and gradients, whatever happens.
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
            del params  # what is moved here and held elsewhere is not needed while the pass takes memory, too
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
        """Return the loss of the model as it is on this process, evaluated twice."""
        losses = []
        for _ in range(2):
            with self.sharded.restored():
                losses.append(self._loss().detach())
        return losses

    @property
    def sharded(self) -> ShardedModel:
        """Return the model with what its processes hold."""
        return self._space.model

    @property
    def _space(self) -> ShardedSpace:
        assert isinstance(self.space, ShardedSpace)
        return self.space

    def _loss(self) -> Tensor:
        # As in BatchObjective: losses are compared with those computed for a gradient.
        with torch.enable_grad(), TrueGradients():
            return scalar(self.loss(self.model, private_batch(self.batch)))

    def mean(self, loss: Tensor, precision: float) -> Tensor:
        """Return the mean over the processes. ValueError where losses that must be one differ."""
        losses = self.sharded.values(loss)
        allowed = min(64 * max(precision, torch.finfo(loss.dtype).eps), 1e-3) * losses.abs().max()
        if self.sharded.alike and bool(losses.max() - losses.min() > allowed):
            raise ValueError(
                f"Under tensor parallelism all processes must have the same batches. Found losses from "
                f"{float(losses.min())!r} to {float(losses.max())!r} of batch {self.index}"
            )
        return losses.mean()


def check_agreed(settings: Mapping[str, Any]) -> None:
    """Raise ValueError on all processes unless they have the same settings: they would wait for each other for ever."""
    for name, own in settings.items():
        every = from_all(own)
        if any(each != own for each in every):
            raise ValueError(f"All processes must measure the same. Found {name} {' and '.join(map(repr, every))}")


def check_shares(model: nn.Module, batches: Sequence[Any], geometry: Geometry) -> ShardedModel:
    """Return the model with what its processes hold, after comparing what they measure.

    Raises ValueError on all processes where one of them has another geometry, or more batches, or no rows, and where
    all must have the same. Warns where tensors differ in shape: the mean over processes is not the one over rows then.
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
    """Return z -> loss of a model, whole or sharded as the space is."""
    return (ShardedObjective if isinstance(space, ShardedSpace) else BatchObjective)(model, loss, space, *others)


def is_zero(z: Params) -> bool:
    """Return whether all coordinates are 0."""
    return not any(bool(block.any()) for block in z.values())


def _single(tensor: Tensor) -> Tensor:
    """Return floating point numbers in at least single precision, all else as it is."""
    return tensor.to(precise(tensor.dtype)) if tensor.is_floating_point() else tensor


def leaves(params: Params) -> Params:
    """Return the parameters as the leaves of a new graph."""
    return {name: w.detach().requires_grad_() for name, w in params.items()}


def scalar(value: Any) -> Tensor:
    """Return what a loss returned as a tensor without axes. Raises unless it is one real number."""
    value = value.full_tensor() if hasattr(value, "full_tensor") else value  # of tensor parallelism
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"The loss must be a tensor with one element. Found {found}; reduce it, e.g. by .mean()")
    if not value.is_floating_point():
        raise TypeError(f"The loss must be a real floating point number. Found {value.dtype}")
    return value.reshape(())


@contextmanager
def autograd_available() -> Iterator[None]:
    """Make gradients work inside, also where the caller is in no_grad or inference_mode."""
    with torch.inference_mode(False), torch.enable_grad():
        yield
