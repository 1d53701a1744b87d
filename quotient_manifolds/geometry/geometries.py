"""Define the geometries: which tangent space, with which metric, a model's parameters get."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar, final, get_args

from torch import nn

from quotient_manifolds.check import check_number, check_one_of
from quotient_manifolds.geometry.parameters import measured_parameters, precise, trained_parameters
from quotient_manifolds.geometry.tangent_space import Norm, ShardedSpace, TangentSpace
from quotient_manifolds.sharded import Ownership, ShardedModel
from quotient_manifolds.symmetries import Evaluate, Params, Symmetries
from quotient_manifolds.symmetries.horizontal import Horizontal
from quotient_manifolds.symmetries.structure import Structure

Found = TypeVar("Found")


class Geometry(ABC):
    """Say what a ball around a model's weights is: a Riemannian metric on the parameters of any model."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Return how results and tables call it."""

    @abstractmethod
    def at(self, model: nn.Module, known: KnownSymmetries | None = None) -> TangentSpace:
        """Return the tangent space at the model's parameters; the model is read, never written.

        known: what `verified` has computed of this model, as it is; it saves time and changes nothing.
        """

    @abstractmethod
    def around(self, model: nn.Module) -> TangentSpace:
        """Return the tangent space at the model's parameters as they are, at no other place of their orbit.

        For steps of training, which begin where the gradients are, and take no time for checks that gradients make
        needless. Of symmetries, only pairs are quotiented out.
        """

    @abstractmethod
    def over(self, model: ShardedModel) -> ShardedSpace:
        """Return this process's share of the tangent space `at` the parameters of a sharded model.

        Collective, and like all that raises there, by all processes together.
        """

    def verified(
        self, model: nn.Module, loss: Evaluate, batches: Sequence[Any], known: KnownSymmetries | None = None
    ) -> Geometry:
        """Return the geometry with the symmetries of the model, given or found in loss(model, first batch).

        Found symmetries are verified by the gradients of a measure, see `horizontal` and `failing`, or here, on every
        batch, if the geometry says so. known: what was found before of this model, as it is; it saves time and changes
        nothing. Raises ValueError if a symmetry that was given is none. A geometry that uses no symmetries returns
        itself.
        """
        return self

    def horizontal(self, model: nn.Module, space: TangentSpace, known: KnownSymmetries) -> Horizontal | None:
        """Return the check of gradients at the start of a measure; None if no symmetry is to be verified by them."""
        return None

    def failing(
        self, model: nn.Module, loss: Evaluate, batch: Any, index: int, known: KnownSymmetries
    ) -> Mapping[str, str]:
        """Return symmetries under which the loss on batch `index` changes in float64, by name, and why.

        Raises ValueError if none does, but the loss is another one where a measure begins.
        """
        return {}

    def without(self, failed: Mapping[str, str], asked: Geometry) -> Geometry:
        """Return the geometry without symmetries that fail, with a warning. asked: the geometry that was asked for.

        Raises ValueError if one of them was given.
        """
        return self

    @property
    def group(self) -> tuple[str, ...]:
        """Return the names of the symmetries that are quotiented out, as far as they are known before a run."""
        return ()

    def to_dict(self) -> dict[str, Any]:
        """Return kind and settings in plain JSON types, as results keep them."""
        own: list[str] = [each.name for each in fields(self)] if is_dataclass(self) else []
        return {"kind": type(self).__name__.lower(), **{name: getattr(self, name) for name in own}}


class _Elementwise(Geometry, ABC):
    """Measure every weight by itself."""

    norm: Norm

    def at(self, model: nn.Module, known: KnownSymmetries | None = None) -> TangentSpace:
        return self._space(measured_parameters(model))

    def around(self, model: nn.Module) -> TangentSpace:
        return self._space(trained_parameters(model))

    def over(self, model: ShardedModel) -> ShardedSpace:
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


@final
class KnownSymmetries:
    """Hold the symmetries of models as they are, by loss and batches: found once, and verified once in every scope.

    Neither depends on metric, radius or measure. Whoever measures a model several times makes one and hands it to each
    measure; whoever changes the model's parameters in between goes on with `elsewhere()`.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Hashable, ...], tuple[tuple[Any, ...], Any]] = {}
        self._structures: list[Structure] = []

    def elsewhere(self) -> KnownSymmetries:
        """Return what is known of models with other weights: the symmetries of the architecture."""
        made = KnownSymmetries()
        made._structures = self._structures
        return made

    def found(self, model: nn.Module, loss: Evaluate, batch: Any) -> Symmetries:
        """Return the symmetries that are found in loss(model, batch), or were found in a model that computes alike."""

        def find() -> Symmetries:
            for each in self._structures:
                if each.serves(model, batch, loss):
                    return each.symmetries
            self._structures.append(Structure.of(model, batch, loss))
            return self._structures[-1].symmetries

        return self.once(find, "found", model, loss, batch)

    def once(self, make: Callable[[], Found], what: str, *of: Any) -> Found:
        """Return what `make` made when it was first asked for by this name and of these objects."""
        place = (what, *map(id, of))
        if place not in self._kept:
            self._kept[place] = of, make()  # what is told by its address has to stay alive
        result: Found = self._kept[place][1]
        return result
