"""Define objectives of weights alone: the error of rounding, and the cost of pruning small weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from quotient_manifolds.check import check_integer
from quotient_manifolds.orbit.group import Group
from quotient_manifolds.symmetries import Params, SymmetricPair
from quotient_manifolds.symmetries.checks import check_weights
from quotient_manifolds.symmetries.groups import Symmetry

Objective = Callable[[Params], Tensor]
CLIPPED = torch.linspace(0.4, 1.0, 25).tolist()
"""The ranges to try if rounding clips, relative to the largest weight."""


class WeightObjective(ABC):
    """Measure weights: parameters of two or more axes, by default all that the symmetry group changes.

    Weights are measured with gains of norms at 1, absorbed by the weights that follow. Embeddings are left out,
    because they are looked up, not multiplied.
    """

    names: Collection[str] | None

    def moves(self, symmetry: Symmetry) -> bool:
        """Return whether a symmetry changes the measured value, and not only its units."""
        return True

    def on(self, model: nn.Module, group: Group) -> Objective:
        """Return the objective as a function of a model's parameters. ValueError if there is nothing to measure."""
        return partial(self._measure, self._measured(model, group), group)

    def _measured(self, model: nn.Module, group: Group) -> list[str]:
        """Return the names of the weights that are measured."""
        own = dict(model.named_parameters())
        asked = None if self.names is None else listed_names(self.names, own)
        tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
        found = [name for name in group.names if own[name].ndim > 1 and id(own[name]) not in tables]
        names = found if asked is None else asked
        if not names:
            raise ValueError(
                f"{type(self).__name__} needs weights that symmetries change, and {type(model).__name__} has none: "
                "pass names, or an objective of your own."
            )
        return names

    @abstractmethod
    def _measure(self, names: list[str], group: Group, params: Params) -> Tensor: ...


def listed_names(names: Collection[str], params: Mapping[str, Tensor]) -> list[str]:
    """Return names as a list, each once, after checking the weights of these names; one string is one name."""
    if not isinstance(names, Iterable):
        raise TypeError(f"names must be a list of names of parameters. Found {names!r}.")
    listed = [names] if isinstance(names, str) else [*dict.fromkeys(names)]
    check_weights(params, listed)
    return listed


@dataclass(frozen=True)
class Sparsity(WeightObjective):
    """Measure the L1 norm of weights: the smaller it is, the less is lost by pruning small weights."""

    names: Collection[str] | None = None

    def _measure(self, names: list[str], group: Group, params: Params) -> Tensor:
        return torch.stack([params[name].abs().sum() for name in names]).sum()

    @staticmethod
    def prune(params: Mapping[str, Tensor], names: Collection[str], fraction: float) -> Params:
        """Return the parameters with this fraction of the entries of each weight, the smallest, set to 0."""
        if not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
            raise ValueError(f"fraction must be a number from 0 to 1. Found {fraction!r}.")
        pruned = dict(params)
        for name in listed_names(names, params):
            size = params[name].abs()
            count = int(fraction * size.numel())
            if count:
                least = size.flatten().kthvalue(count).values
                pruned[name] = params[name].masked_fill(size <= least, 0.0)
        return pruned


@dataclass(frozen=True)
class RoundingError(WeightObjective):
    """Bound the squared error of products G H^T when weights are rounded to integers of `bits` bits, without data.

    A channel w (a row of the stored weight, or a group of group_size of its entries) has steps of about
    2 |w|_p / (2^bits - 1), and a rounding error of mean square step^2 / 12 at each entry. An error in unit j of G is
    multiplied by unit j of H in the product. So the bound is the sum over channels of (2 |w|_p / (2^bits - 1))^2 / 12,
    times the sum over their entries of |h_j|^2. Here h_j is the partner of the unit that contains the entry; |h_j| is 1
    if no partner is known. [Lin et al., AWQ, 2306.00978, and Liu et al., SpinQuant, 2405.16406, learn scales and
    rotations for the same purpose.]

    bits: scales the bound without changing its minimizer; `round` depends on it. clip: choose ranges by the least
    squared error, which may cut off the largest entries of a group. The norm |w|_p stands for the maximum: p is 12, or
    6 if both `clip` and group_size are set. axis: the axis of the stored weight that counts channels.
    """

    bits: int = 4
    group_size: int | None = None
    clip: bool = False
    axis: int = 0
    names: Collection[str] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_integer("bits", self.bits, 2)
        if self.group_size is not None:
            check_integer("group_size", self.group_size, 1)
        check_integer("axis", self.axis, 0)

    def moves(self, symmetry: Symmetry) -> bool:
        """Return whether a symmetry changes the error; scales of neurons without partners change only its units."""
        return symmetry.mixes

    def _measured(self, model: nn.Module, group: Group) -> list[str]:
        names, own = super()._measured(model, group), dict(model.named_parameters())
        widths = sorted({self._rows(name, own[name]).shape[1] for name in names})
        if self.group_size and all(width % self.group_size for width in widths):
            raise ValueError(
                f"group_size must divide the channels of some weight, of {', '.join(map(str, widths))} numbers. "
                f"Found {self.group_size}"
            )
        return names

    def _measure(self, names: list[str], group: Group, params: Params) -> Tensor:
        p, size = (6 if self.clip and self.group_size else 12), (2 / (2**self.bits - 1)) ** 2 / 12
        reach = {name: torch.ones_like(params[name]) for name in group.names}
        for pair in group.pairs:
            _reach(pair, params, reach)
        errors = []
        for name in names:
            rows = self._channels(name, params[name])
            most = rows.detach().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
            norm = most[..., 0] * (rows / most).abs().pow(p).sum(-1).clamp_min(0.5).pow(1 / p)
            given = self._channels(name, reach[name]).sum(-1) if name in reach else rows.shape[-1]
            errors.append((norm.square() * given).sum())
        return size * torch.stack(errors).sum()

    def _rows(self, name: str, W: Tensor) -> Tensor:
        """Return the channels of a weight. ValueError if it lacks the axis, or has no other axis."""
        if not W.ndim > max(1, self.axis):
            raise ValueError(
                f"RoundingError must have weights with channels along axis {self.axis}, and others. "
                f"Found {name!r} of shape {tuple(W.shape)}."
            )
        return W.movedim(self.axis, 0).flatten(1)

    def _channels(self, name: str, W: Tensor) -> Tensor:
        rows, g = self._rows(name, W), self.group_size
        return rows.unflatten(1, (-1, g)) if g and rows.shape[1] % g == 0 else rows

    def round(self, params: Mapping[str, Tensor], names: Collection[str]) -> Params:
        """Return the parameters with these weights rounded to 2^bits - 1 multiples of a step, by channel.

        A channel that groups do not divide has one range.
        """
        rounded, top = dict(params), 2 ** (self.bits - 1) - 1
        for name in listed_names(names, params):
            rows = self._channels(name, params[name])
            most = rows.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
            best, least = rows, torch.full_like(most, torch.inf)
            for share in CLIPPED if self.clip else (1.0,):
                step = share * most / top
                q = (rows / step).round().clamp(-top, top) * step
                error = (q - rows).square().sum(-1, keepdim=True)
                best, least = torch.where(error < least, q, best), torch.minimum(error, least)
            W = params[name].movedim(self.axis, 0)
            rounded[name] = best.reshape(W.shape).movedim(0, self.axis)
        return rounded


def _reach(pair: SymmetricPair, params: Params, reach: Params) -> None:
    """Write to `reach`, for each entry of a pair, the squared length of its unit's partner."""
    G, H = pair.G.read(params), pair.H.read(params)
    over = (1, 2) if pair.acts == "GL(1, C)" else (1,)  # both coordinates of a plane multiply both of the other
    for factor, own, partner in ((pair.G, G, H), (pair.H, H, G)):
        factor.write(reach, partner.square().sum(over, keepdim=True).expand_as(own))
