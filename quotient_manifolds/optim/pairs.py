"""Choose the pairs that an optimizer steps along, and read those of one shape as one batch, with what it remembers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds.optim.frame import Both
from quotient_manifolds.symmetries import BESIDE_ATTENTION, Params, SymmetricPair

Parameters = Iterable[tuple[str, Tensor]] | Iterable[Mapping[str, Any]]
"""Named parameters, as `model.named_parameters()` gives them, or groups of them with their own settings."""

State = MutableMapping[Any, Any]
"""What a torch optimizer keeps: of a pair under its name, of a parameter under the parameter."""


def listed(params: Parameters) -> list[Any]:
    """Return named parameters, or groups of them, as a list; TypeError for a module or a tensor."""
    if isinstance(params, (torch.nn.Module, Tensor)) or not isinstance(params, Iterable):
        raise TypeError(
            "params must be named parameters, model.named_parameters(), or groups of such. Found "
            f"{type(params).__name__}"
        )
    return list(params)


def is_optimized(pair: SymmetricPair, params: Mapping[str, Tensor], place: Mapping[str, int]) -> bool:
    """Tell whether all of a pair is trained here; ValueError for attention and adapters of which a part is."""
    own = [name for name in pair.names if name in params and params[name].requires_grad]
    if not own:
        return False
    absent = [name for name in pair.names if name not in own]
    if absent and pair.kind in BESIDE_ATTENTION:  # neurons and bottlenecks: their parameters are moved as all others
        return False
    cure = "or pass symmetries without it (Symmetries.without)"
    if absent:
        raise ValueError(
            f"the pair {pair.name!r} must be trained as a whole or not at all. Found that {absent[0]} is frozen or not "
            f"among params: train or freeze all of it, {cure}"
        )
    if len({place[name] for name in own}) > 1:
        raise ValueError(
            f"the pair {pair.name!r} must be in one group of parameters. Found {', '.join(own)} in several: put them "
            f"together, {cure}"
        )
    kinds = {(params[name].dtype, params[name].device) for name in own}
    if len(kinds) > 1:
        found = " and ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(f"the pair {pair.name!r} must be on one device in one dtype. Found {found}: move it, {cure}")
    if pair.h > min(pair.n, pair.m):
        raise ValueError(
            f"the pair {pair.name!r} must have at most as many columns as rows. Found {pair.h} columns and "
            f"{min(pair.n, pair.m)} rows: take a smaller rank, {cure}"
        )
    return True


@dataclass(frozen=True, eq=False)
class PairBatch:
    """Hold the pairs of one shape and group of parameters, whose factors are read as (heads of all, rows, h)."""

    pairs: tuple[SymmetricPair, ...]
    params: Mapping[str, Tensor]

    @property
    def complex(self) -> bool:
        """Return whether the two columns are real and imaginary part."""
        return self.pairs[0].acts == "GL(1, C)"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the parameters the pairs touch, each once."""
        return tuple(dict.fromkeys(name for pair in self.pairs for name in pair.names))

    @cached_property
    def dtype(self) -> torch.dtype:
        """Return the precision that steps are computed in: that of the parameters, float32 at least."""
        dtype = torch.float32
        for name in self.names:
            dtype = torch.promote_types(dtype, self.params[name].dtype)
        return dtype

    @property
    def device(self) -> torch.device:
        """Return where the parameters are."""
        return self.params[self.names[0]].device

    def factors(self) -> Both:
        """Return G and H, as they are now."""
        return self._read({name: self.params[name].detach() for name in self.names})

    def gradients(self) -> Both:
        """Return the gradients in G and H; all parameters of the pairs have one."""
        return self._read({name: self._grad(name) for name in self.names})

    def _grad(self, name: str) -> Tensor:
        grad = self.params[name].grad
        assert grad is not None
        return grad

    def _read(self, params: Params) -> Both:
        G = torch.cat([pair.G.read(params).to(self.dtype) for pair in self.pairs])
        H = torch.cat([pair.H.read(params).to(self.dtype) for pair in self.pairs])
        return G, H

    def write(self, G: Tensor, H: Tensor) -> None:
        """Put factors back into the parameters, in place."""
        params = {name: self.params[name].detach() for name in self.names}
        heads = [pair.heads for pair in self.pairs]
        for pair, g, k in zip(self.pairs, G.split(heads), H.split(heads), strict=True):
            pair.G.write(params, g)
            pair.H.write(params, k)

    def recall(self, state: State, name: str, columns: int) -> Both:
        """Return what is remembered under the name for G and H of all pairs, with so many columns; 0 at first."""
        found = [state.get(pair.name, {}) for pair in self.pairs]
        sides = []
        for side, rows in (("G", self.pairs[0].n), ("H", self.pairs[0].m)):
            shapes = [(pair.heads, rows, columns) for pair in self.pairs]
            key = f"{name}_{side}"
            parts = [each[key] if key in each else torch.zeros(s) for each, s in zip(found, shapes, strict=True)]
            sides.append(_stacked(parts, self.device, self.dtype))
        return sides[0], sides[1]

    def remember(self, state: State, name: str, values: Both) -> None:
        """Remember values for G and H of all pairs under the name: for every pair a part of one tensor."""
        heads = [pair.heads for pair in self.pairs]
        for side, value in zip("GH", values, strict=True):
            for pair, part in zip(self.pairs, value.split(heads), strict=True):
                # A new dict: another optimizer may have been given this one's state.
                state[pair.name] = {**state.get(pair.name, {}), f"{name}_{side}": part}

    def counts(self, state: State) -> list[int]:
        """Return how many steps each pair has made."""
        return [int(state.get(pair.name, {}).get("step", 0)) for pair in self.pairs]

    def each_head(self, numbers: Sequence[float]) -> float | Tensor:
        """Return a number for each pair as one for each of its heads, (heads of all, 1, 1), or one for all."""
        if len(set(numbers)) == 1:
            return numbers[0]
        repeated = [number for pair, number in zip(self.pairs, numbers, strict=True) for _ in range(pair.heads)]
        return torch.tensor(repeated, dtype=self.dtype, device=self.device)[:, None, None]

    def counted(self, state: State) -> None:
        """Count one more step of each pair."""
        for pair, steps in zip(self.pairs, self.counts(state), strict=True):
            state[pair.name] = {**state.get(pair.name, {}), "step": torch.tensor(steps + 1.0)}


def _stacked(parts: Sequence[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the tensor that all parts are views of, in this order, or else a new one of them all."""
    whole = parts[0]._base
    if whole is None or any(part._base is not whole for part in parts) or sum(map(len, parts)) != len(whole):
        return torch.cat([part.to(device, dtype) for part in parts])
    in_order = all(a.data_ptr() < b.data_ptr() for a, b in pairwise(parts))
    return (whole if in_order else torch.cat(list(parts))).to(device, dtype)
