"""Compute Kendall's tau within strata of models, with bootstrap intervals over models drawn within strata."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import numpy as np

from studies.results.estimates import Estimate, Floats
from studies.zoos.ranking import masked_tau

RESAMPLES = 2000
Stratum = TypeVar("Stratum", bound=Hashable)


@final
@dataclass(frozen=True)
class Stratified:
    """Hold tau of all models, of those of each stratum, and the mean over strata, weighted by their pairs of models."""

    pooled: Estimate
    within: Mapping[Any, Estimate]
    mean: Estimate


def stratified_tau(x: Sequence[float | None], y: Sequence[float | None], strata: Sequence[Stratum]) -> Stratified:
    """Compute tau-b of x and y, with the same resamples of models for all that has the same strata.

    A model without a value in x or y does not count.
    """
    known = [place for place, pair in enumerate(zip(x, y, strict=True)) if None not in pair]
    a, b = (np.array([column[place] for place in known], dtype=np.float64) for column in (x, y))
    members = {each: np.array([strata[place] == each for place in known]) for each in sorted(set(strata))}  # type: ignore[type-var]
    once, drawn = np.ones((1, len(known))), np.zeros((RESAMPLES, len(known)))
    generator = np.random.default_rng(0)
    for where in members.values():
        size = int(where.sum())
        drawn[:, where] = generator.multinomial(size, np.full(size, 1 / size), size=RESAMPLES)

    def taus(counts: Floats) -> tuple[Floats, list[Floats], Floats]:
        everywhere = np.ones((len(known), len(known)), dtype=bool)
        each = [masked_tau(a, b, np.logical_and.outer(where, where), counts) for where in members.values()]
        pairs = [where.sum() * (where.sum() - 1) for where in members.values()]
        return masked_tau(a, b, everywhere, counts), each, np.average(each, axis=0, weights=pairs)

    (value, values, mean), (draws, each_draws, mean_draws) = taus(once), taus(drawn)
    within = [Estimate.of(float(one[0]), several) for one, several in zip(values, each_draws, strict=True)]
    return Stratified(
        Estimate.of(float(value[0]), draws),
        dict(zip(members, within, strict=True)),
        Estimate.of(float(mean[0]), mean_draws),
    )
