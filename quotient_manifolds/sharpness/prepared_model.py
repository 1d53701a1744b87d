"""Check a model, its loss and its batches, and prepare them for measures in one geometry."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler

from quotient_manifolds.batches import taken_apart, tensors_in
from quotient_manifolds.geometry import Euclidean, Geometry, KnownSymmetries, ShardedSpace, TangentSpace, as_geometry
from quotient_manifolds.messages import sentence
from quotient_manifolds.sharded import is_sharded, together
from quotient_manifolds.sharpness.data_checks import ALL_CHECKS, data_checks
from quotient_manifolds.sharpness.losses import Loss, check_loss
from quotient_manifolds.sharpness.objective import (
    BatchObjective,
    Tick,
    autograd_available,
    check_shares,
    idle,
    objective_of,
)
from quotient_manifolds.sharpness.own_loss import checked_loss
from quotient_manifolds.sharpness.start import Refuted, Start
from quotient_manifolds.symmetries import Params
from quotient_manifolds.symmetries.canonical import NoPlaceError
from quotient_manifolds.symmetries.checks import check_eval, check_model

Made = TypeVar("Made")


@final
@dataclass(frozen=True)
class PreparedModel:
    """Hold a model, its loss and its batches, checked and ready to be measured in one geometry.

    geometry: the geometry with the symmetries that are quotiented out. asked: the geometry that the user gave. out:
    tensors for moved parameters; None for a sharded model, which is moved itself. precision: machine epsilon of the
    loss, or of the model's outputs if they are coarser. losses: the losses of the unperturbed model, by batch index.
    complaints: the errors of batches that cannot be measured, by batch index. start: the checks where a measure begins.
    known: results about the model, shared by measures.
    """

    model: nn.Module
    loss: Loss
    geometry: Geometry
    asked: Geometry
    space: TangentSpace
    batches: list[Any]
    out: Params | None
    precision: float
    losses: dict[int, float]
    complaints: dict[int, str]
    start: Start
    known: KnownSymmetries

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
        """Check model, loss and batches; ValueError or TypeError, one sentence, if they cannot be measured.

        Given symmetries come first: a pair of deficient rank is refused before anything is computed. The loss is
        evaluated on every batch. It must be the same where a measure begins, see `Start`. some: continue as long as one
        batch can be measured, and keep the complaints about the others. known: earlier results for this model, with the
        same weights. For a sharded model this is a collective operation: all its processes call it.
        """
        check_loss(loss)
        asked, known, sharded = as_geometry(geometry), known or KnownSymmetries(), None
        if isinstance(model, nn.Module) and is_sharded(model):
            found = together(lambda: _checked(model, batches))
            sharded = check_shares(model, found, asked)
        else:
            found = _checked(model, batches)
        with autograd_available(), data_checks():
            # Exactly the given symmetries are quotiented out, unless some have to be added or fail.
            given = asked.tangent_space(model, known) if sharded is None and asked.group else None
            plain = Euclidean().tangent_space(model) if sharded is None else Euclidean().sharded_space(sharded)
            losses, complaints, precision = _own_losses(model, loss, plain, found, known, some=some)
            with data_checks(ALL_CHECKS):
                geometry = asked.verified(model, loss, [found[index] for index in losses], known)
                if sharded is not None:
                    space: TangentSpace = geometry.sharded_space(sharded)
                elif given is not None and geometry is asked:
                    space = given
                else:
                    first = min(losses)
                    geometry, space = _placed(geometry, asked, model, loss, found[first], first, known)
            out = space.buffers() if sharded is None else None
            horizontal = geometry.horizontal(model, space, known)
        start = Start(model, loss, geometry, space, horizontal, found, losses, precision, known)
        return cls(model, loss, geometry, asked, space, found, out, precision, losses, complaints, start, known)

    @property
    def processes_on(self) -> torch.device | None:
        """Return the device of this process's share, if the model is sharded; None if it is not."""
        return self.space.model.device if isinstance(self.space, ShardedSpace) else None

    def without(self, refuted: Refuted) -> PreparedModel:
        """Return the prepared model without refuted symmetries, with a warning; ValueError if one of them was given."""
        geometry = self.geometry.without(refuted.failed, self.asked)
        space = geometry.tangent_space(self.model, self.known)
        horizontal = geometry.horizontal(self.model, space, self.known)
        start = replace(self.start, geometry=geometry, space=space, horizontal=horizontal)
        return replace(self, geometry=geometry, space=space, out=space.buffers(), start=start)

    def settled(self, work: Callable[[PreparedModel], Made]) -> Made:
        """Return work(self); if symmetries turn out to fail, begin again with work(this model without them)."""
        prepared = self
        while True:
            try:
                return work(prepared)
            except Refuted as refuted:
                prepared = prepared.without(refuted)

    def verified(self) -> PreparedModel:
        """Return the prepared model without symmetries that the gradient on any batch refutes, with a warning."""

        def check(prepared: PreparedModel) -> PreparedModel:
            for index in prepared.losses if prepared.start.by_gradients else ():
                objective = prepared.objective(index)
                objective.value_and_gradient(objective.zero())
            return prepared

        with autograd_available():
            return self.settled(check)

    def objective(self, index: int, tick: Tick = idle) -> BatchObjective:
        """Return the function z -> loss on batch `index`; tick is called after every forward pass."""
        if index in self.complaints:
            raise ValueError(self.complaints[index])
        given = (self.model, self.loss, self.space, self.batches[index], index)
        return objective_of(*given, self.out, tick, self.precision, self.start)


def _own_losses(
    model: nn.Module, loss: Loss, space: TangentSpace, batches: list[Any], known: KnownSymmetries, *, some: bool
) -> tuple[dict[int, float], dict[int, str], float]:
    """Return the losses of the unperturbed model, complaints about other batches, and machine epsilon of the losses."""
    losses, complaints, precisions = dict[int, float](), dict[int, str](), list[float]()
    for index, batch in enumerate(batches):
        check = partial(checked_loss, objective_of(model, loss, space, batch, index))
        try:
            losses[index], precision = known.losses.of((model, loss, batch), check)
            precisions.append(precision)
        except Exception as error:  # the model is the user's and may raise anything
            if not some or len(complaints) == len(batches) - 1:
                check_dtypes(model, batch, error)
                raise
            complaints[index] = sentence(error)
    return losses, complaints, max(precisions)


def _placed(
    geometry: Geometry,
    asked: Geometry,
    model: nn.Module,
    loss: Loss,
    batch: Any,
    index: int,
    known: KnownSymmetries,
) -> tuple[Geometry, TangentSpace]:
    """Return the geometry and its tangent space; if it has no canonical point, without the symmetries that fail."""
    try:
        return geometry, geometry.tangent_space(model, known)
    except NoPlaceError:
        if not (failed := geometry.failing(model, loss, batch, index, known)):
            raise
    geometry = geometry.without(failed, asked)
    return geometry, geometry.tangent_space(model, known)


def listed(batches: Iterable[Any]) -> list[Any]:
    """Return the batches as a list; TypeError for a single batch, which is easily passed by mistake."""
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
    """Raise TypeError if the error arose because a batch holds arrays, or another precision than the model's."""
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
