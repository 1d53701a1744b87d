"""Certify how many of a model's continuous symmetries are found, on a small copy of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from quotient_manifolds.load.small_copy import generic_inputs, joined, small_copy
from quotient_manifolds.progress import Progress
from quotient_manifolds.symmetries import (
    Count,
    Evaluate,
    FibreDimension,
    Symmetries,
    count_symmetries,
    fibre_dimension,
    propose_symmetries,
    prove_symmetries,
)
from quotient_manifolds.symmetries.tangents import span, tangents

EXAMPLES = 4  # that symmetries are found and proved on: enough to go through experts and branches
ALONG = 1e-5  # how much of a direction may leave the kernel by rounding
SILENT = "number that no output depends on"


@final
@dataclass(frozen=True)
class Certificate:
    """Compare the dimension of a small model's fibre with the dimensions of the symmetries that are found in it.

    model: the class of the model. blocks: of the copy; None for a model that was given as it is. fibre: P - rank J.
    found: what `find_symmetries` has in the copy, of which only what is proved there is counted, and numbers that no
    output depends on. shared: how many dimensions were counted twice in it, because two families have them in common.
    places: how many of the missing directions lie in which parameters (each direction has length 1, of which a
    parameter holds the square of its part). outside: symmetries that were proved and yet leave the fibre, which are not
    counted: those that only a norm's eps breaks, or that hold on the first inputs alone.
    """

    model: str
    blocks: int | None
    fibre: FibreDimension
    found: Count
    shared: int = 0
    places: Mapping[str, float] = field(default_factory=dict)
    outside: tuple[str, ...] = ()

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
            "places": dict(self.places),
            "outside": list(self.outside),
        }

    def __str__(self) -> str:
        """Write the report, some lines of text."""
        copy = f", a copy of width 8 with {self.blocks} block{'s' * (self.blocks > 1)}" if self.blocks else ""
        families = [f"  {name}: {size}" for name, size in self.found.families.items()]
        twice = [f"  counted twice: {self.shared}"] * bool(self.shared)
        found = f"found: {self.found.dimension - self.shared}"
        places = ", ".join(f"{name} ({size:.1f})" for name, size in self.places.items())
        missing = f"not found: {self.missing}{f', in {places}' if places else ''}"
        outside = [f"does not hold exactly, or not on all inputs: {name}" for name in self.outside]
        return "\n".join([f"{self.model}{copy}", str(self.fibre), found, *families, *twice, missing, *outside])


def certify(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    evaluate: Evaluate | None = None,
    blocks: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
    **settings: Any,
) -> Certificate:
    """Compute the dimension of the fibre of a small model, and how much of it is found.

    Of a Hugging Face model a small copy is made, with inputs to match; blocks, settings: of the copy, as for
    `small_copy`. Where batches are given, as for `fibre_dimension`, it is the model itself: small, and with generic
    parameters, as `make_generic` gives them.

    Where `missing` is 0, every continuous symmetry that the small model has at generic parameters is known; of a model
    it says as much as the copy is like it. What two families share counts once: it is the rank of their tangent vectors
    that is compared.
    progress: called with what is being computed, how much of it is finished, and the total.

    Raises ValueError where no small copy can be made, or where it has no fibre dimension (see `fibre_dimension`).
    """
    if batches is not None and settings:
        raise ValueError(f"settings are those of a small copy, and with batches none is made. Found {list(settings)}.")
    small = small_copy(model, blocks=blocks, seed=seed, **settings) if batches is None else model
    listed = generic_inputs(small, seed=seed) if batches is None else list(batches)
    fibre = fibre_dimension(small, listed, evaluate=evaluate, seed=seed, progress=progress)
    some = joined(listed[:EXAMPLES])
    symmetries = propose_symmetries(small, some, evaluate=evaluate)
    symmetries = prove_symmetries(small, some, symmetries, seed=seed, evaluate=evaluate).proved(symmetries)
    frozen = {name for name, w in small.named_parameters() if not w.requires_grad}
    free = tuple(each for each in symmetries.freedoms if not frozen.issuperset(each.names))
    symmetries = replace(symmetries, freedoms=free)
    inside, outside = _along(fibre.kernel, small, symmetries)
    symmetries = symmetries.without(outside)
    count = count_symmetries(small, symmetries)
    symmetric = span(torch.cat(inside))
    silent = fibre.kernel[:, torch.linalg.vector_norm(fibre.kernel, dim=0) > 1 - ALONG].mT
    spanned = span(torch.cat([symmetric, silent]))
    beside = len(spanned) - len(symmetric)
    return Certificate(
        model=type(model).__name__,
        blocks=blocks if batches is None else None,
        fibre=fibre,
        found=replace(count, families={**count.families, **({SILENT: beside} if beside else {})}),
        shared=count.dimension - len(symmetric),
        places=_places(fibre.kernel, small, spanned),
        outside=outside,
    )


def single_examples(batch: Any) -> list[Any]:
    """Cut a batch into its examples, where all tensors in it have as many; else return it as it is, alone."""
    sizes = {leaf.shape[0] if leaf.ndim else 0 for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}
    if len(sizes) != 1 or not max(sizes):
        return [batch]
    leaves, structure = tree_flatten(batch)
    return [
        tree_unflatten([leaf[i : i + 1] if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)
        for i in range(max(sizes))
    ]


def _along(K: Tensor, model: nn.Module, symmetries: Symmetries) -> tuple[list[Tensor], tuple[str, ...]]:
    """Return the tangents of symmetries by their coordinates in the kernel K, and the names of those that leave it."""
    counted = torch.cat([torch.full((w.numel(),), w.requires_grad) for w in model.parameters()])
    inside, outside = [K.new_zeros(1, len(K))], []
    for name, directions in tangents(symmetries, dict(model.named_parameters())).items():
        T = directions[:, counted].to(K)
        coordinates = T @ K.mT
        if torch.linalg.matrix_norm(T - coordinates @ K) <= ALONG * torch.linalg.matrix_norm(T):
            inside.append(coordinates)
        else:
            outside.append(name)
    return inside, tuple(outside)


def _places(K: Tensor, model: nn.Module, spanned: Tensor) -> dict[str, float]:
    """Return how much of the kernel K beside what is spanned, by coordinates in it, lies in which parameters."""
    own = {name: w.numel() for name, w in model.named_parameters() if w.requires_grad}
    missing = torch.linalg.svd(spanned).Vh[len(spanned) :] @ K if len(spanned) else K
    parts = missing.square().sum(dim=0).split(list(own.values()))
    sizes = {name: round(float(part.sum()), 3) for name, part in zip(own, parts, strict=True)}
    return {name: size for name, size in sizes.items() if size > 0}
