"""Certify how many of a model's continuous symmetries are found, on a small copy of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

from torch import nn

from quotient_manifolds.load.small_copy import generic_inputs, small_copy
from quotient_manifolds.progress import Progress
from quotient_manifolds.symmetries import (
    MATCHERS,
    Count,
    FibreDimension,
    bottleneck,
    count_symmetries,
    fibre_dimension,
    find_symmetries,
    neurons,
    prove_symmetries,
    spanned_dimension,
)


@final
@dataclass(frozen=True)
class Certificate:
    """Compare the dimension of a small copy's fibre with the dimensions of the symmetries that are found in it.

    model: the class of the model. blocks: of the copy. fibre: P - rank J of the copy. found: what `find_symmetries`
    has in the copy, of which only what is proved there is counted, and numbers that no output depends on. shared: how
    many dimensions were counted twice in it, because two families have them in common.
    """

    model: str
    blocks: int
    fibre: FibreDimension
    found: Count
    shared: int = 0

    @property
    def missing(self) -> int:
        """Return the dimension of the fibre less that of the symmetries found: how many directions no family names."""
        return self.fibre.dimension - (self.found.dimension - self.shared)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {
            "model": self.model,
            "blocks": self.blocks,
            "fibre": self.fibre.to_dict(),
            "found": self.found.to_dict(),
            "shared": self.shared,
            "missing": self.missing,
        }

    def __str__(self) -> str:
        """Write the report, some lines of text."""
        families = [f"  {name}: {size}" for name, size in self.found.families.items()]
        head = f"{self.model}, a copy of width 8 with {self.blocks} block{'s' * (self.blocks > 1)}"
        twice = [f"  counted twice: {self.shared}"] * bool(self.shared)
        found = f"found: {self.found.dimension - self.shared}"
        return "\n".join([head, str(self.fibre), found, *families, *twice, f"not found: {self.missing}"])


def certify(
    model: nn.Module, *, blocks: int = 1, seed: int = 0, progress: Progress | None = None, **settings: Any
) -> Certificate:
    """Compute the dimension of the fibre of a small copy of a Hugging Face model, and how much of it is found.

    Where `missing` is 0, every continuous symmetry that the copy has at generic parameters is known; of the model it
    says as much as the copy is like it. What two families share counts once: it is the rank of their tangent vectors
    that is compared. blocks, settings: of the copy, as for `small_copy`.
    progress: called with what is being computed, how much of it is finished, and the total.

    Raises ValueError where no small copy can be made, or where it has no fibre dimension (see `fibre_dimension`).
    """
    small = small_copy(model, blocks=blocks, seed=seed, **settings)
    batches = generic_inputs(small, seed=seed)
    fibre = fibre_dimension(small, batches, seed=seed, progress=progress)
    symmetries = find_symmetries(small, batches[0], matchers=(*MATCHERS, neurons, bottleneck))
    symmetries = prove_symmetries(small, batches[0], symmetries, seed=seed).proved(symmetries)
    count = count_symmetries(small, symmetries)
    params = dict(small.named_parameters())
    spanned = spanned_dimension(symmetries, params)
    beside = spanned_dimension(symmetries, params, fixed=fibre.silent) + sum(fibre.unreached.values()) - spanned
    families = {**count.families, **({"number that no output depends on": beside} if beside else {})}
    shared = count.dimension - spanned
    return Certificate(type(model).__name__, blocks, fibre, replace(count, families=families), shared)
