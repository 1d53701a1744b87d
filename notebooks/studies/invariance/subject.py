"""A small model of the table of fibres, the loss that it is measured by, and what that loss does not see."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from quotient_manifolds.symmetries import Symmetries, propose_symmetries
from quotient_manifolds.symmetries.double_precision import DoublePrecision
from studies.fibres.cases import small_model

OFF = 1e-3  # relative, of parameters drawn in float32: sums of those lie where float32 rounds either way


@dataclass(frozen=True)
class Subject:
    """Hold a model at one place of its orbit, in one precision, with a batch that fits."""

    model: nn.Module
    batch: Any

    @classmethod
    def of(cls, name: str) -> Subject:
        """Return the model of this name in float64, at a generic point."""
        model, batch = small_model(name)
        model = model.double()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for w in model.parameters():
                w.mul_(1 + OFF * torch.randn(w.shape, generator=generator, dtype=w.dtype))
        return cls(model, _cast(batch, torch.float64))

    def to(self, dtype: torch.dtype) -> Subject:
        """Return a copy in another precision."""
        return Subject(copy.deepcopy(self.model).to(dtype), _cast(self.batch, dtype))

    @property
    def single(self) -> bool:
        """Return whether the model is in float32."""
        return next(self.model.parameters()).dtype == torch.float32

    def at(self, params: Mapping[str, Tensor]) -> Subject:
        """Return a copy with these parameters."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(params, strict=False)
        return Subject(model, self.batch)

    def loss(self) -> float:
        """Compute the loss."""
        with torch.no_grad():
            return float(loss(self.model, self.batch))

    def symmetries(self) -> Symmetries:
        """Find all that leaves the loss alone."""
        return propose_symmetries(self.model, self.batch, evaluate=loss)


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the cross-entropy of logits with fixed words, or the mean squares of what else is put out to targets."""
    out = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    logits = out.get("logits") if isinstance(out, Mapping) else None
    if isinstance(logits, Tensor):
        words = torch.randint(logits.shape[-1], logits.shape[:-1], generator=torch.Generator().manual_seed(0))
        return nn.functional.cross_entropy(logits.flatten(0, -2), words.flatten())
    outputs = [out] if isinstance(out, Tensor) else [each for each in out.values() if isinstance(each, Tensor)]
    return torch.stack([_distance(each, seed) for seed, each in enumerate(outputs)]).sum()


def uncast_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the same in float64 throughout, where the model casts to float32 inside."""
    with DoublePrecision():
        return loss(model, batch)


def _distance(output: Tensor, seed: int) -> Tensor:
    target = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed))
    return (output - target.to(output)).square().mean()


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, batch)
