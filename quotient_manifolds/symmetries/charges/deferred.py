"""Weights of a large model that are computed each time an operation takes them, and not held."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from quotient_manifolds.symmetries.groups import Params, Symmetry
from quotient_manifolds.symmetries.trace.replay import large, wide

aten = torch.ops.aten


class Deferred(Tensor):
    """Stand for a tensor in float64 that `made` computes whenever an operation takes it, and that has no memory."""

    made: Callable[[], Tensor]

    @staticmethod
    def of(like: Tensor, made: Callable[[], Tensor]) -> Tensor:
        """Return a tensor of the shape of another."""
        new: Deferred = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Deferred, like.shape, dtype=torch.float64, device=like.device
        )
        new.made = made
        return new

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return cls.of(args[0], args[0].made)
        return func(*tree_map(held, args), **tree_map(held, kwargs or {}))


def held(value: Any) -> Any:
    """Return a tensor in memory for one that is deferred, anything else as it is."""
    return value.made() if isinstance(value, Deferred) else value


def widened(params: Mapping[str, Tensor]) -> Params:
    """Return parameters with those of floating point numbers in float64, deferred if they are many."""

    def deferred(w: Tensor) -> Tensor:
        return Deferred.of(w, lambda: wide(w.contiguous())) if w.is_floating_point() else w

    return {name: deferred(w) if large(params.values()) else wide(w) for name, w in params.items()}


def acted(symmetry: Symmetry, params: Mapping[str, Tensor], element: Tensor) -> Params:
    """Return symmetry.act(params, element) of deferred parameters, each deferred: one needs few of the others."""

    def moved(name: str) -> Tensor:
        part = symmetry.restricted((name,))

        def made() -> Tensor:
            return part.act({other: held(params[other]) for other in part.taken}, element)[name]

        return Deferred.of(params[name], made)

    return {**params, **{name: moved(name) for name in symmetry.names}}
