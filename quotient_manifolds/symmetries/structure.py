"""Store the symmetries of an architecture, which all models with the same operations share, whatever their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from quotient_manifolds.symmetries.charges.finder import unable
from quotient_manifolds.symmetries.checks import ModelError
from quotient_manifolds.symmetries.discovery import propose_symmetries
from quotient_manifolds.symmetries.outputs import Evaluate
from quotient_manifolds.symmetries.symmetries import Symmetries
from quotient_manifolds.symmetries.trace.record import digest, recorded


@final
@dataclass(frozen=True, eq=False)
class Structure:
    """Store the symmetries found in one model, for all models with the same operations.

    digest: a hash of the operations in a run of that model. trained: whether each parameter requires a gradient, by
    name.
    """

    symmetries: Symmetries
    digest: str
    trained: Mapping[str, bool]

    @classmethod
    def of(cls, model: nn.Module, batch: Any, evaluate: Evaluate) -> Structure:
        """Find the symmetries of a model, as `propose_symmetries` does."""
        symmetries = propose_symmetries(model, batch, evaluate=evaluate)
        return cls(symmetries, digest(recorded(model, batch, evaluate)[0]), _trained(model))

    def serves(self, model: nn.Module, batch: Any, evaluate: Evaluate) -> bool:
        """Return whether another model has the same operations, and weights on which all symmetries can act.

        They cannot act at a gain of 0, which the following weights cannot compensate.
        """
        if self.trained != _trained(model):
            return False
        try:
            if digest(recorded(model, batch, evaluate)[0]) != self.digest:
                return False
        except ModelError:
            return False
        params = {name: w.detach() for name, w in model.named_parameters()}
        return not any(unable(each.symmetry, params) for each in self.symmetries.every)


def _trained(model: nn.Module) -> dict[str, bool]:
    return {name: w.requires_grad for name, w in model.named_parameters()}
