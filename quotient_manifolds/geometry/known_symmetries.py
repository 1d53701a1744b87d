"""Keep what was found and proved of one model, for all measures of it that follow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, final

from torch import nn

from quotient_manifolds.symmetries import Evaluate, Proof, Scope, Symmetries, propose_symmetries, prove_on_batch

Result = TypeVar("Result")


@final
class KnownSymmetries:
    """Hold the symmetries of models as they are, by loss and batch: found once, and proved once in every scope.

    Neither depends on metric, radius or measure. Whoever measures a model several times makes one and hands it to each
    measure; whoever changes the model's parameters in between makes another.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], tuple[tuple[Any, ...], Any]] = {}

    def found(self, model: nn.Module, loss: Evaluate, batch: Any, scope: Scope) -> Symmetries:
        """Return the symmetries of loss(model, batch) within a scope; the same object every time."""
        every = self._once(partial(propose_symmetries, model, batch, evaluate=loss), "found", model, loss, batch)
        return self._once(partial(every.within, scope), scope, every)

    def proof(self, model: nn.Module, loss: Evaluate, batch: Any, symmetries: Symmetries) -> Proof:
        """Return what moving along these symmetries does to the loss, as `prove_on_batch` has it."""
        prove = partial(prove_on_batch, model, loss, batch, symmetries)
        return self._once(prove, "proved", model, loss, batch, symmetries)

    def _once(self, make: Callable[[], Result], what: str, *of: Any) -> Result:
        place = (what, *map(id, of))
        if place not in self._kept:
            self._kept[place] = of, make()  # what is told by its address has to stay alive
        result: Result = self._kept[place][1]
        return result
