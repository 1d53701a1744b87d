"""Define a geometry: a metric on the parameters of any model, and its tangent space at a point."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn

from quotient_manifolds.geometry.known import KnownSymmetries
from quotient_manifolds.geometry.tangent_space import ShardedSpace, TangentSpace
from quotient_manifolds.sharded import ShardedModel
from quotient_manifolds.symmetries import Evaluate
from quotient_manifolds.symmetries.horizontal import Horizontal


class Geometry(ABC):
    """Define a Riemannian metric on the parameters of any model, and so a ball around its weights.

    A new geometry is a subclass: it returns a `TangentSpace`, in whose orthonormal coordinates every measure works. A
    new metric on pairs of matrices alone is a manifold in `quotient_manifolds/manifolds`, or a number t of
    `Quotient(t)` in quotient.py. `verified` returns a geometry that holds the `Symmetries` of a model, given or found;
    `KnownSymmetries` stores them between measures.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name in results and tables."""

    @abstractmethod
    def tangent_space(self, model: nn.Module, known: KnownSymmetries | None = None) -> TangentSpace:
        """Return the tangent space at the model's parameters, of a quotient at their canonical representative.

        The model is only read. known: results of `verified` for this model, with the same weights; they
        save time and change no value.
        """

    @abstractmethod
    def tangent_space_in_place(self, model: nn.Module) -> TangentSpace:
        """Return the tangent space at the model's parameters as they are, not at another representative.

        For training steps: gradients are taken at these parameters. Only the symmetries of pairs are quotiented out,
        and a gradient, which is horizontal anyway, needs no further checks.
        """

    @abstractmethod
    def sharded_space(self, model: ShardedModel) -> ShardedSpace:
        """Return this process's share of the tangent space of a sharded model.

        A collective operation: all processes call it, and all raise if one does.
        """

    def verified(
        self, model: nn.Module, loss: Evaluate, batches: Sequence[Any], known: KnownSymmetries | None = None
    ) -> Geometry:
        """Return the geometry with the symmetries of the model, given or found in loss(model, first batch).

        Found symmetries are verified by the gradients of a measure, see `horizontal` and `failing`, or here, on every
        batch, if the geometry asks for that. known: earlier results for this model, with the same weights; they save
        time and change no value. Raises ValueError if the loss is not invariant under a given symmetry. A geometry
        without symmetries returns itself.
        """
        return self

    def horizontal(self, model: nn.Module, space: TangentSpace, known: KnownSymmetries) -> Horizontal | None:
        """Return the check of the gradients with which a measure begins; None if they verify no symmetry."""
        return None

    def failing(
        self, model: nn.Module, loss: Evaluate, batch: Any, index: int, known: KnownSymmetries
    ) -> Mapping[str, str]:
        """Return the symmetries under which the loss on batch `index` changes in float64, with the reason, by name.

        Raises ValueError if there is none, but the loss at the canonical representative differs from the model's.
        """
        return {}

    def without(self, failed: Mapping[str, str], asked: Geometry) -> Geometry:
        """Return the geometry without the symmetries that failed, and warn of them. asked: the user's geometry.

        Raises ValueError if the user gave one of them.
        """
        return self

    @property
    def group(self) -> tuple[str, ...]:
        """Return the names of the symmetries that are quotiented out, if they are known before a run."""
        return ()

    def to_dict(self) -> dict[str, Any]:
        """Return kind and settings in plain JSON types, as results keep them."""
        own: list[str] = [each.name for each in fields(self)] if is_dataclass(self) else []
        return {"kind": type(self).__name__.lower(), **{name: getattr(self, name) for name in own}}
