"""What a run ends with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from studies.training.reviews import Reviews


@final
@dataclass(frozen=True)
class Outcome:
    """Hold a run's cross-entropies (nats) on what choices are made by and on the test set, and the error there.

    All of them are None if the run left the finite numbers.
    """

    validation: float | None
    test: float | None
    error: float | None


def outcome_of(model: nn.Module, validation: Reviews, test: Reviews) -> Outcome:
    """Return the outcome of a model that reads reviews."""
    return outcome_of_logits(*((logits_of(model, part), part.labels) for part in (validation, test)))


@torch.no_grad()
def logits_of(model: nn.Module, reviews: Reviews) -> Tensor:
    """Return the logits of all reviews; the short ones are read first."""
    order = reviews.mask.sum(1).argsort()
    parts = [reviews.at(rows) for rows in order.split(64)]
    return torch.cat([model(part.hidden, part.mask) for part in parts])[order.argsort()]


def outcome_of_logits(validation: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Outcome:
    """Return the outcome of logits and classes."""
    losses = [float(nn.functional.cross_entropy(*part)) for part in (validation, test)]
    if not all(map(math.isfinite, losses)):
        return Outcome(None, None, None)
    logits, labels = test
    return Outcome(losses[0], losses[1], float((logits.argmax(1) != labels).double().mean()))
