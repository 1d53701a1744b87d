"""What one module of a model was found to have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from quotient_manifolds.symmetries.biases import Translation
from quotient_manifolds.symmetries.pair import Refused, SymmetricPair


@dataclass(frozen=True)
class Found:
    """The pairs of one module, the translations of its biases, and what only looks like a pair."""

    pairs: tuple[SymmetricPair, ...] = ()
    translations: tuple[Translation, ...] = ()
    refused: tuple[Refused, ...] = ()


Matcher = Callable[[nn.Module, str, Mapping[int, str]], Found | None]
"""(module, its name in the model, parameter id -> first name in the model) -> what it has; None: not its business."""
