"""Define reparameterizations: groups that leave the function alone, and a canonical representative of each orbit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from quotient_manifolds.symmetries.pair import Params

STEP = 1e-5  # of central differences: their error is its square, and rounding divided by it


class Reparameterization(ABC):
    """Describe a group that acts on parameters without changing the function, with a canonical point in every orbit.

    Those of one model are canonicalized one after the other, in the order in which they are found: together they then
    give the same numbers from every point of the orbit, up to what symmetric pairs do.
    """

    kind: str
    """What it is about, such as "norm gain"."""

    number = 1  # of those of a model that would have one name

    @property
    def multiplies(self) -> bool:
        """Return whether the group multiplies, so that far along an orbit parameters are ill-conditioned."""
        return False

    @property
    def by_lengths(self) -> bool:
        """Return whether lengths tell the canonical point, which other reparameterizations may change."""
        return False

    def determined(self, params: Mapping[str, Tensor]) -> bool:
        """Return False where the canonical point may depend on the point of the orbit it is computed from."""
        return True

    @property
    def name(self) -> str:
        """Return a name that no other reparameterization of a model has, such as "h.0.ln_1.weight norm gain"."""
        return self.label if self.number == 1 else f"{self.label} {self.number}"

    @property
    def label(self) -> str:
        """Return the parameter that comes first, and the kind."""
        return f"{self.names[0]} {self.kind}"

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Return the parameters that the group depends on or changes, each once."""

    @property
    @abstractmethod
    def families(self) -> dict[str, int]:
        """Return the dimensions of the group, by kind."""

    @property
    def group(self) -> str:
        """Return the name of the group, such as R^32."""
        return f"R^{self.group_dimension}"

    @property
    def group_dimension(self) -> int:
        """Return the dimension of the group, of which other reparameterizations may have a part."""
        return sum(self.families.values())

    @property
    def constant(self) -> tuple[str, ...]:
        """Return the parameters that are the same numbers at every canonical point, such as gains of 1."""
        return ()

    @property
    def zeros(self) -> Mapping[str, Collection[int]]:
        """Return by parameter the places of numbers that are brought as near to 0 as they can, counted row by row."""
        return {}

    @abstractmethod
    def canonicalize(self, params: Params) -> None:
        """Go to the canonical point of the orbit, in place (clone the tensors first)."""

    @abstractmethod
    def transform(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Act with a random element of the group, of log-scale `size`, in place; sums in float64.

        Gains are multiplied by exp(size z), z Gaussian, and numbers are shifted by size z times their typical size.
        With `control` what makes up for it is left out, so that the function does change.
        """

    def tangent(self, params: Mapping[str, Tensor], generator: torch.Generator, control: bool = False) -> Params:
        """Return d/dt at t = 0 of a move of log-scale t, of the parameters that it changes, for float64 parameters."""
        return central_difference(self.transform, params, self.names, generator, control)

    def beside(self, other: Reparameterization) -> Reparameterization | None:
        """Return this and the one that follows it as one, where both are evaluated at once; else None."""
        return None


def together(reparameterizations: Iterable[Reparameterization]) -> Iterator[Reparameterization]:
    """Yield reparameterizations in their order, as one those that follow each other and are evaluated at once."""
    last: Reparameterization | None = None
    for each in reparameterizations:
        both = None if last is None else last.beside(each)
        if last is not None and both is None:
            yield last
        last = both or each
    if last is not None:
        yield last


def zeros_of(reparameterizations: Iterable[Reparameterization], canonical: Mapping[str, Tensor]) -> dict[str, set[int]]:
    """Return by parameter the places of numbers that these bring to 0 at their canonical points."""
    found = defaultdict[str, set[int]](set)
    for each in reparameterizations:
        for name, places in each.zeros.items():
            zero = (canonical[name] == 0).flatten().tolist()
            found[name].update(place for place in places if zero[place])
    return found


Act = Callable[[Params, torch.Generator, float, bool], None]
"""Acts on parameters in place, by a random element of a log-scale, on one side only as a control."""


def central_difference(
    act: Act, params: Mapping[str, Tensor], names: Iterable[str], generator: torch.Generator, control: bool
) -> Params:
    """Return d/dt of an action by exp(t xi) at t = 0, on the parameters of these names, in float64.

    The error is of order 1e-10 relative to xi, and 1e-11 relative to the parameters.
    """
    state, ends = generator.get_state(), []
    for size in (STEP, -STEP):
        moved = {**params, **{name: params[name].clone() for name in names}}
        act(moved, generator.set_state(state), size, control)
        ends.append(moved)
    return {name: (ends[0][name] - ends[1][name]) / (2 * STEP) for name in names}


def gaussian(like: Tensor, generator: torch.Generator, *shape: int) -> Tensor:
    """Draw Gaussian numbers in float64 where a tensor is, of its shape or another."""
    return torch.randn(shape or like.shape, generator=generator, dtype=torch.float64).to(like.device)


def typical(numbers: Tensor) -> float:
    """Return the root mean square of numbers, and 1 if all of them are 0."""
    parts = (part.double() for part in numbers.detach().reshape(-1).split(1 << 16))
    return (sum(float(part @ part) for part in parts) / max(1, numbers.numel())) ** 0.5 or 1.0
