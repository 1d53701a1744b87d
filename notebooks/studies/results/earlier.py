"""Two earlier zoos of transformers, and what their records say of their own designs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Final

import numpy as np

from quotient_manifolds.compare import Comparison
from quotient_manifolds.geometry import Quotient
from studies.markdown import table
from studies.results.estimates import Estimate
from studies.results.stratified import Stratified, stratified_tau
from studies.wording import signed
from studies.zoos.measures import METRICS, PLAIN, ZooMeasures

COMMIT: Final = "8aed00d"
"""The last commit with the code that made these zoos."""

FOLDER: Final = "earlier"
TITLES: Final = {"vit": "vision", "bert": "language"}  # by the folder of the record
LIMITS: Final = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4)  # of the training error
SWEPT: Final = ("adaptive", *METRICS)
GAP: Final = "error_gap"


def earlier(zoos: Mapping[str, Comparison]) -> str:
    """Return the section: what was wrong with each zoo that has a record, in numbers of that record."""
    if not zoos:
        return "not run"
    parts = [_lead(zoos)]
    if "vit" in zoos:
        parts += ["### Vision", _vision(zoos["vit"]), shift_table(zoos["vit"]), _moved_most(zoos["vit"])]
    if "bert" in zoos:
        parts += ["### Language", _language(zoos["bert"]), learned_table(zoos["bert"]), _sweep(zoos["bert"])]
    return "\n\n".join(parts)


def by_shift(zoo: Comparison) -> dict[tuple[str, float], Stratified]:
    """Compute tau with the gap in error by measure and radius, pooled and within strata of augmentation by shifts."""
    measures, shifts = ZooMeasures(zoo), zoo.column("shift")
    found = {}
    for name, geometry in PLAIN.items():
        for radius in measures.radii(geometry):
            if (label := measures.label(geometry, radius)) is not None:
                found[name, radius] = stratified_tau(zoo.column(label), zoo.column(GAP), shifts)
    return found


def by_limit(zoo: Comparison) -> dict[float, tuple[int, dict[str, Estimate]]]:
    """Compute, by the limit of the training error, how many models are left and tau at the middle radius."""
    measures = ZooMeasures(zoo)
    labels = {name: measures.label(PLAIN[name], measures.middle(name)) for name in SWEPT}
    columns = {
        name: list(zip(zoo.column(label), zoo.column(GAP), strict=True)) for name, label in labels.items() if label
    }
    errors, found = zoo.column("train_error"), {}
    for limit in LIMITS:
        kept = [place for place, error in enumerate(errors) if error is not None and error <= limit]
        found[limit] = len(kept), {name: _tau([each[place] for place in kept]) for name, each in columns.items()}
    return found


def _tau(pairs: Sequence[tuple[float | None, float | None]]) -> Estimate:
    values, gaps = zip(*pairs, strict=True)
    return stratified_tau(values, gaps, [0] * len(pairs)).pooled


def order_difference(zoo: Comparison, metric: str) -> float:
    """Compute how far first and second order are apart in value, relative to the second: the median over models."""
    measures = ZooMeasures(zoo)
    radius = measures.middle(metric)
    labels = [measures.label(Quotient(metric, order), radius) for order in ("first", "second")]
    first, second = (np.array(zoo.column(label or ""), dtype=np.float64) for label in labels)
    return float(np.nanmedian(np.abs(first / second - 1)))


def shift_table(zoo: Comparison) -> str:
    """Tabulate tau by measure and radius, pooled, within strata of augmentation, and their mean."""
    counts = {shift: zoo.column("shift").count(shift) for shift in (1.0, 0.0)}
    columns = ["Measure", "Radius", "Pooled", f"With shifts ({counts[1.0]})", f"Without ({counts[0.0]})"]
    rows = [
        [name, f"{radius:g}", str(tau.pooled), str(tau.within[1.0]), str(tau.within[0.0]), str(tau.mean)]
        for (name, radius), tau in by_shift(zoo).items()
    ]
    return table([*columns, "Mean over strata"], rows)


def learned_table(zoo: Comparison) -> str:
    """Tabulate tau by the limit of the training error."""
    measures = ZooMeasures(zoo)
    columns = [f"{name}, radius {measures.middle(name):g}" for name in SWEPT]
    rows = [
        [f"{limit:.2f}", str(count), *(str(taus[name]) for name in SWEPT)]
        for limit, (count, taus) in by_limit(zoo).items()
    ]
    return table(["Training error up to", "Models", *columns], rows)


def _lead(zoos: Mapping[str, Comparison]) -> str:
    records = " and ".join(
        f"[{TITLES[key]}](records/{FOLDER}/{key}/comparison.json.gz) (version {zoo.version})"
        for key, zoo in zoos.items()
    )
    orders = ", ".join(
        f"{100 * order_difference(zoo, metric):.2g} % ({metric}, {TITLES[key]})"
        for key, zoo in zoos.items()
        for metric in METRICS
    )
    return _paragraphs(
        "Two other zoos of transformers stood in for CLIP and MNLI before. Their designs do not bear what was read off "
        "them, so they are in no table above. All that follows is exploratory: flaws were looked for after the "
        "correlations were known. Intervals (95 %) are bootstraps over models, drawn within strata where there are "
        "some, and not corrected for their number. The code that made the zoos is in the history at commit "
        f"{COMMIT}; their records are kept: {records}.",
        "All quotient measures of these zoos are divided by pairs of attention and by needless biases alone "
        '(`symmetries="pairs"`), not by the whole fibre: they change where gains of norms, means or the residual '
        "stream are moved. The default measures are now divided by all symmetries that are found and proved.",
        "Whether curvature matters was asked by following geodesics of first and of second order. At the radii taken "
        f"the two values of a model differ by a median of {orders}. So these ablations could decide nothing.",
    )


def _vision(zoo: Comparison) -> str:
    pairs_of = list(zip(zoo.column(GAP), zoo.column("shift"), strict=True))
    gaps = {shift: [gap for gap, its in pairs_of if gap is not None and its == shift] for shift in (1.0, 0.0)}
    said = {shift: f"{min(values):.3f} to {max(values):.3f}" for shift, values in gaps.items()}
    apart = max(gaps[1.0]) < min(gaps[0.0])
    mixed, pairs = len(gaps[1.0]) * len(gaps[0.0]), len(zoo.rows) * (len(zoo.rows) - 1) // 2
    return _paragraphs(
        f"{len(zoo.rows)} vision transformers were fine-tuned on 256 of scikit-learn’s digits, {len(gaps[1.0])} of "
        f"them with random shifts of the images. With shifts the gap in error is {said[1.0]}, without them "
        f"{said[0.0]}: {'the two do not overlap' if apart else 'the two overlap'}, and no control held augmentation "
        f"fixed. In {mixed} of {pairs} pairs of models a pooled tau asks whether a measure tells which of the two was "
        "augmented. Kendall’s tau with the gap in error, pooled and within strata of augmentation:"
    )


def _moved_most(zoo: Comparison) -> str:
    taus = by_shift(zoo)
    name, radius = max(taus, key=lambda key: abs(taus[key].mean.value - taus[key].pooled.value))
    most = taus[name, radius]
    return _paragraphs(
        "The mean weighs strata by their pairs of models. It differs most from the pooled tau for "
        f"{name} at radius {radius:g}: {signed(most.pooled.value)} pooled, {signed(most.mean.value)} within strata."
    )


def _language(zoo: Comparison) -> str:
    worst = max(error for error in zoo.column("train_error") if isinstance(error, float))
    return _paragraphs(
        f"{len(zoo.rows)} BERTs of 22.7 million parameters were fine-tuned on 240 pairs of sentences made from "
        f"templates. Models with a training error of up to {worst:.2f} were kept, and the gap of one that "
        "learned little is small for that reason. Nouns and verbs of all test pairs were new, and half of those pairs "
        "were made from templates that no training pair had: this “gap” is not of one distribution. Normalised logits "
        "of two classes are always ±1/√2, so measures of them, which were taken, mean nothing and are not shown. "
        "Kendall’s tau with the gap in error, by the largest training error of the models that are kept:"
    )


def _sweep(zoo: Comparison) -> str:
    (count, first), (whole, last) = (by_limit(zoo)[limit] for limit in (0.1, LIMITS[-1]))
    changes = ", ".join(f"{name} {signed(first[name].value)} and {signed(last[name].value)}" for name in SWEPT)
    return _paragraphs(
        f"With the {count} models of an error up to 0.1 and with all {whole}, tau is: {changes}. The limit was "
        f"{LIMITS[-1]:g}, set when training errors, but no correlations, were known. Sharpness is that of 24 training "
        "pairs, by ascents of 10 steps."
    )


def _paragraphs(*texts: str) -> str:
    return "\n\n".join(fill(text, 118, break_on_hyphens=False, break_long_words=False) for text in texts)
