"""Keep the symmetries of an architecture: they hold for all models that compute alike, whatever their weights."""

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
    """Hold the symmetries of an architecture, found in one model for all models that compute alike.

    digest: of the operations of a run of that model. trained: by the name of each parameter whether it requires a
    gradient.
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
        """Return whether another model does the same operations, with weights at which all symmetries act.

        They do not at a gain of 0, which weights that follow cannot undo.
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
