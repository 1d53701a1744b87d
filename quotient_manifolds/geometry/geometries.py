"""Define the geometries: a metric on the parameters of a model, and its tangent space at a point."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, final, get_args

from torch import nn

from quotient_manifolds.check import check_number, check_one_of
from quotient_manifolds.geometry.known import KnownSymmetries
from quotient_manifolds.geometry.parameters import measured_parameters, precise, trained_parameters
from quotient_manifolds.geometry.tangent_space import Norm, ShardedSpace, TangentSpace
from quotient_manifolds.sharded import Ownership, ShardedModel
from quotient_manifolds.symmetries import Evaluate, Params
from quotient_manifolds.symmetries.horizontal import Horizontal


class Geometry(ABC):
    """Define a Riemannian metric on the parameters of any model, and so a ball around its weights."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name in results and tables."""

    @abstractmethod
    def tangent_space(self, model: nn.Module, known: KnownSymmetries | None = None) -> TangentSpace:
        """Return the tangent space at the canonical representative of the model's parameters; the model is only read.

        known: results of `verified` for this model, with the same weights; they save time and change no value.
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


class _Elementwise(Geometry, ABC):
    """Give every weight a scale of its own: a diagonal metric."""

    norm: Norm

    def tangent_space(self, model: nn.Module, known: KnownSymmetries | None = None) -> TangentSpace:
        return self._space(measured_parameters(model))

    def tangent_space_in_place(self, model: nn.Module) -> TangentSpace:
        return self._space(trained_parameters(model))

    def sharded_space(self, model: ShardedModel) -> ShardedSpace:
        ownership = Ownership(model.layouts, model.measured, ())
        return ShardedSpace(self._space(ownership.gather(model.original)), model, ownership)

    def _named(self, name: str) -> str:
        return name if self.norm == "l2" else f"{name} {self.norm}"

    @abstractmethod
    def _space(self, point: Params) -> TangentSpace: ...


@final
@dataclass(frozen=True)
class Euclidean(_Elementwise):
    """Measure as plain sharpness does: all weights are measured alike, <xi, eta> = sum xi eta.

    norm: the ball of moves xi is |xi|_2 <= radius ("l2") or max |xi_i| <= radius ("linf").
    """

    norm: Norm = "l2"

    def __post_init__(self) -> None:
        check_one_of("norm", self.norm, get_args(Norm))

    @property
    def name(self) -> str:
        return self._named("euclidean")

    def _space(self, point: Params) -> TangentSpace:
        return TangentSpace(point, dict.fromkeys(point), (), self.norm)


@final
@dataclass(frozen=True)
class Adaptive(_Elementwise):
    """Measure as adaptive sharpness does: every weight w is measured against its own size.

    <xi, eta> = sum xi eta / c^2, so z = xi / c, elementwise, with c = |w| + eta. eta: 0 leaves weights that are 0 where
    they are; ASAM has 0.01 (Kwon et al., arXiv 2102.11600). norm: the ball is |xi / c|_2 or max |xi_i / c_i| <= radius.
    """

    eta: float = 0.0
    norm: Norm = "l2"

    def __post_init__(self) -> None:
        check_number("eta", self.eta)
        check_one_of("norm", self.norm, get_args(Norm))

    @property
    def name(self) -> str:
        return self._named("adaptive") + (f" (eta {self.eta:g})" if self.eta else "")

    def _space(self, point: Params) -> TangentSpace:
        # For eta = 0 the weights themselves serve as c: a sign is an isometry of either ball.
        wide = {name: w.to(precise(w.dtype)) for name, w in point.items()} if self.eta else point
        scale = {name: w.abs().add_(self.eta) for name, w in wide.items()} if self.eta else point
        return TangentSpace(point, scale, (), self.norm)
