"""Keep what was found and verified of one model, for all measures of it that follow."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, final

from torch import nn

from quotient_manifolds.symmetries import (
    Evaluate,
    Proof,
    Scope,
    Symmetries,
    Verified,
    propose_symmetries,
    prove_on_sharded,
    verify_on_batches,
)

Result = TypeVar("Result")


@final
class KnownSymmetries:
    """Hold the symmetries of models as they are, by loss and batches: found once, and verified once in every scope.

    Neither depends on metric, radius or measure. Whoever measures a model several times makes one and hands it to each
    measure; whoever changes the model's parameters in between makes another.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Hashable, ...], tuple[tuple[Any, ...], Any]] = {}

    def found(self, model: nn.Module, loss: Evaluate, batch: Any, scope: Scope) -> Symmetries:
        """Return the symmetries of loss(model, batch) within a scope; the same object every time."""
        every = self.once(partial(propose_symmetries, model, batch, evaluate=loss), "found", model, loss, batch)
        return self.once(partial(every.within, scope), scope, every)

    def completed(self, model: nn.Module, loss: Evaluate, batch: Any, given: Symmetries) -> Symmetries:
        """Return the given symmetries and those of loss(model, batch) besides; the same object every time."""

        def complete() -> Symmetries:
            try:
                every = propose_symmetries(model, batch, evaluate=loss, declared=given)
            except ValueError as error:  # a function that takes no float64, or differentiates inside
                warnings.warn(f"symmetries that are given stay as they are, not completed: {error}", stacklevel=2)
                return given
            known = {each.name for each in every.freedoms}
            return replace(every, freedoms=(*every.freedoms, *(f for f in given.freedoms if f.name not in known)))

        return self.once(complete, "completed", model, loss, batch, given)

    def verified(self, model: nn.Module, loss: Evaluate, batches: Sequence[Any], symmetries: Symmetries) -> Verified:
        """Return what these batches say of the symmetries, as `verify_on_batches` has it."""
        verify = partial(verify_on_batches, model, loss, batches, symmetries)
        return self.once(verify, "verified", model, loss, symmetries, *batches)

    def proof(self, model: nn.Module, loss: Evaluate, batch: Any, symmetries: Symmetries) -> Proof:
        """Return what moving a sharded model along these symmetries does to the loss, as `prove_on_sharded` has it."""
        prove = partial(prove_on_sharded, model, loss, batch, symmetries)
        return self.once(prove, "proved", model, loss, batch, symmetries)

    def once(self, make: Callable[[], Result], what: str, *of: Any) -> Result:
        """Return what `make` made when it was first asked for by this name and of these objects."""
        place = (what, *map(id, of))
        if place not in self._kept:
            self._kept[place] = of, make()  # what is told by its address has to stay alive
        result: Result = self._kept[place][1]
        return result
