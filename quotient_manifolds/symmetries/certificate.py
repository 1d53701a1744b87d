"""Certify how many of a model's continuous symmetries are found, on a small copy of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from quotient_manifolds.messages import Progress, text_table
from quotient_manifolds.symmetries.counting import Count, count_symmetries
from quotient_manifolds.symmetries.discovery import propose_symmetries
from quotient_manifolds.symmetries.fibre import FibreDimension, Jacobian, distinct, fibre_dimension, where_it_stands
from quotient_manifolds.symmetries.names import meaning
from quotient_manifolds.symmetries.outputs import Evaluate
from quotient_manifolds.symmetries.small_copy import generic_inputs, joined, small_copy
from quotient_manifolds.symmetries.tangents import span, tangents

ALONG = 1e-5  # how much of a direction may leave the kernel by rounding
OUTPUTS = (1.5, 3, 6, 12, 24, 48)  # a parameter: inputs are doubled until the rank stands still


@final
@dataclass(frozen=True)
class Certificate:
    """Compare the dimension of a small model's fibre with the dimensions of the symmetries that are found in it.

    model: the class of the model. blocks: of the copy; None for a model that was given as it is. fibre: P - rank J.
    found: the symmetries whose directions all lie in the kernel of J. shared: how many dimensions two families of it
    have in common. unreached: how many dimensions beside those no output depends on, on any input: neither found nor
    missing. places: how many of the missing directions lie in which parameters (each has length 1, of which a parameter
    holds the square of its part). outside: symmetries that were proposed and leave the kernel: those that only a norm's
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
        """Write the report, some lines of text: first what is found, or, where it is inconclusive, the reasons."""
        copy = f", a copy of width 8 with {self.blocks} block{'s' * (self.blocks > 1)}" if self.blocks else ""
        places = ", ".join(f"{name} ({size:.1f})" for name, size in self.places.items())
        families = [(name, str(size), meaning(name)) for name, size in self.found.families.items()]
        unreached = f", {self.unreached} more are reached by no input," * bool(self.unreached)
        found = f"{self.found.dimension - self.shared} of {self.fibre.dimension} dimensions found"
        lines = [
            f"{found}{unreached} in {self.model}{copy}",
            text_table(("family", "dimensions", "what may change"), families) * bool(families),
            f"counted twice: {self.shared}" * bool(self.shared),
            f"not found: {'inconclusive' if self.missing is None else self.missing}" + f", in {places}" * bool(places),
            *(f"does not hold exactly, or not on all inputs: {name}" for name in self.outside),
        ]
        lines.insert(0 if self.fibre.doubts else len(lines), str(self.fibre))
        return "\n".join(filter(None, lines))


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

    A Hugging Face model is copied with a small configuration; blocks, settings: as for `small_copy`. The number of
    inputs is doubled until the rank of the Jacobian stops growing, up to 48 outputs for each parameter. With batches, a
    list of inputs as for `fibre_dimension`, the model itself is taken: make it small (hundreds of parameters, but two
    blocks), with generic parameters (`make_generic`).

    If `missing` is 0, every continuous symmetry of the small model at generic parameters is known, apart from
    parameters that no input reaches. It is None where the certificate is inconclusive.
    progress: called with what is being computed, how much of it is finished, and the total.

    Raises ValueError where no small copy can be made, or where it has no fibre dimension (see `fibre_dimension`).
    """
    if batches is None:
        small = small_copy(model, blocks=blocks, seed=seed, **settings)
        rounds = (generic_inputs(small, seed=seed, enough=enough) for enough in OUTPUTS)
        fibre, listed = where_it_stands(Jacobian(small, evaluate, seed, progress), rounds)
    elif settings:
        raise ValueError(f"settings are those of a small copy, and with batches none is made. Found {list(settings)}.")
    else:
        small, listed = model, distinct(batches)
        fibre = fibre_dimension(small, listed, evaluate=evaluate, seed=seed, progress=progress)
    proposed = propose_symmetries(small, joined(listed), evaluate=evaluate)
    K, own = fibre.kernel, dict(small.named_parameters())
    frozen = torch.cat([torch.full((w.numel(),), not w.requires_grad) for w in own.values()])
    directions = tangents(proposed, own)
    T = {name: each[:, ~frozen].to(K) for name, each in directions.items()}
    still = {name for name, each in T.items() if not bool(each.any())}  # all that they move is frozen
    leaving = [name for name, each in T.items() if name not in still and _leaves(each, K)]
    outside = tuple(name for name in leaving if not bool(directions[name][:, frozen].any()))
    found = proposed.without({*still, *leaving})
    count = count_symmetries(small, found)
    symmetric = span(torch.cat([K.new_zeros(1, len(K)), *(T[each.name] @ K.mT for each in found.every)]))
    silent = K[:, torch.linalg.vector_norm(K, dim=0) > 1 - ALONG].mT
    spanned = span(torch.cat([symmetric, silent]))
    if len(spanned) < fibre.dimension:  # what other inputs are asked for may be what is not spanned
        asked = [str(each) for each in proposed.refused if ": give " in each.reason]
        fibre = replace(fibre, doubts=(*fibre.doubts, *asked))
    return Certificate(
        model=type(model).__name__,
        blocks=blocks if batches is None else None,
        fibre=fibre,
        found=count,
        shared=count.dimension - len(symmetric),
        unreached=len(spanned) - len(symmetric),
        places={} if fibre.doubts else _places(K, small, spanned),
        outside=outside,
    )


def _leaves(directions: Tensor, K: Tensor) -> bool:
    """Return whether any of the directions is none of the kernel K."""
    lost = torch.linalg.vector_norm(directions - directions @ K.mT @ K, dim=1)
    return bool((lost > ALONG * torch.linalg.vector_norm(directions, dim=1)).any())


def _places(K: Tensor, model: nn.Module, spanned: Tensor) -> dict[str, float]:
    """Return how much of the kernel K beside what is spanned, by coordinates in it, lies in which parameters."""
    missing = K - spanned.mT @ spanned @ K  # the rows of `spanned` are orthonormal, and so are those of K
    own = {name: w.numel() for name, w in model.named_parameters() if w.requires_grad}
    parts = missing.square().sum(dim=0).split(list(own.values()))
    sizes = {name: round(float(part.sum()), 3) for name, part in zip(own, parts, strict=True)}
    return {name: size for name, size in sizes.items() if size > 0}
