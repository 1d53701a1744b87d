"""Certify how many of a model's continuous symmetries are found, on a small copy of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from quotient_manifolds.messages import Progress
from quotient_manifolds.symmetries.counting import Count, count_symmetries
from quotient_manifolds.symmetries.fibre import FibreDimension, fibre_dimension, grown_fibre
from quotient_manifolds.symmetries.outputs import Evaluate
from quotient_manifolds.symmetries.propose import propose_symmetries
from quotient_manifolds.symmetries.prove import prove_symmetries
from quotient_manifolds.symmetries.small_copy import generic_inputs, joined, small_copy
from quotient_manifolds.symmetries.symmetries import Symmetries
from quotient_manifolds.symmetries.tangents import span, tangents

ALONG = 1e-5  # how much of a direction may leave the kernel by rounding
OUTPUTS = (1.5, 3, 6, 12, 24, 48)  # a parameter: inputs are doubled until the rank stands still


@final
@dataclass(frozen=True)
class Certificate:
    """Compare the dimension of a small model's fibre with the dimensions of the symmetries that are found in it.

    model: the class of the model. blocks: of the copy; None for a model that was given as it is. fibre: P - rank J.
    found: the symmetries that are proved in the copy. shared: how many dimensions two families of it have in common.
    unreached: how many dimensions beside those no output depends on, on any input: neither found nor missing. places:
    how many of the missing directions lie in which parameters (each has length 1, of which a parameter holds the square
    of its part). outside: symmetries that were proposed and are refuted, or leave the fibre: those that only a norm's
    eps breaks, or that hold on some inputs alone.
    """

    model: str
    blocks: int | None
    fibre: FibreDimension
    found: Count
    shared: int = 0
    unreached: int = 0
    places: Mapping[str, float] = field(default_factory=dict)
    outside: tuple[str, ...] = ()

    @property
    def missing(self) -> int | None:
        """Return how many directions of the fibre no family names and some input reaches; None under a doubt."""
        if self.fibre.doubts:
            return None
        return self.fibre.dimension - (self.found.dimension - self.shared) - self.unreached

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        made = {"fibre": self.fibre.to_dict(), "found": self.found.to_dict(), "missing": self.missing}
        return {**plain, **made, "places": dict(self.places), "outside": list(self.outside)}

    def __str__(self) -> str:
        """Write the report, some lines of text; where it is inconclusive, the reasons come first."""
        copy = f", a copy of width 8 with {self.blocks} block{'s' * (self.blocks > 1)}" if self.blocks else ""
        lines = [str(self.fibre), f"found in {self.model}{copy}: {self.found.dimension - self.shared}"]
        lines += [f"  {name}: {size}" for name, size in self.found.families.items()]
        lines += [f"  counted twice: {self.shared}"] * bool(self.shared)
        lines += [f"reached by no input: {self.unreached}"] * bool(self.unreached)
        places = ", ".join(f"{name} ({size:.1f})" for name, size in self.places.items())
        missing = "inconclusive" if self.missing is None else self.missing
        lines.append(f"not found: {missing}{f', in {places}' if places else ''}")
        lines += [f"does not hold exactly, or not on all inputs: {name}" for name in self.outside]
        return "\n".join(lines)


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

    Of a Hugging Face model a small copy is made; blocks, settings: of the copy, as for `small_copy`. Its inputs are
    doubled, from 3 outputs a parameter to 48, until a random half of them gives the Jacobian the same rank; a rank that
    still grows then is a doubt. Where batches are given, as for `fibre_dimension`, it is the model itself, on these
    inputs alone: small, and with generic parameters, as `make_generic` gives them.

    Where `missing` is 0, every continuous symmetry that the small model has at generic parameters is known, apart from
    parameters that no input reaches; of a model it says as much as the copy is like it. Under a doubt it is None.
    progress: called with what is being computed, how much of it is finished, and the total.

    Raises ValueError where no small copy can be made, or where it has no fibre dimension (see `fibre_dimension`).
    """
    if batches is not None and settings:
        raise ValueError(f"settings are those of a small copy, and with batches none is made. Found {list(settings)}.")
    if batches is None:
        small = small_copy(model, blocks=blocks, seed=seed, **settings)
        rounds = (generic_inputs(small, seed=seed, enough=enough) for enough in OUTPUTS)
        fibre, listed = grown_fibre(small, rounds, evaluate=evaluate, seed=seed, progress=progress)
    else:
        small, listed = model, list(batches)
        fibre = fibre_dimension(small, listed, evaluate=evaluate, seed=seed, progress=progress)
    some = joined(listed)
    symmetries = propose_symmetries(small, some, evaluate=evaluate)
    proof = prove_symmetries(small, some, symmetries, seed=seed, evaluate=evaluate)
    refuted = tuple(each.pair for each in proof.claims if each.verdict == "refuted")
    unsure = [f"{each.pair} is inconclusive: {each.reason}" for each in proof.claims if each.verdict == "inconclusive"]
    unsure += [str(each) for each in symmetries.refused if ": give " in each.reason]  # other inputs, as it asks for
    symmetries = proof.proved(symmetries)
    frozen = {name for name, w in small.named_parameters() if not w.requires_grad}
    free = tuple(each for each in symmetries.freedoms if not frozen.issuperset(each.names))
    symmetries = replace(symmetries, freedoms=free)
    inside, outside = _along(fibre.kernel, small, symmetries)
    symmetries = symmetries.without(outside)
    count = count_symmetries(small, symmetries)
    symmetric = span(torch.cat(inside))
    silent = fibre.kernel[:, torch.linalg.vector_norm(fibre.kernel, dim=0) > 1 - ALONG].mT
    spanned = span(torch.cat([symmetric, silent]))
    if len(spanned) < fibre.dimension:  # what these are about may be what is not spanned
        fibre = replace(fibre, doubts=(*fibre.doubts, *unsure))
    return Certificate(
        model=type(model).__name__,
        blocks=blocks if batches is None else None,
        fibre=fibre,
        found=count,
        shared=count.dimension - len(symmetric),
        unreached=len(spanned) - len(symmetric),
        places={} if fibre.doubts else _places(fibre.kernel, small, spanned),
        outside=(*refuted, *outside),
    )


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
