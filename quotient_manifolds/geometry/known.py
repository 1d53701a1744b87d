"""Store results about a model, so that several measures of it compute them once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, Generic, TypeVar, final

from torch import nn

from quotient_manifolds.symmetries import Evaluate, Params, SymmetricPair, Symmetries
from quotient_manifolds.symmetries.horizontal import Horizontal
from quotient_manifolds.symmetries.structure import Structure
from quotient_manifolds.symmetries.verify import Verification

Value = TypeVar("Value")


@dataclass(frozen=True)
class StartPoint:
    """Hold the canonical representative at which a measure begins, and the measured pairs there.

    constant: parameters that are the same at all canonical representatives. doubts: reasons why there may be several.
    """

    pairs: list[SymmetricPair]
    constant: tuple[str, ...]
    point: Params
    doubts: tuple[str, ...]


@final
class Memo(Generic[Value]):
    """Store values by the objects that they were computed from, which are compared by identity and stay alive."""

    def __init__(self) -> None:
        self._entries: list[tuple[Hashable, tuple[object, ...], Value]] = []

    def of(self, subjects: Sequence[object], make: Callable[[], Value], settings: Hashable = ()) -> Value:
        """Return the value for these objects and settings, which are compared by value; compute it if it is new.

        Nothing is stored if `make` raises.
        """
        for known, objects, value in self._entries:
            if known == settings and len(objects) == len(subjects) and all(map(is_, objects, subjects)):
                return value
        value = make()
        self._entries.append((settings, tuple(subjects), value))
        return value


@final
class KnownSymmetries:
    """Store the symmetries of models by loss and batches: each is found once, and verified once in every scope.

    Neither depends on the metric, the radius or the measure. To measure a model several times, make one and pass it to
    each measure; after a change of the model's parameters, continue with `elsewhere()`.

    losses: losses of unperturbed models, with machine epsilon. completed: given pairs, completed by found symmetries.
    scopes: the found symmetries in a scope. starts: start points, by symmetries and by whether the metric is relaxed.
    horizontal: checks of gradients, by metric and eps. verified, declared: verifications of all symmetries, and of
    given pairs alone. sharded: reasons why symmetries of a sharded model fail. changes: changes of the loss at the
    canonical representative, by metric and eps. warned: models whose doubts were reported.
    """

    def __init__(self) -> None:
        self._structures: list[Structure] = []
        self._found = Memo[Symmetries]()
        self.losses = Memo[tuple[float, float]]()
        self.completed, self.scopes = Memo[Symmetries](), Memo[Symmetries]()
        self.starts = Memo[StartPoint]()
        self.horizontal = Memo[Horizontal]()
        self.verified, self.declared = Memo[Verification](), Memo[Verification]()
        self.sharded = Memo[dict[str, str]]()
        self.changes = Memo[str]()
        self.warned = Memo[None]()

    def elsewhere(self) -> KnownSymmetries:
        """Return the results that hold for other weights, too: the symmetries of the architecture."""
        other = KnownSymmetries()
        other._structures = self._structures
        return other

    def found(self, model: nn.Module, loss: Evaluate, batch: Any) -> Symmetries:
        """Find the symmetries of loss(model, batch), unless they are known from a model with the same operations."""

        def find() -> Symmetries:
            for each in self._structures:
                if each.serves(model, batch, loss):
                    return each.symmetries
            self._structures.append(Structure.of(model, batch, loss))
            return self._structures[-1].symmetries

        return self._found.of((model, loss, batch), find)
