"""Add constants that readers take back: fields that are linear in what is moved by weights that are not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from quotient_manifolds.symmetries.groups.gains import Gain
from quotient_manifolds.symmetries.groups.rows import Draft, Params, Record, Rows, integers, numbers
from quotient_manifolds.symmetries.groups.symmetry import Symmetry
from quotient_manifolds.symmetries.groups.wire import Charge

_RANK = 1e-10
"""Below which singular values are 0, relative to the largest."""


@dataclass(frozen=True, eq=False)
class Terms(Record):
    """Add (E z)_t times a product of entries to entry at[t] of a parameter, for each term t.

    entries: (rows, 1), what is moved. at: int64 (terms,), which row each term moves. index, values: E (terms, k),
    sparse, as in `Slices`. factors: entries that are multiplied, one per term each; none of them is moved.
    """

    entries: Rows
    at: Tensor
    index: Tensor
    values: Tensor
    factors: tuple[Gain, ...] = ()

    def __post_init__(self) -> None:
        self._store(at=integers(self.at, "at"), index=integers(self.index, "index"), values=numbers(self.values))
        self._store(factors=tuple(self.factors))

    def rates(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return E's values times the products of their terms (nonzero,)."""
        made = self.values.to(params[self.entries.name].device)
        for factor in self.factors:
            made = made * factor.read(params)[self.index[0].to(made.device)]
        return made


@dataclass(frozen=True, eq=False)
class Shift(Symmetry):
    r"""Add z to biases and tables, and -V z to the biases of the maps V that read them, at all weights.

    What is moved is no factor of what moves it, so that fields are constant along their own flow, all of them commute,
    and act(w, z) = w + sum_j z_j xi_j(w). Elements and generators are coordinates z (k,).

    | shift | moved |
    |---|---|
    | constants z on a wire | b += z, c -= V z, for a bias c beside each reader V |
    | an adapter beside its base | A += Z, W -= B Z; or B += Z, W -= Z A |
    | what is unread, or biased twice | w += z; b += z, c -= z |

    ValueError for terms that move a factor of others.
    """

    terms: tuple[Terms, ...]
    size: int

    def __post_init__(self) -> None:
        self._store(terms=tuple(self.terms))
        for one, other in product(self.terms, self.terms):
            for factor in other.factors:
                if factor.entries.meets(one.entries):
                    name = one.entries.name
                    raise ValueError(f"factors must not be moved. Found entries of {name!r} that are both.")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.entries.name for each in self.terms))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size,)

    def act(self, params: Mapping[str, Tensor], element: Tensor) -> Params:
        """Return the parameters plus the fields of element (k,), cast once to their dtypes.

        ValueError for an element of another shape, a missing parameter, and one of another shape.
        """
        z, draft = self.generator(element), Draft(params)
        for each in self.terms:
            rates = each.rates(params)
            term, generator = each.index.to(rates.device)
            change = rates.new_zeros(len(each.entries)).index_add(
                0, each.at.to(rates.device)[term], rates * z.to(rates.device)[generator]
            )
            draft.add(each.entries, change[:, None])
        return draft.finished()

    def element(self, generator: torch.Generator, scale: float = 1.0) -> Tensor:
        """Draw Gaussian coordinates of standard deviation `scale`."""
        return scale * torch.randn(self.size, generator=generator, dtype=torch.float64)

    def charge(self, params: Mapping[str, Tensor], cotangent: Mapping[str, Tensor]) -> Charge:
        """Compute <y, xi_j>, (k,), and the size of its summands."""
        value = size = torch.zeros(self.size, dtype=torch.float64)
        for each in self.terms:
            y = each.entries.dual(cotangent)[:, 0]
            term, generator = each.index.to(y.device)
            made = each.rates(params) * y[each.at.to(y.device)[term]]
            value = value.to(y.device).index_add(0, generator, made)
            with torch.no_grad():
                size = size.to(y.device).index_add(0, generator, made.abs())
        return Charge(value, size)

    def dimension(self, params: Mapping[str, Tensor]) -> int:
        """Return the rank of the fields at these parameters."""
        made = self.tangent(params, torch.eye(self.size, dtype=torch.float64))
        D = torch.cat([each.reshape(self.size, -1) for each in made.values()], 1)
        norms = D.norm(dim=1, keepdim=True)
        alive = norms[:, 0] > _RANK * norms.max().clamp(1e-300)
        return int(torch.linalg.matrix_rank((D / norms)[alive], rtol=_RANK)) if bool(alive.any()) else 0
