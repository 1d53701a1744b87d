"""Measure the loss on the straight path between two models, and sharpness along the orbit of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from quotient_manifolds.check import check_integer
from quotient_manifolds.geometry import KnownSymmetries
from quotient_manifolds.messages import sentence
from quotient_manifolds.replica import differing_tensors, private_batch, replica, twin
from quotient_manifolds.sharpness import Loss, WorstCase
from quotient_manifolds.sharpness.caution import warned
from quotient_manifolds.sharpness.losses import check_loss
from quotient_manifolds.sharpness.prepared_model import listed
from quotient_manifolds.symmetries import Params, Symmetries
from quotient_manifolds.symmetries.checks import check_eval, check_loaded, check_model
from quotient_manifolds.symmetries.outputs import RUN_ERRORS

Made = TypeVar("Made")
Model = TypeVar("Model", bound=nn.Module)

SAME = 1e-6  # losses with at most this relative difference are equal up to rounding


@dataclass(frozen=True)
class PathLosses:
    """Hold losses at (1 - t) a + t b, for t from 0 to 1."""

    t: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def barrier(self) -> float:
        """Return the largest excess of the loss over the straight line between its values at the ends (0 or more).

        NaN if a loss is NaN. [Frankle et al., 1912.05671]
        """
        first, last = self.losses[0], self.losses[-1]
        line = [(1 - t) * first + t * last for t in self.t]
        above = [loss - there for loss, there in zip(self.losses, line, strict=True)]
        return math.nan if any(map(math.isnan, above)) else max(above)


def loss_along_path(
    a: nn.Module, b: nn.Module, loss: Callable[..., Tensor], batches: Iterable[Any], *, points: int = 11
) -> PathLosses:
    """Compute the mean of loss(model, batch) over batches at (1 - t) a + t b, for equidistant t from 0 to 1.

    Parameters are interpolated, and so are floating-point buffers, such as running statistics. Other buffers (integers,
    different shapes, infinities, in one model alone) have no mean: they are taken from a for t < 1, and from b at
    t = 1. The models are not changed.

    Raises ValueError if parameters differ in name or shape, or if buffers without a mean differ and change the loss at
    b. Also raises it for models in train mode, fewer than 3 points, and no batches.
    """
    check_alike(a, b)
    check_integer("points", points, 3)
    check_loss(loss)
    given = listed(batches)
    first, last = parameters(a), parameters(b)
    ts = torch.linspace(0, 1, points, dtype=torch.float64).tolist()
    here, there = (dict(each.named_buffers()) for each in (a, b))
    differing = differing_tensors(here, there)
    mixed = [name for name in differing if name in here and name in there and _has_mean(here[name], there[name])]

    def mean(model: nn.Module) -> float:
        return sum(float(loss(model, private_batch(batch))) for batch in given) / len(given)

    def at(t: float) -> float:
        buffers = {name: _between(here[name], there[name], t) for name in mixed}
        return mean(replica(a, {name: _between(w, last[name], t) for name, w in first.items()}, buffers=buffers))

    with torch.no_grad():
        end = at(1.0)
        if rest := [name for name in differing if name not in mixed]:  # then the end is computed by b itself
            shared = {name: _like(w, here[name]) for name, w in there.items() if name in here}
            own = mean(replica(b, {name: _like(w, first[name]) for name, w in last.items()}, buffers=shared))
            _check_no_matter(rest, end, own, first)
            end = own
        return PathLosses(tuple(ts), (*map(at, ts[:-1]), end))


def _has_mean(one: Tensor, other: Tensor) -> bool:
    """Return whether two buffers can be interpolated: numbers of 16 bits or more, finite wherever they differ."""
    for each in (one, other):
        if not each.is_floating_point() or each.dtype.itemsize < 2 or each.layout != torch.strided:
            return False
    if one.shape != other.shape:
        return False
    other = other.to(one)
    return bool((one.isfinite() & other.isfinite() | (one == other) | (one.isnan() & other.isnan())).all())


def _between(one: Tensor, other: Tensor, t: float) -> Tensor:
    """Return (1 - t) one + t other, in the dtype of the first; equal entries, such as infinities, are kept."""
    other = other.detach().to(one)
    return torch.where(one == other, one.detach(), one.detach().lerp(other, t))


def _like(w: Tensor, other: Tensor) -> Tensor:
    """Return a copy of a tensor on the device of another, and in its dtype if both are floating-point."""
    both = w.is_floating_point() and other.is_floating_point()
    return w.detach().to(other.device, other.dtype if both else w.dtype, copy=True)


def _check_no_matter(names: Sequence[str], end: float, own: float, params: Params) -> None:
    """Raise ValueError unless the loss of b stays the same with a's buffers of these names."""
    rounding = max((torch.finfo(w.dtype).eps for w in params.values() if w.is_floating_point()), default=0.0)
    same = math.isclose(end, own, rel_tol=max(SAME, 8 * rounding)) or (math.isnan(end) and math.isnan(own))
    if not same:
        s = "s" * (len(names) == 1)
        raise ValueError(
            f"buffers that have no mean must be the same in both models, or not matter. Found that {', '.join(names)} "
            f"differ{s} and change{s} the loss from {own:.6g} to {end:.6g}: give both models one value of these."
        )


def along_orbit(
    model: nn.Module,
    symmetries: Symmetries,
    measures: Sequence[WorstCase],
    loss: Loss,
    batch: Any,
    scales: Sequence[float],
    *,
    seed: int = 0,
    known: KnownSymmetries | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the sharpness of a model (scale: None) and of its transforms by A = scale x Gaussian per head, with ratios.

    A is drawn anew for every scale. The floating-point tensors of the batch are cast to the dtype of the model. [paper,
    ICML version, Sec. 6.2] If a model cannot be measured, or the original model's loss does not increase, value and
    ratio are None and `failed` is a sentence that says why. A ratio is also None if the original model has no value.
    known: earlier results for the model, or for one with the same operations.
    """
    w = next(model.parameters())
    batch = private_batch(batch, lambda x: x.to(w if x.is_floating_point() else w.device))
    before: dict[str, float] = {}
    known = known or KnownSymmetries()
    for index, scale in enumerate((None, *scales)):
        there: nn.Module | None = model
        lost = ""
        if scale is not None:
            there, lost = attempted(partial(symmetries.transformed, model, scale=scale, seed=seed + index - 1))
        known = known.elsewhere()
        for each in measures:
            name, value, failed = each.geometry.name, None, lost
            if there is not None:
                value, failed = attempted(partial(_mean, each, there, loss, batch, known, increases=scale is None))
            if scale is None and value is not None:
                before[name] = value
            ratio = value / before[name] if value is not None and name in before else None
            yield {"measure": name, "scale": scale, "value": value, "ratio": ratio, "failed": failed}


def attempted(work: Callable[[], Made]) -> tuple[Made | None, str]:
    """Return the result of `work` and "", or None and a sentence on the error."""
    try:
        return work(), ""
    except RUN_ERRORS as error:
        return None, sentence(error)


def _mean(
    measure: WorstCase, model: nn.Module, loss: Loss, batch: Any, known: KnownSymmetries, *, increases: bool
) -> float:
    """Return the mean sharpness; with `increases`, ValueError unless the loss increases."""
    value = warned(measure.of(model, loss, [batch], known)).mean
    if increases and not value > 0:
        raise ValueError(
            f"The loss of the model must increase within radius {measure.radius:g} of {measure.geometry.name}. Found "
            f"no increase in {next(model.parameters()).dtype}: choose more steps, or another radius."
        )
    return value


def check_alike(a: nn.Module, b: nn.Module) -> None:
    """Raise ValueError if a model cannot run, or with the first parameter that differs in name or shape.

    Two models that use the same parameters in different ways, as with another activation, are not distinguished.
    """
    for each in (a, b):
        check_model(each)
    here, there = ({name: tuple(w.shape) for name, w in each.named_parameters()} for each in (a, b))
    for name in dict.fromkeys((*here, *there)):
        if here.get(name) != there.get(name):
            shapes = " and ".join(str(each.get(name, "no such parameter")) for each in (here, there))
            raise ValueError(
                f"both models must have one architecture. Found that {name!r} has {shapes}: build both from one "
                "configuration."
            )
    for each in (a, b):
        check_eval(each)
        check_loaded(each)


def parameters(model: nn.Module) -> Params:
    """Return the parameters of a model by name, without a graph."""
    return {name: w.detach() for name, w in model.named_parameters()}


def state(model: nn.Module) -> Params:
    """Return the parameters and floating-point buffers of a model by name, without a graph."""
    return parameters(model) | {name: w.detach() for name, w in model.named_buffers() if w.is_floating_point()}


def placed(model: Model, params: Mapping[str, Tensor]) -> Model:
    """Return a copy of a model with other parameters and buffers of these names."""
    there = twin(model)
    with torch.no_grad():
        for name, w in (*there.named_parameters(), *there.named_buffers()):
            if name in params:
                w.copy_(params[name])
    return there


def distance(params: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return |params - other| / |other|, over all tensors that both have with the same shape."""
    shared = [(w.double(), params[name].to(w.device).double()) for name, w in other.items() if name in params]
    pairs = [(a, b) for b, a in shared if a.shape == b.shape]
    change = math.sqrt(sum(float((a - b).square().sum()) for a, b in pairs))
    return change / (math.sqrt(sum(float(b.square().sum()) for _, b in pairs)) or 1.0)
