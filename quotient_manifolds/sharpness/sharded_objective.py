"""Evaluate a sharded model as a function of the coordinates z, in place, and refuse what its processes disagree in."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from quotient_manifolds.geometry.sharded_space import ShardedSpace
from quotient_manifolds.replica import private_batch
from quotient_manifolds.sharded import ShardedModel, from_all
from quotient_manifolds.sharpness.objective import BatchObjective, scalar
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
        return self._counted(loss)

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
        return self._counted(loss), pull_back(grads)

    def differentiable_loss(self, params: Params) -> NoReturn:
        raise NotImplementedError(
            "Measures of a sharded model must be of the first order. Found one that needs the Hessian; take the worst "
            "case, the average case or the gradient norm, or measure a model that is not sharded"
        )

    def unmoved_loss(self) -> Tensor:
        """Return the loss of the model as it is, on this process."""
        with self._space.model.restored():
            return self._loss().detach()

    @property
    def _space(self) -> ShardedSpace:
        assert isinstance(self.space, ShardedSpace)
        return self.space

    def _loss(self) -> Tensor:
        with torch.enable_grad():  # as in BatchObjective: losses are compared with those computed for a gradient
            return scalar(self.loss(self.model, private_batch(self.batch)))

    def _counted(self, loss: Tensor) -> float:
        """Return the mean over the processes, and count the pass. ValueError where losses that must be one differ."""
        losses = self._space.model.values(loss)
        if self._space.model.alike:
            check_same_loss(losses, max(self.precision, torch.finfo(loss.dtype).eps), self.index)
        return self.finite(losses.mean())

    def _no_dependence(self) -> ValueError:
        return ValueError(
            f"The loss on batch {self.index} has a gradient in no measured parameter; it must be computed from the "
            f"model it is given, without detach(), no_grad() or reentrant checkpointing. If an exception ended an "
            f"earlier backward pass of this sharded model, call its reset_iter_state() first"
        )


def check_agreed(settings: Mapping[str, Any]) -> None:
    """Raise ValueError on all processes unless all of them have the same settings."""
    own = dict(settings)
    for other in from_all(own):
        for name in own.keys() | other.keys():
            if own.get(name) != other.get(name):
                raise ValueError(
                    f"All processes must measure the same. Found {name} {own.get(name)!r} on this one and "
                    f"{other.get(name)!r} on another"
                )


def check_shares(model: ShardedModel, batches: Sequence[Any]) -> None:
    """Warn where processes have tensors of different shapes: the mean over processes is not the one over rows then.

    Raises ValueError on all processes where one of them has no rows at all, and where all must have the same.
    """
    own = [tuple(_shapes(batch)) for batch in batches]
    every = from_all(own)
    different = [pair for other in every for pair in zip(own, other, strict=True) if pair[0] != pair[1]]
    if not different:
        return
    mine, theirs = map(list, different[0])
    found = f"Found one with tensors of shapes {mine} on this process and {theirs} on another"
    if model.alike:
        raise ValueError(f"Under tensor parallelism all processes must have the same batches. {found}")
    if any(shape[:1] == (0,) for batches in every for shapes in batches for shape in shapes):
        raise ValueError(f"All processes must have rows of every batch. {found}")
    warnings.warn(
        f"The loss is the mean over processes, however much of a batch each of them has. {found}; give all as many "
        f"rows and labels, or read the value as such a mean",
        stacklevel=2,
    )


def check_same_loss(losses: Tensor, precision: float, index: int) -> None:
    """Raise ValueError where processes that must have the same loss have different ones: they have different data."""
    if bool(losses.max() - losses.min() > min(64 * precision, 1e-3) * losses.abs().max()):
        raise ValueError(
            f"Under tensor parallelism all processes must have the same batches. Found losses from "
            f"{float(losses.min())!r} to {float(losses.max())!r} of batch {index}"
        )


def _shapes(batch: Any) -> Iterator[tuple[int, ...]]:
    for leaf in tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch):
        if isinstance(leaf, Tensor):
            yield tuple(leaf.shape)
        elif isinstance(leaf, Mapping):  # Hugging Face's BatchEncoding, which torch takes for a leaf
            yield from _shapes(leaf)
