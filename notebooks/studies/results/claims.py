"""What the paper says of its results, in our words, and what our intervals say of that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import final

import numpy as np

from studies.results.estimates import RULES, Estimate, Verdict
from studies.results.settings import DiagonalZoo

METRICS = ("inv", "mix")
HOW = {"exact": "exact geodesics", "closed": "closed form"}  # sharpness of diagonal networks; no truncation in either


@final
@dataclass(frozen=True)
class Claim:
    """Hold a statement of the paper, the number it is about (whose interval decides), and the rule it is held to.

    given: the number that must be apart from 0 for the statement to say anything; None if it says so of itself.
    """

    place: str
    words: str
    about: str
    rule: str
    found: Estimate | None
    given: Estimate | None = None

    @property
    def verdict(self) -> Verdict:
        if self.given is not None and self.given.sign == 0:
            return "not decided at this n"
        return RULES[self.rule].verdict(self.found)


def setting_claims(zoo: DiagonalZoo | None) -> tuple[tuple[Claim, ...], ...]:
    """Return those on diagonal networks: of each number one claim a setting, none if the study was not run."""
    return () if zoo is None else (*_below(zoo), *_stronger_there(zoo), *_same_sign_there(zoo), *_metrics_there(zoo))


def _below(zoo: DiagonalZoo) -> Iterator[tuple[Claim, ...]]:
    words = "Sharper diagonal networks do better on new data, by adaptive sharpness and in both metrics."
    for name in ("adaptive", *(f"{metric} {how}" for how in HOW for metric in METRICS)):
        yield tuple(
            Claim("Sec. 6.1, 7", words, f"tau, {said(name)}", "below", zoo.tau(setting, name))
            for setting in zoo.settings
        )


def _stronger_there(zoo: DiagonalZoo) -> Iterator[tuple[Claim, ...]]:
    words = "Geodesic sharpness correlates more strongly than adaptive sharpness."
    for how, metric in product(HOW, METRICS):
        name = f"{metric} {how}"
        found = [zoo.estimate(each, [name, "adaptive"], lambda a, b: np.abs(a) - np.abs(b)) for each in zoo.settings]
        yield tuple(Claim("Sec. 6, 7", words, f"|tau|, {said(name)} minus adaptive", "above", each) for each in found)


def _same_sign_there(zoo: DiagonalZoo) -> Iterator[tuple[Claim, ...]]:
    words = "Where adaptive sharpness correlates, geodesic sharpness does so with the same sign."
    for how, metric in product(HOW, METRICS):
        name, group = f"{metric} {how}", []
        for setting in zoo.settings:
            given = zoo.tau(setting, "adaptive")
            rule = "below" if given is not None and given.value < 0 else "above"
            group.append(Claim("Sec. 7", words, f"tau, {said(name)}", rule, zoo.tau(setting, name), given))
        yield tuple(group)


def _metrics_there(zoo: DiagonalZoo) -> Iterator[tuple[Claim, ...]]:
    words = "The choice of metric matters little, as long as it has the symmetry."
    for how, kind in HOW.items():
        names = [f"{metric} {how}" for metric in METRICS]
        found = [zoo.estimate(setting, names, np.subtract) for setting in zoo.settings]
        yield tuple(Claim("Sec. 7", words, f"tau, inv minus mix, {kind}", "small", each) for each in found)


def said(name: str) -> str:
    """Return a measure in words."""
    metric, *rest = name.split()
    if metric not in METRICS or "eps" in rest:
        return name
    order = {"first": "first order", "second": "second order", "": "second order", "gradient": "gradient norm", **HOW}
    return f"{metric}, {order.get(' '.join(rest), ' '.join(rest))}"
