"""Hold a merged adapter: its tensors and settings as peft stores them, and what the truncation of each module lost."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quotient_manifolds.files import expanded
from quotient_manifolds.load.lora import write_adapter


@dataclass(frozen=True)
class MergedModule:
    """Hold what became of the updates of one module.

    name: its path in the base model. size: (n, m) of its update. ranks: those of the adapters' updates, 0 where an
    adapter has none. rank: that of the merged update. norm: that of the mean (Frobenius). lost: that of what truncation
    cut off.
    """

    name: str
    size: tuple[int, int]
    ranks: tuple[int, ...]
    rank: int
    norm: float
    lost: float

    @property
    def relative_error(self) -> float:
        """Return which part of the mean is lost by truncation to the rank, |mean - merged| / |mean| (Frobenius)."""
        return self.lost / self.norm if self.norm else 0.0


@dataclass(frozen=True)
class MergedAdapter:
    """Hold an adapter that was merged of others, in memory.

    settings: the content of adapter_config.json. tensors: that of adapter_model.safetensors, by name. modules: what
    became of each module's updates. weights: those of the adapters.
    """

    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    modules: tuple[MergedModule, ...]
    weights: tuple[float, ...]

    @property
    def relative_error(self) -> float:
        """Return which part of the mean of all updates together is lost by truncation (Frobenius)."""
        norm = math.hypot(*(module.norm for module in self.modules))
        return math.hypot(*(module.lost for module in self.modules)) / norm if norm else 0.0

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the adapter to a new directory, as peft does: `PeftModel.from_pretrained` and `load_model` read it.

        The directory is complete or not there at all. Raises ValueError if it is there already.
        """
        write_adapter(expanded(os.fspath(directory)), self.settings, self.tensors)
