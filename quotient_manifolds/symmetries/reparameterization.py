"""Represent reparameterizations: groups besides symmetric pairs that leave the function of a model unchanged."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quotient_manifolds.symmetries import groups
from quotient_manifolds.symmetries.groups import CenteredSO, Gauge, IntoMean, Torus
from quotient_manifolds.symmetries.groups.rows import typical as typical

REDUNDANT = "redundant bias"


@dataclass(frozen=True, eq=False)
class Reparameterization:
    """Name a group that acts on parameters without changing the function.

    symmetry: the group, with its action and charges. kind: such as "norm gain". dimension: of the group, without
    directions that earlier symmetries share. number: distinguishes reparameterizations with the same label. lead: the
    parameter in the name; if empty, the first one that the group changes.
    """

    symmetry: groups.Symmetry
    kind: str
    dimension: int
    number: int = 1
    lead: str = ""

    @property
    def name(self) -> str:
        """Return a name that is unique in a model, such as "h.0.ln_1.weight norm gain"."""
        return self.label if self.number == 1 else f"{self.label} {self.number}"

    @property
    def label(self) -> str:
        """Return the first parameter and the kind, without a number."""
        return f"{self.names[0]} {self.kind}"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that the group changes, each once, starting with the one in its name."""
        names = self.symmetry.names
        return (self.lead, *(name for name in names if name != self.lead)) if self.lead else names

    @property
    def families(self) -> dict[str, int]:
        """Return the dimension of the group, by its kind."""
        return {self.kind: self.dimension}

    @property
    def group(self) -> str:
        """Return the name of the group, such as R^32 or SO(64)."""
        symmetry = self.symmetry
        if isinstance(symmetry, Torus):
            return f"GL+(1)^{self.dimension}"
        if not isinstance(symmetry, Gauge):
            return f"R^{self.group_dimension}"
        algebra = symmetry.algebra
        if isinstance(algebra, IntoMean):
            return "I + 1 w^T" if type(algebra) is IntoMean else "I + t 1^T"
        if isinstance(algebra, CenteredSO):
            return f"SO({algebra.n - 1})"
        name = type(algebra).__name__
        return f"{name}({algebra.n})" if name in ("GL", "SO") else f"a group of {algebra.dimension} dimensions"

    @property
    def group_dimension(self) -> int:
        """Return the dimension of the group."""
        return self.dimension


def gaussian(like: Tensor, generator: torch.Generator, *shape: int) -> Tensor:
    """Draw Gaussian numbers in float64 on the device of a tensor, with its shape or the given one."""
    return torch.randn(shape or like.shape, generator=generator, dtype=torch.float64).to(like.device)
