"""Describe a comparison by Python objects: checkpoints, data, measures, scores."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, final

from torch import nn

from quotient_manifolds.compare.measure_entries import MeasureEntry
from quotient_manifolds.compare.scores import Scores, check_named, measured_scores
from quotient_manifolds.load import Checkpoint, call_object, load_object
from quotient_manifolds.load.language import CAUSAL
from quotient_manifolds.sharpness import Loss, cross_entropy, next_token_cross_entropy, normalised_logits

DTYPES = ("float32", "float64")

# One object each, so that what was found for it is known again.
_LOSSES: dict[bool, Loss] = {False: cross_entropy, True: next_token_cross_entropy}
_NORMALISED = {causal: normalised_logits(loss) for causal, loss in _LOSSES.items()}


class Data(Protocol):
    """Give the batches that models are measured on; `DataSource` and `BatchFunction` do."""

    @property
    def task(self) -> str | None:
        """Return what models of text predict, see `DataSource`."""

    def batches(self, model: nn.Module, checkpoint: Checkpoint | None = None) -> Sequence[Any]:
        """Return the batches of a model."""

    def fingerprint(self) -> str:
        """Return what changes with the batches, found without making them."""


@final
@dataclass(frozen=True)
class BatchFunction:
    """Take the batches that a function package.module:function of no arguments returns, for models of any kind."""

    reference: str
    task: str | None = None

    def batches(self, model: nn.Module, checkpoint: Checkpoint | None = None) -> list[Any]:
        """Call the function. Raises ValueError where it raises, or returns no batches."""
        found = list(call_object(self.reference, "a function that returns batches"))
        if not found:
            raise ValueError(f"{self.reference} must return at least one batch. Found none")
        return found

    def fingerprint(self) -> str:
        """Return what no other call returns: nobody knows what a function reads, so it is called in every run."""
        return uuid.uuid4().hex


@final
@dataclass(frozen=True)
class Spec:
    """Describe a comparison: made here from Python objects, or by `read_spec` from a file.

    checkpoints: as `find_checkpoints` returns them, or one `Checkpoint`. data: what measures are computed on, a
    `DataSource` or a `BatchFunction`. measures: such as `MeasureEntry(WorstCase(Quotient("inv"), 0.1))`. test: what
    the gaps are taken to. scores: by name of checkpoint, numbers or text by name of score. against: scores the measures
    are correlated with; if none is named, the gaps, or without test data every number that varies. given:
    hyperparameters held fixed in partial correlations. loss: package.module:function, a function loss(model, batch);
    None: cross-entropy, of the next token for a causal language model. dtype: "float32" or "float64". name: what the
    report calls it; path: the file that it was read from.

    Raises ValueError or TypeError for names that are given twice or not known, and settings that mean nothing.
    """

    checkpoints: Sequence[Checkpoint]
    data: Data
    measures: Sequence[MeasureEntry]
    test: Data | None = None
    scores: Mapping[str, Scores] = field(default_factory=dict)
    against: Sequence[str] = ()
    given: Sequence[str] = ()
    loss: str | None = None
    dtype: str = "float32"
    name: str = "comparison"
    path: Path | None = None

    def __post_init__(self) -> None:
        for each in self.measures:
            if not isinstance(each, MeasureEntry):
                raise TypeError(f"measures must be MeasureEntry(...). Found {each!r}")
        for name in ("checkpoints", "measures", "against", "given"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for what, names in (("measures", self.labels), ("checkpoints", [each.name for each in self.checkpoints])):
            if not names:
                raise ValueError(f"{what} must not be empty")
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise ValueError(f"{what} must have names of their own. Found {twice} twice")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}. Found {self.dtype!r}")
        if self.test is not None and self.test.task != self.data.task:
            raise ValueError(f"data and test must have one task. Found {self.data.task} and {self.test.task}")
        for key, wanted in (("against", self.against), ("given", self.given)):
            for name in wanted:
                check_named(key, name, self.known_scores, self.scores, number=key == "against")

    @property
    def labels(self) -> list[str]:
        """Return how tables call the measures."""
        return [each.label for each in self.measures]

    @property
    def known_scores(self) -> tuple[str, ...]:
        """Return the names of the scores that are measured, and of those that are listed."""
        listed = dict.fromkeys(name for row in self.scores.values() for name in row)
        return (*measured_scores(test=self.test is not None, error=self.loss is None), *listed)

    @property
    def folders(self) -> tuple[str, ...]:
        """Return where functions of the user's are imported from, besides where Python looks."""
        return (os.getcwd(),) if self.path is None else (os.getcwd(), str(self.path.resolve().parent))

    @property
    def calls_functions(self) -> bool:
        """Return whether a function of the user's decides what a number is: nobody knows what it reads."""
        return self.loss is not None or any(":" in each.loader for each in self.checkpoints)

    def loss_of(self, entry: MeasureEntry | None) -> Callable[[nn.Module, Any], Any]:
        """Return the loss that a measure is computed on; that of the scores for None."""
        normalised = entry is not None and entry.normalise_logits
        if self.loss is None:
            return (_NORMALISED if normalised else _LOSSES)[self.data.task == CAUSAL]
        own: Loss = load_object(self.loss, "a function loss(model, batch) that returns a scalar")
        return normalised_logits(own) if normalised else own
