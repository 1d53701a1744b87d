"""Read gains between channels, and constants that a model adds to channels and that biases can absorb.

BatchNorm computes g (t - m) / s + b with statistics m and s that are not parameters. An action that scales or mixes
channels must transform the constant -g m / s as well, and b can absorb that change. With the effective bias
b - g m / s in place of b, the layer is a gain and a bias.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from quotient_manifolds.symmetries.groups.rows import Draft, Params, Record, Rows, integers, numbers


@dataclass(frozen=True, eq=False)
class Gain(Record):
    """Raise one entry of a parameter per row to a power: entries.read(params)[at] ** power. Rows may share entries.

    entries: the distinct entries, (k, 1). at: int64 (rows,), the row of `entries` for each row of the slot; -1 if it
    has none, and the gain is 1.
    """

    entries: Rows
    at: Tensor
    power: float = 1.0

    def __post_init__(self) -> None:
        self._store(at=integers(self.at, "at"))

    @classmethod
    def of(
        cls, name: str, shape: tuple[int, ...], places: Tensor, power: float = 1.0, **affine: float | Tensor
    ) -> Gain:
        """Return the gain (scale * w + offset) ** power at flat indices of w, int64 (rows,). affine: scale, offset."""
        entries, at = integers(places, f"places of {name!r}").unique(return_inverse=True)
        return cls(Rows.at(name, shape, entries[:, None], **affine), at, power)

    def read(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the gains, raised to their power, float64 (rows,)."""
        return self._by_row(self.entries.read(params)[:, 0] ** self.power, 1.0)

    def slopes(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the derivative of each gain by its entry, float64 (rows,); 0 for rows without an entry."""
        scale = torch.as_tensor(self.entries.scale, dtype=torch.float64).expand(len(self.entries), 1)[:, 0]
        w = self.entries.read(params)[:, 0]
        return self._by_row(self.power * w ** (self.power - 1) * scale.to(w.device), 0.0)

    def _by_row(self, values: Tensor, none: float) -> Tensor:
        at = self.at.to(values.device)
        return torch.where(at >= 0, values[at.clamp(min=0)], none)


@dataclass(frozen=True, eq=False)
class Constant(Record):
    """Hold the constant beside a bias b: the effective bias is b + values * product of gains.

    bias: entries (rows, 1), each once. values: (rows,). gains: of entries other than biases.
    """

    bias: Rows
    values: Tensor
    gains: tuple[Gain, ...] = ()

    def __post_init__(self) -> None:
        self._store(values=numbers(self.values), gains=tuple(self.gains))

    def read(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return values * product of gains, float64 (rows,)."""
        made = self.values.to(params[self.bias.name].device)
        for gain in self.gains:
            made = made * gain.read(params)
        return made

    def slopes(self, params: Mapping[str, Tensor]) -> Iterator[tuple[Gain, Tensor]]:
        """Yield each gain with the derivatives (rows,) of `read` by its entries."""
        for gain in self.gains:
            made = self.values.to(params[self.bias.name].device) * gain.slopes(params)
            for other in self.gains:
                made = made if other is gain else made * other.read(params)
            yield gain, made


@dataclass(frozen=True, eq=False)
class Constants(Record):
    """Hold the constants beside biases. Symmetries act on effective biases, which include them."""

    every: tuple[Constant, ...] = ()

    def of(self, names: Collection[str]) -> Constants:
        """Return the constants that an action on these parameters affects."""
        return Constants(
            tuple(c for c in self.every if {c.bias.name, *(gain.entries.name for gain in c.gains)} & {*names})
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that hold the biases, each once."""
        return tuple(dict.fromkeys(each.bias.name for each in self.every))

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the parameters that effective biases depend on, each once."""
        gains = (gain.entries.name for each in self.every for gain in each.gains)
        return tuple(dict.fromkeys((*self.names, *gains)))

    def included(self, params: Mapping[str, Tensor]) -> Draft:
        """Return parameters with effective biases in place of biases, these in float64."""
        draft = Draft(params)
        self.include(draft)
        return draft

    def include(self, draft: Draft, sign: float = 1.0) -> None:
        """Replace biases by effective biases in a draft, or effective biases by biases if `sign` is -1."""
        for each in self.every:
            draft.write(each.bias, each.bias.read(draft) + sign * each.read(draft)[:, None])

    def pulled(self, params: Mapping[str, Tensor], cotangent: Mapping[str, Tensor]) -> Params:
        """Return the cotangent by effective biases b + c(g) and gains: y_g - y_b dc/dg for g. Batches: (k, *shape)."""
        made = dict(cotangent)
        for each in self.every:
            if each.bias.name not in cotangent:
                continue
            b = cotangent[each.bias.name].double()
            b = b.reshape(-1, prod(each.bias.shape))[:, each.bias.places[:, 0].to(b.device)]
            for gain, slopes in each.slopes(params):
                if (name := gain.entries.name) in made:
                    y = made[name].double()
                    at = gain.entries.places[:, 0][gain.at.clamp(min=0)].to(y.device)
                    flat = y.reshape(-1, prod(gain.entries.shape)).index_add(1, at, -b * slopes)
                    made[name] = flat.view(y.shape)
        return made
