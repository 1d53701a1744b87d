"""Evaluate a sharded model as a function of the coordinates z, in place, and refuse what its processes disagree in."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from quotient_manifolds.geometry import Geometry
from quotient_manifolds.geometry.sharded_space import ShardedSpace
from quotient_manifolds.replica import private_batch
from quotient_manifolds.sharded import ShardedModel, from_all
from quotient_manifolds.sharpness.objective import BatchObjective, scalar
from quotient_manifolds.sharpness.rounding import precisions_noted, warn_of_rounding
from quotient_manifolds.symmetries import Params


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
        with self._space.model.restored() as held:
            with torch.no_grad():
                self._space.ownership.scatter(self.space.move(z, self._space.buffers()), held)
            loss = self._loss().detach()
        return self.finite(self._mean(loss, self.precision))

    def value_and_gradient(self, z: Params) -> tuple[float, Params]:
        """Return the loss at the end of gamma_z and this process's share of its gradient in z."""
        with self._space.model.restored() as held:
            params, pull_back = self.space.linearise(z, self._space.buffers())
            self._space.ownership.scatter(params, held)
            del params  # what is moved here and held elsewhere is not needed while the pass takes memory, too
            loss = self._loss()
            if not loss.requires_grad:
                raise self._no_dependence()
            loss.backward()
            taken = self._space.model.take_gradients()
            if not taken:
                raise self._no_dependence()
            grads = self._space.ownership.gather(taken, consume=True)
        return self.finite(self._mean(loss, self.precision)), pull_back(grads)

    def differentiable_loss(self, params: Params) -> NoReturn:
        raise NotImplementedError(
            "Measures of a sharded model must be of the first order. Found one that needs the Hessian; take the worst "
            "case, the average case or the gradient norm, or measure a model that is not sharded"
        )

    def unmoved_losses(self) -> tuple[list[float], float]:
        """Return the loss of the model as it is, evaluated twice, and its machine epsilon."""
        losses = []
        with precisions_noted(self.model) as precisions:
            for _ in range(2):
                with self._space.model.restored():
                    losses.append(self._loss().detach())
        warn_of_rounding(self._space.model.original, precisions)
        precision = precisions.of(losses[0].dtype)
        return [float(self._mean(loss, precision)) for loss in losses], precision

    @property
    def _space(self) -> ShardedSpace:
        assert isinstance(self.space, ShardedSpace)
        return self.space

    def _loss(self) -> Tensor:
        with torch.enable_grad():  # as in BatchObjective: losses are compared with those computed for a gradient
            return scalar(self.loss(self.model, private_batch(self.batch)))

    def _mean(self, loss: Tensor, precision: float) -> Tensor:
        """Return the mean over the processes. ValueError where losses that must be one differ."""
        losses = self._space.model.values(loss)
        allowed = min(64 * max(precision, torch.finfo(loss.dtype).eps), 1e-3) * losses.abs().max()
        if self._space.model.alike and bool(losses.max() - losses.min() > allowed):
            raise ValueError(
                f"Under tensor parallelism all processes must have the same batches. Found losses from "
                f"{float(losses.min())!r} to {float(losses.max())!r} of batch {self.index}"
            )
        return losses.mean()

    def _no_dependence(self) -> ValueError:
        return ValueError(
            f"The loss on batch {self.index} has a gradient in no measured parameter; it must be computed from the "
            f"model it is given, without detach(), no_grad() or reentrant checkpointing. If an exception ended an "
            f"earlier backward pass of this sharded model, call its reset_iter_state() first"
        )


def check_shares(model: nn.Module, batches: Sequence[Any], geometry: Geometry) -> ShardedModel:
    """Return the model with what its processes hold, after comparing what they measure.

    Raises ValueError on all processes where one of them has another geometry, or more batches, or no rows, and where
    all must have the same. Warns where tensors differ in shape: the mean over processes is not the one over rows then.
    """
    sharded = ShardedModel(model)
    leaves = [tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch) for batch in batches]
    own = [[tuple(leaf.shape) for leaf in each if isinstance(leaf, Tensor)] for each in leaves]
    every = from_all((geometry.to_dict(), own))
    if any(found[0] != every[0][0] or len(found[1]) != len(every[0][1]) for found in every):
        said = " and ".join(f"{len(shapes)} in {settings}" for settings, shapes in every)
        raise ValueError(f"All processes must measure as many batches, in one geometry. Found {said}")
    different = [pair for _, other in every for pair in zip(own, other, strict=True) if pair[0] != pair[1]]
    if not different:
        return sharded
    found = f"Found one with tensors of shapes {different[0][0]} on this process and {different[0][1]} on another"
    if sharded.alike:
        raise ValueError(f"Under tensor parallelism all processes must have the same batches. {found}")
    if any(shape[:1] == (0,) for _, batches in every for shapes in batches for shape in shapes):
        raise ValueError(f"All processes must have rows of every batch. {found}")
    warnings.warn(
        f"The loss is the mean over processes, however much of a batch each of them has. {found}; give all as many "
        f"rows and labels, or read the value as such a mean",
        stacklevel=2,
    )
    return sharded
