"""Rank the models of a zoo: Kendall's tau over some pairs only, and the tables of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from quotient_manifolds.compare import Comparison
from studies.common import Estimate, Floats
from studies.zoos.zoo import MORE, Zoo

# ---- taus over pairs

RESAMPLES = 1000
GAP: Final = "error_gap"
Pairs = NDArray[np.bool_]  # (models, models), symmetric: which of them are compared


@final
@dataclass(frozen=True)
class Design:
    """Rank the models of a factorial design by measures.

    frame: a row for each model, with factors, measures and gaps in columns, NaN where a value is missing. factors: the
    columns that make up the design; along: those that the granulated coefficient is the mean over; cells: those that
    define the task. Within a cell, models differ only in how they were trained.

    Intervals are bootstraps: models are drawn with replacement, the same for all taus of a design. A model that is
    drawn twice is no pair with itself.
    """

    frame: pd.DataFrame
    factors: tuple[str, ...]
    along: tuple[str, ...]
    cells: tuple[str, ...]
    _known: dict[tuple[str, str, bytes], tuple[Floats, Floats]] = field(default_factory=dict, init=False, repr=False)

    def same(self, *factors: str) -> Pairs:
        """Return the pairs that have these factors in common: those of one stratum, all if there are no factors."""
        columns = [self.frame[factor].to_numpy() for factor in factors]
        everywhere = np.ones((len(self.frame), len(self.frame)), dtype=bool)
        return np.logical_and.reduce([everywhere, *(column[:, None] == column for column in columns)])

    @property
    def within(self) -> Pairs:
        """Return the pairs of models of one task."""
        return self.same(*self.cells)

    def apart(self, factor: str) -> Pairs:
        """Return the pairs that differ in this factor and agree in all others (Jiang et al., 2020)."""
        return ~self.same(factor) & self.same(*(other for other in self.factors if other != factor))

    def where(self, factor: str, value: Any) -> Pairs:
        """Return the pairs of models that both have this value."""
        here = self.frame[factor].to_numpy() == value
        return np.logical_and.outer(here, here)

    def tau(self, measure: str, pairs: Pairs, gap: str = GAP) -> Estimate | None:
        """Return tau over these pairs; None where it is not defined."""
        return _estimate(*self._drawn(measure, pairs, gap))

    def psi(self, measure: str) -> Estimate | None:
        """Return the mean over factors of tau along each: the granulated coefficient of Jiang et al. (2020)."""
        return _estimate(*self._granulated(measure))

    def psi_difference(self, first: str, second: str) -> Estimate | None:
        """Return |Psi| of the first minus |Psi| of the second."""
        pairs = zip(self._granulated(first), self._granulated(second), strict=True)
        return _estimate(*(np.abs(one) - np.abs(other) for one, other in pairs))

    def tau_difference(self, first: str, second: str, pairs: Pairs, absolute: bool = True) -> Estimate | None:
        """Return |tau| of the first minus |tau| of the second over some pairs, or the difference with their signs."""
        taus = zip(self._drawn(first, pairs, GAP), self._drawn(second, pairs, GAP), strict=True)
        return _estimate(*(np.abs(one) - np.abs(other) if absolute else one - other for one, other in taus))

    def _granulated(self, measure: str) -> tuple[Floats, Floats]:
        taus = zip(*(self._drawn(measure, self.apart(factor), GAP) for factor in self.along), strict=True)
        value, draws = (np.mean(each, axis=0) for each in taus)
        return value, draws

    def _drawn(self, measure: str, pairs: Pairs, gap: str) -> tuple[Floats, Floats]:
        """Return a tau, (1,), and its value for every resample, (RESAMPLES,); computed once, asked for often."""
        key = (measure, gap, pairs.tobytes())
        if key not in self._known:
            x, y = (self.frame[name].to_numpy(dtype=np.float64) for name in (measure, gap))
            once, draws = (masked_tau(x, y, pairs, counts) for counts in (np.ones((1, len(x))), self._counts))
            self._known[key] = once, draws
        return self._known[key]

    @cached_property
    def _counts(self) -> Floats:
        models = len(self.frame)
        draws = np.random.default_rng(0).multinomial(models, np.full(models, 1 / models), size=RESAMPLES)
        return draws.astype(np.float64)


def _estimate(value: Floats, draws: Floats) -> Estimate | None:
    return None if np.isnan(value[0]) else Estimate.of(float(value[0]), draws)


def masked_tau(x: Floats, y: Floats, pairs: Pairs, counts: Floats) -> Floats:
    """Compute tau-b over some pairs of models, where model i counts c_i times; counts (..., n) -> (...).

    sum c_i c_j m_ij a_ij b_ij / sqrt(sum c_i c_j m_ij a_ij^2 sum c_i c_j m_ij b_ij^2), a_ij = sign(x_i - x_j), b of y,
    m_ij whether the pair counts. NaN where nothing is left; models without a value (NaN) do not count.
    """
    known = ~(np.isnan(x) | np.isnan(y))
    a, b = (np.sign(values[known][:, None] - values[known]) for values in (x, y))
    kept, mask = counts[..., known], pairs[np.ix_(known, known)]
    both, left, right = (((kept @ (mask * signs)) * kept).sum(axis=-1) for signs in (a * b, a * a, b * b))
    norm = np.sqrt(left * right)
    return np.where(norm > 0, both / np.where(norm > 0, norm, 1), np.nan)


# ---- tables

MAIN: Final = ("euclidean", "adaptive", "inv", "mix")
WORST: Final = (
    *("euclidean", "adaptive", "adaptive, linf", "adaptive, released ascent", "adaptive, released ascent, linf"),
    *("inv", "mix", "inv, pairs with biases as rows", "mix, pairs with biases as rows"),
)
"""Worst-case sharpness at three radii."""
PARTS: Final = {
    "inv": ("inv, first order", "inv, exact geodesics", "inv, eps 0.1", "inv, adaptive norm"),
    "mix": ("mix, first order", "mix, exact geodesics", "mix, adaptive norm"),
}
"""By metric, what is measured with one part changed, on the models of the first seed."""
COMPETITORS: Final = {
    "norm of the weights": "weight_norm",
    "training loss": "train_loss",
    "margin": "margin",
    "steps of training": "steps",
}
"""What is known of models without measuring sharpness, and its column."""
INCREASE: Final = "Median increase (nats)"


def words(measure: pd.Series) -> str:
    """Return what a measure is, without its radius: its geometry first, and only what is not as usual."""
    settings = {name.removeprefix("geometry."): value for name, value in measure.dropna().items()}
    short = {"worst-case sharpness": "", "legacy worst-case sharpness": "released ascent"}
    kind, what = settings["kind"], short.get(measure["measure"], measure["measure"])
    if what == "relative flatness":
        return what
    if kind != "quotient":
        return ", ".join(filter(None, (kind, what, "linf" if settings.get("norm") == "linf" else "")))
    parts = {"paper": "pairs with biases as rows", "pairs": "pairs alone"}.get(settings["symmetries"], "")
    order = {"first": "first order", "exact": "exact geodesics"}.get(settings["geodesic"], "")
    norm = "adaptive norm" if settings.get("norm") == "adaptive" else ""
    eps = f"eps {settings['eps']:g}" if settings["eps"] else ""
    return ", ".join(filter(None, (settings["metric"], what, parts, order, norm, eps)))


@final
@dataclass(frozen=True)
class Ranked:
    """Hold a zoo's models and its design, see `Design`."""

    comparison: Comparison
    factors: tuple[str, ...]
    along: tuple[str, ...]
    cells: tuple[str, ...]

    @cached_property
    def labels(self) -> dict[str, dict[float, str]]:
        """Return by words, and radius in ascending order, the label of a measure; no radius: 0."""
        found: dict[str, dict[float, str]] = {}
        measures = self.comparison.measures.sort_values("radius", kind="stable", na_position="first")
        for label, each in measures.iterrows():
            found.setdefault(words(each), {})[float(np.nan_to_num(each["radius"]))] = str(label)
        return found

    @cached_property
    def measures(self) -> dict[str, str]:
        """Return by words the columns that rank models: measures at the middle of three radii, and scores."""
        parts = {part for parts in PARTS.values() for part in parts}
        found = {name: list(radii.values())[:3] for name, radii in self.labels.items() if name not in parts}
        middle = {name: labels[len(labels) // 2] for name, labels in found.items()}
        scores = self.comparison.scores
        middle |= {
            name: column for name, column in COMPETITORS.items() if column in scores and scores[column].nunique() > 1
        }
        return {name: middle[name] for name in (*WORST, *middle) if name in middle}

    @property
    def shown(self) -> list[str]:
        """Return the measures that pages show: worst cases, and what costs nothing."""
        return [name for name in self.measures if name in WORST or name in COMPETITORS]

    @cached_property
    def design(self) -> Design:
        """Return the design, whose frame has a column for each label and one for each name in `measures`."""
        frame = self.comparison.frame()
        named = pd.DataFrame({name: frame[label] for name, label in self.measures.items() if name not in frame})
        return Design(frame.join(named), self.factors, self.along, self.cells)

    def flagged(self, label: str) -> list[str]:
        """Return the shares of values beyond reach, and of those whose ascent had not converged."""
        values = self.comparison.values.query("label == @label")
        shares = values["beyond_reach"].mean(), values["not_converged"].mean()
        return [f"{100 * share:.0f}\N{NO-BREAK SPACE}%" for share in shares]


def tau_table(zoo: Ranked, columns: Mapping[str, tuple[Pairs, str]], names: Iterable[str]) -> pd.DataFrame:
    """Return tau of measures, a column for each set of pairs and gap."""
    return pd.DataFrame(
        {"Measure": name} | {head: zoo.design.tau(name, *column) for head, column in columns.items()} for name in names
    )


def ranking_table(zoo: Ranked, names: Iterable[str]) -> pd.DataFrame:
    """Return tau of measures at their middle radii: pooled, within cells, granulated."""
    design = zoo.design
    return pd.DataFrame(
        {
            "Measure": name,
            "Pooled": design.tau(name, design.same()),
            "Within cells": design.tau(name, design.within),
            "Granulated": design.psi(name),
            "Within cells, gap in loss": design.tau(name, design.within, "loss_gap"),
        }
        for name in names
    )


def radius_table(zoo: Ranked) -> pd.DataFrame:
    """Return tau by radius, the median increase in loss, and the shares of values that are in doubt."""
    design, rows = zoo.design, []
    for name in MAIN:
        for radius, label in list(zoo.labels[name].items())[:3]:
            row: dict[str, Any] = {"Measure": name, "Radius": f"{radius:g}"}
            row |= {INCREASE: f"{design.frame[label].median():.4g}", "tau": design.tau(label, design.within)}
            rows.append(row | dict(zip(("Beyond reach", "Still increasing"), zoo.flagged(label), strict=True)))
    return pd.DataFrame(rows)


def parts_table(zoo: Ranked) -> pd.DataFrame:
    """Return what the order of geodesics, the relaxation and the norm change in value and in tau within cells.

    Parts that the zoo does not have are left out; those of Appendix G are measured by a command of their own.
    """
    design, rows = zoo.design, []
    for metric, parts in PARTS.items():
        at = {name: next(iter(zoo.labels[name].items())) for name in parts if name in zoo.labels}
        radius = at[parts[0]][0]
        for name, (own, label) in {metric: (radius, zoo.labels[metric][radius]), **at}.items():
            found = design.frame[label]
            known = found.notna().to_numpy()
            pairs = design.within & np.logical_and.outer(known, known)
            row: dict[str, Any] = {"Measure": name, "Radius": f"{own:g}", INCREASE: f"{found.median():.4g}"}
            row |= {"Difference": "", "Beyond reach": zoo.flagged(label)[0], "tau": design.tau(label, pairs)}
            row["Difference of tau"] = ""
            if name != metric and (same := zoo.labels[metric].get(own)) and "norm" not in name:
                row["Difference"] = f"{100 * (found / design.frame[same] - 1).abs().median():.2g} %"
                row["Difference of tau"] = design.tau_difference(label, same, pairs, absolute=False)
            rows.append(row)
    return pd.DataFrame(rows)


def convergence_table(found: Zoo) -> pd.DataFrame:
    """Return what the zoo's ascents found over what longer ones found: the median over models, and the least."""
    rows = []
    for label, chosen in pd.DataFrame(found.record["climbs"]).groupby("measure", sort=False):
        measure = found.comparison.measures.loc[label]
        shares = chosen["value"].to_numpy()[:, None] / np.array([*chosen["more"]])
        cells = [f"{np.median(column):.3f} ({column.min():.3f})" for column in shares.T]
        longer = {f"over {times}": cell for times, cell in zip(MORE, cells, strict=True)}
        rows.append({"Measure": words(measure), "Radius": f"{measure['radius']:g}", **longer})
    return pd.DataFrame(rows)
