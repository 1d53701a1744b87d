"""What the paper says of its results, in our words, and what our intervals say of that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import final

import numpy as np

from studies.results.estimates import RULES, Estimate, Floats, Verdict
from studies.results.records import Records
from studies.results.settings import DiagonalZoo
from studies.results.zoos import ModelZoo

ZOOS = {"vit": "vision transformers", "bert": "BERTs"}
TRANSFORMERS = ("vit", "bert")
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


def claims(records: Records) -> tuple[Claim, ...]:
    """Return those on transformers, in the order of the paper."""
    zoos = records.zoos
    return (
        *_transformers(zoos),
        *_stronger(zoos),
        *_metrics(zoos),
        *_signs(zoos),
        *_parts(zoos),
        *_relaxation(zoos),
    )


def setting_claims(zoo: DiagonalZoo | None) -> tuple[tuple[Claim, ...], ...]:
    """Return those on diagonal networks: of each number one claim a setting, none if the study was not run."""
    return () if zoo is None else (*_below(zoo), *_stronger_there(zoo), *_same_sign_there(zoo), *_metrics_there(zoo))


def _tau(zoo: ModelZoo | None, name: str) -> Estimate | None:
    return None if zoo is None else zoo.tau(name)


def _estimate(zoo: ModelZoo | None, first: str, second: str) -> Estimate | None:
    """Compute |tau| of the first minus |tau| of the second."""
    return None if zoo is None else zoo.estimate([first, second], lambda a, b: np.abs(a) - np.abs(b))


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


def _transformers(zoos: dict[str, ModelZoo | None]) -> Iterator[Claim]:
    words = "Geodesic sharpness correlates with the gap of transformers, in both metrics."
    for key in TRANSFORMERS:
        for name in METRICS:
            yield Claim("Sec. 6.2, 7", words, f"tau, {ZOOS[key]}, {name}", "apart", _tau(zoos[key], name))
    signs = {
        "vit": ("Sec. 6.2.1", "Geodesically sharper vision transformers generalise better.", "below"),
        "bert": ("Sec. 6.2.2", "Geodesically flatter BERTs generalise better.", "above"),
    }
    for key, (place, words, rule) in signs.items():
        for name in METRICS:
            yield Claim(place, words, f"tau, {ZOOS[key]}, {name}", rule, _tau(zoos[key], name))
    words = "Adaptive sharpness finds no correlation on BERTs."
    yield Claim("Sec. 6.2.2", words, "tau, BERTs, adaptive", "small", _tau(zoos["bert"], "adaptive"))


def _stronger(zoos: dict[str, ModelZoo | None]) -> Iterator[Claim]:
    words = "Geodesic sharpness correlates more strongly than adaptive sharpness."
    for key, zoo in zoos.items():
        for name in METRICS:
            found = _estimate(zoo, name, "adaptive")
            yield Claim("Sec. 6, 7", words, f"|tau|, {ZOOS[key]}: {name} minus adaptive", "above", found)
    words = "Where adaptive sharpness correlates, geodesic sharpness does so with the same sign."
    for key, zoo in zoos.items():
        given = _tau(zoo, "adaptive")
        rule = "below" if given is not None and given.value < 0 else "above"
        for name in METRICS:
            yield Claim("Sec. 7", words, f"tau, {ZOOS[key]}, {name}", rule, _tau(zoo, name), given)


def _metrics(zoos: dict[str, ModelZoo | None]) -> Iterator[Claim]:
    words = "The choice of metric matters little, as long as it has the symmetry."
    for key, zoo in zoos.items():
        found = None if zoo is None else zoo.estimate(METRICS, np.subtract)
        yield Claim("Sec. 7", words, f"tau, {ZOOS[key]}: inv minus mix", "small", found)


def _signs(zoos: dict[str, ModelZoo | None]) -> Iterator[Claim]:
    words = "The sign of the correlation differs from task to task."
    for name in METRICS:
        there = [zoo for zoo in zoos.values() if zoo is not None and zoo.tau(name) is not None]
        found = None
        if len(there) > 1:
            values, draws = zip(*(zoo.draws([name]) for zoo in there), strict=True)
            found = Estimate.of(float(_opposed(np.array(values))[0]), _opposed(np.array(draws)[:, 0]))
        yield Claim("Sec. 7", words, f"tau, {name}: least zoo times largest zoo", "below", found)


def _parts(zoos: dict[str, ModelZoo | None]) -> Iterator[Claim]:
    """Yield claims on parts of a measure: its curvature and its norm [paper, App. G]."""
    words = "What the metric’s norm adds is more than what its curvature adds."
    for key, name in product(TRANSFORMERS, METRICS):
        found = _estimate(zoos[key], f"{name} first", f"{name} adaptive norm")
        about = f"|tau|, {ZOOS[key]}, {name}: without curvature minus without norm"
        yield Claim("App. G", words, about, "above", found)
    sentences = {
        "inv": ("small", "Without curvature inv loses little."),
        "mix": ("large", "Without it mix loses much."),
    }
    for (name, (rule, words)), key in product(sentences.items(), TRANSFORMERS):
        found = _estimate(zoos[key], name, f"{name} first")
        yield Claim("App. G", words, f"|tau|, {ZOOS[key]}, {name}: whole minus without curvature", rule, found)


def _relaxation(zoos: dict[str, ModelZoo | None]) -> Iterator[Claim]:
    words = "The relaxation of the metric hardly changes the correlation."
    for key in TRANSFORMERS:
        zoo = zoos[key]
        found = zoo.estimate(["inv", *zoo.relaxed], _farthest) if zoo is not None and zoo.relaxed else None
        yield Claim("App. H.2", words, f"tau, {ZOOS[key]}: largest change over all eps", "small", found)


def said(name: str) -> str:
    """Return a measure in words."""
    metric, *rest = name.split()
    if metric not in METRICS or "eps" in rest:
        return name
    order = {"first": "first order", "second": "second order", "": "second order", "gradient": "gradient norm", **HOW}
    return f"{metric}, {order.get(' '.join(rest), ' '.join(rest))}"


def _opposed(taus: Floats) -> Floats:
    """Compute (zoos, ...) -> (...): negative where two of them have opposite signs."""
    return taus.min(axis=0) * taus.max(axis=0)


def _farthest(whole: Floats, *others: Floats) -> Floats:
    return np.max([np.abs(other - whole) for other in others], axis=0)
