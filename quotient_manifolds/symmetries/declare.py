"""Declare a symmetric pair by hand, by functions that cut its factors out of the model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import get_args

import torch
from torch import Tensor, nn

from quotient_manifolds.check import check_one_of
from quotient_manifolds.symmetries.checks import check_model
from quotient_manifolds.symmetries.pair import Factor, Group, SymmetricPair
from quotient_manifolds.symmetries.strided_view import StridedView

Cut = Callable[[Mapping[str, Tensor]], Tensor]
"""Parameters by name -> a factor (heads, rows, h), by indexing, views, transpositions and `torch.cat` of rows."""

_WIDTHS = {"GL+(1)": 1, "GL(1, C)": 2}


def declare_pair(model: nn.Module, name: str, kind: str, *, G: Cut, H: Cut, acts: Group = "GL(h)") -> SymmetricPair:
    """Return the symmetric pair of factors G and H, given that the model uses only G H^T, head by head.

    The pair is called "name kind". name: of the module, for example. kind: "query/key", "value/output", or your own.
    G, H: functions of the parameters by name that return the factor (heads, rows, h). They are called with tensors of
    integers that encode where each entry is stored. So they may rearrange entries (index, view, transpose, `torch.cat`
    along rows), but not change them. acts: the group, as in `SymmetricPair`.

    >>> model = torch.nn.Sequential(torch.nn.Linear(5, 2), torch.nn.Linear(2, 4))
    >>> pair = declare_pair(
    ...     model,
    ...     "both",
    ...     "bottleneck",
    ...     G=lambda w: torch.cat([w["0.weight"].mT, w["0.bias"][None]])[None],
    ...     H=lambda w: w["1.weight"][None],
    ... )
    >>> pair.group, pair.n, pair.m
    ('GL(2)^1', 6, 4)

    Nothing is verified here; `verify_symmetries` and every measure verify the pair.
    ValueError for a parameter that the model does not have, for factors whose shapes do not match, with changed or
    repeated entries, or in an order that no offset and strides describe, and for an unknown group. TypeError unless the
    model is a module and G and H are functions.
    """
    check_model(model)
    check_one_of("acts", acts, get_args(Group))
    if others := [type(each).__name__ for each in (G, H) if not callable(each)]:
        raise TypeError(f"G and H must be functions of the parameters by name. Found {others[0]}.")
    label, places = f"{name} {kind}".strip(), _Places(model)
    left, right = (_factor(cut(places), places, f"{side} of {label!r}") for side, cut in (("G", G), ("H", H)))
    pair = SymmetricPair(label, kind, left, right, acts)
    shapes = {view.shape[::2] for view in pair.views}
    if len(shapes) > 1 or pair.h != _WIDTHS.get(acts, pair.h):
        raise ValueError(
            f"the factors of {label!r} need the same number of heads and the same width h, 1 for GL+(1) and 2 for "
            f"GL(1, C). Found (heads, h) = {', '.join(map(str, sorted(shapes)))} for {acts}."
        )
    if len((stored := pair.read(places)).unique()) < stored.numel():
        raise ValueError(f"an entry of a parameter stands twice in {label!r}, where each has one place.")
    return pair


class _Places(Mapping[str, Tensor]):
    """Map each parameter's name to integers of its shape, which number the entries of all parameters of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.params = dict(model.named_parameters())
        self.names = list(self.params)
        sizes = [w.numel() for w in self.params.values()]
        self.starts = torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.params:
            raise ValueError(f"the model has no parameter {name!r}; names are those of model.named_parameters().")
        w, start = self.params[name], int(self.starts[self.names.index(name)])
        return torch.arange(start, start + w.numel()).view(w.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _factor(numbers: Tensor, places: _Places, what: str) -> Factor:
    """Return a factor from the numbers of its entries, with one view for consecutive rows of the same parameter."""
    if not isinstance(numbers, Tensor) or numbers.dtype != torch.int64 or numbers.ndim != 3 or not numbers.numel():
        found = tuple(numbers.shape) if isinstance(numbers, Tensor) else type(numbers).__name__
        kind = f", {numbers.dtype}" if isinstance(numbers, Tensor) and numbers.dtype != torch.int64 else ""
        raise ValueError(f"{what} must be entries of parameters, unchanged, as (heads, rows, h). Found {found}{kind}.")
    if not 0 <= int(numbers.min()) <= int(numbers.max()) < int(places.starts[-1]):
        raise ValueError(f"{what} must be entries of parameters, unchanged. Found numbers that are no entry's place.")
    owners = torch.bucketize(numbers.contiguous(), places.starts, right=True) - 1
    apart = numbers - places.starts[owners]
    views, start = list[StridedView](), 0
    for stop in range(1, numbers.shape[1] + 1):
        if stop < numbers.shape[1] and torch.equal(owners[:, stop], owners[:, start]):
            continue
        name = places.names[int(owners[0, start, 0])]
        first, rows = apart[:, start : start + 1], apart[0, start:stop, 0] - apart[0, start, 0]
        regular = torch.equal(apart[:, start:stop], first + rows[:, None])
        same = bool((owners[:, start:stop] == owners[0, start, 0]).all())
        stored = tuple(places.params[name].shape)
        view = StridedView.of(name, stored, first, rows) if regular and same else None
        if view is None:
            raise ValueError(f"{what}: its entries in {name!r} stand in an order that no offset and strides describe.")
        views.append(view)
        start = stop
    return Factor(tuple(views))
