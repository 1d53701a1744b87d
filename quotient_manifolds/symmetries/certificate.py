"""Certify on a small copy of a model how many of its continuous symmetries are found."""

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

ALONG = 1e-5  # the part of a unit direction that may be outside of the kernel due to rounding
OUTPUTS = (1.5, 3, 6, 12, 24, 48)  # outputs per parameter: inputs are doubled until the rank stops growing


@final
@dataclass(frozen=True)
class Certificate:
    """Compare the dimension of a small model's fibre with the dimension of the symmetries found in it.

    model: the class of the model. blocks: the number of blocks of the copy; None for a model that is used as given.
    fibre: its dimension, P - rank J. found: the symmetries whose directions all lie in the kernel of J. shared: the
    dimension that found families have in common. unreached: the dimension of further directions on which no output
    depends for any input, counted neither as found nor as missing. places: the number of missing directions by
    parameter (a direction has length 1 and counts with the square of its part in the parameter). outside: proposed
    symmetries that leave the kernel, because only eps of a norm breaks them, or because they hold on some inputs only.
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
        """Return the number of directions of the fibre that are not found, without unreached ones; None if in doubt."""
        if self.fibre.doubts:
            return None
        return self.fibre.dimension - (self.found.dimension - self.shared) - self.unreached

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        made = {"fibre": self.fibre.to_dict(), "found": self.found.to_dict(), "missing": self.missing}
        return {**plain, **made, "places": dict(self.places), "outside": list(self.outside)}

    def __str__(self) -> str:
        """Return the report as text, which starts with the result, or with the reasons if it is inconclusive."""
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
    """Compute the dimension of the fibre of a small model, and how much of it the found symmetries explain.

    A Hugging Face model is copied with a small configuration. blocks, settings: as for `small_copy`. The number of
    inputs is doubled until the rank of the Jacobian stops growing, up to 48 outputs per parameter. If batches, a list
    of inputs as for `fibre_dimension`, are given, the model itself is used: make it small (hundreds of parameters, but
    two blocks), with generic parameters (`make_generic`).

    If `missing` is 0, every continuous symmetry of the small model at generic parameters is known, apart from
    parameters that no input reaches. `missing` is None if the certificate is inconclusive.
    progress: called with a description of the current step, the amount finished, and the total.

    Raises ValueError if no small copy can be made, or if it has no fibre dimension (see `fibre_dimension`).
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
    still = {name for name, each in T.items() if not bool(each.any())}  # these change frozen parameters only
    leaving = [name for name, each in T.items() if name not in still and _leaves(each, K)]
    outside = tuple(name for name in leaving if not bool(directions[name][:, frozen].any()))
    found = proposed.without({*still, *leaving})
    count = count_symmetries(small, found)
    symmetric = span(torch.cat([K.new_zeros(1, len(K)), *(T[each.name] @ K.mT for each in found.every)]))
    silent = K[:, torch.linalg.vector_norm(K, dim=0) > 1 - ALONG].mT
    spanned = span(torch.cat([symmetric, silent]))
    if len(spanned) < fibre.dimension:  # refused candidates that need other inputs may be the missing ones
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
    """Return whether any of the directions is outside of the kernel K."""
    lost = torch.linalg.vector_norm(directions - directions @ K.mT @ K, dim=1)
    return bool((lost > ALONG * torch.linalg.vector_norm(directions, dim=1)).any())


def _places(K: Tensor, model: nn.Module, spanned: Tensor) -> dict[str, float]:
    """Return the dimension of the kernel K outside of `spanned`, by parameter. spanned: a basis in coordinates of K."""
    missing = K - spanned.mT @ spanned @ K  # the rows of `spanned` and of K are orthonormal
    own = {name: w.numel() for name, w in model.named_parameters() if w.requires_grad}
    parts = missing.square().sum(dim=0).split(list(own.values()))
    sizes = {name: round(float(part.sum()), 3) for name, part in zip(own, parts, strict=True)}
    return {name: size for name, size in sizes.items() if size > 0}
