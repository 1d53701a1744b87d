"""Define the geometries with one scale for every weight: Euclidean and adaptive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final, get_args

from torch import nn

from quotient_manifolds.check import check_number, check_one_of
from quotient_manifolds.geometry.geometry import Geometry
from quotient_manifolds.geometry.known import KnownSymmetries
from quotient_manifolds.geometry.parameters import measured_parameters, precise, trained_parameters
from quotient_manifolds.geometry.tangent_space import Norm, ShardedSpace, TangentSpace
from quotient_manifolds.sharded import Ownership, ShardedModel
from quotient_manifolds.symmetries import Params


class _Elementwise(Geometry, ABC):
    """Define a diagonal metric: one scale for every weight."""

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
    """Define the metric of plain sharpness, the same for all weights: <xi, eta> = sum xi eta.

    norm: the ball of changes xi is |xi|_2 <= radius ("l2") or max |xi_i| <= radius ("linf").
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
    """Define the metric of adaptive sharpness, in which changes are relative to the size of each weight w.

    <xi, eta> = sum xi eta / c^2, so z = xi / c, elementwise, with c = |w| + eta. eta: with 0, weights that are 0 do not
    move; ASAM has 0.01 (Kwon et al., arXiv 2102.11600). norm: the ball is |xi / c|_2 or max |xi_i / c_i| <= radius.
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
        # For eta = 0 the weights themselves serve as c, because a change of sign is an isometry of both balls.
        wide = {name: w.to(precise(w.dtype)) for name, w in point.items()} if self.eta else point
        scale = {name: w.abs().add_(self.eta) for name, w in wide.items()} if self.eta else point
        return TangentSpace(point, scale, (), self.norm)
