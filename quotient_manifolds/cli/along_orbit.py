"""Sharpness along a symmetry orbit: the same function elsewhere in parameter space, measured before and after."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from quotient_manifolds.progress import Progress
from quotient_manifolds.replica import private_batch, replica
from quotient_manifolds.sharpness import MeasureResult
from quotient_manifolds.symmetries import Symmetries, random_move


@dataclass(frozen=True)
class OrbitRow:
    """Hold a measure of a model before and after moving it along its orbit by A = scale x Gaussian, on one batch."""

    dtype: str
    measure: str
    scale: float
    before: float
    after: float
    loss_before: float
    loss_after: float

    @property
    def ratio(self) -> float:
        """Return after / before: 1 for a measure that belongs to the function."""
        return self.after / self.before


DTYPES = {"float32": torch.float32, "float64": torch.float64}
SCALES = (0.01, 0.1, 1.0, 10.0, 100.0)

Sharpness = Callable[[nn.Module, str], MeasureResult]  # (model, key of the measure)


def along_orbit(
    model: nn.Module,
    symmetries: Symmetries,
    keys: Sequence[str],
    sharpness: Sharpness,
    *,
    scales: Sequence[float] = SCALES,
    seed: int = 0,
    progress: Progress,
) -> tuple[OrbitRow, ...]:
    """Each measure of a model, and of its move by A = scale x Gaussian per head, drawn anew for every scale.

    In float32 and in float64; the model itself is copied. [paper, ICML version, Sec. 6.2]
    Raises ValueError if a sharpness to compare with is not positive.
    """
    rows: list[OrbitRow] = []
    total, done = len(DTYPES) * len(keys) * (1 + len(scales)), 0

    def measured(at: nn.Module) -> dict[str, MeasureResult]:
        nonlocal done
        results = {}
        for key in keys:
            progress("moving along the orbit", done, total)
            results[key] = sharpness(at, key)
            done += 1
        return results

    for name, dtype in DTYPES.items():
        start = copy.deepcopy(model).to(dtype)
        before = measured(start)
        _check_rise(before, name)
        for index, scale in enumerate(scales):
            moved = copy.deepcopy(start)
            there = random_move(start, symmetries, scale=scale, seed=seed + index, translations=False)
            moved.load_state_dict(there, strict=False)  # buffers stay
            after = measured(moved)
            rows += [_row(name, key, scale, before[key], after[key]) for key in keys]
    progress("moving along the orbit", total, total)
    return tuple(rows)


def distance(model: nn.Module, batch: tuple[Any, Tensor]) -> Tensor:
    """Mean squared distance of the model's first output from fixed targets: a loss for a model without a head."""
    inputs, targets = batch
    return F.mse_loss(first_output(_called(model, inputs)), targets)


def distance_batch(model: nn.Module, inputs: Any, seed: int) -> tuple[Any, Tensor]:
    """A batch for `distance`: the inputs, and targets that are standard Gaussian, of the shape of the output."""
    with torch.no_grad():
        output = first_output(_called(replica(model, {}), private_batch(inputs)))  # a forward pass may write
    targets = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return inputs, targets.to(output)


def _called(model: nn.Module, inputs: Any) -> Any:
    """The model's answer to keywords, to several arguments, or to one."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def first_output(output: Any) -> Tensor:
    """The first floating-point tensor of a model's output."""
    if isinstance(output, Tensor):
        return output
    for value in output.values() if isinstance(output, Mapping) else output:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise TypeError(f"the model should return a floating-point tensor; found {type(output).__name__} without one")


def like(batch: Any, parameter: Tensor) -> Any:
    """The batch on the device of a parameter, its floating-point tensors in the parameter's dtype."""

    def moved(value: Tensor) -> Tensor:
        return value.to(parameter) if value.is_floating_point() else value.to(parameter.device)

    return tree_map_only(Tensor, moved, dict(batch) if isinstance(batch, Mapping) else batch)


def _check_rise(before: dict[str, MeasureResult], dtype: str) -> None:
    for key, result in before.items():
        if not result.mean > 0:
            raise ValueError(
                f"The loss of the model does not rise within radius {result.settings['radius']:g} of the {key} metric "
                f"in {dtype}, so there is no ratio of sharpness to speak of; choose a larger radius."
            )


def _row(dtype: str, key: str, scale: float, before: MeasureResult, after: MeasureResult) -> OrbitRow:
    return OrbitRow(dtype, key, scale, before.mean, after.mean, before.base_losses[0], after.base_losses[0])
