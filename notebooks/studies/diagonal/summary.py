"""Taus of diagonal networks setting by setting, their range over the settings, and the claims of the paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from studies.common import Estimate, Floats, signed
from studies.diagonal.networks import Setting
from studies.diagonal.records import MIDDLE, DiagonalStudy, Mean, family_name
from studies.diagonal.study import LARGE

RESAMPLES = 2000
WITHOUT_RADIUS = {
    "inv closed": "|beta (beta - nearest)|",
    "mix closed": "|beta - nearest|",
    "inv gradient": "inv gradient",
    "mix gradient": "mix gradient",
    "|beta|_1": "|beta|_1",
}
"""The paper's closed forms with the solution of least norm in the place of X'y, limits of small radii, and a norm."""

IN_TABLE_ONE = ("adaptive", "inv", "mix")


@final
@dataclass(frozen=True)
class Spread:
    """Hold the least and largest tau of all settings that count, and how many intervals lie below, around, above 0."""

    low: float
    high: float
    signs: tuple[int, int, int]

    def __str__(self) -> str:
        return f"{signed(self.low)} to {signed(self.high)} ({' · '.join(map(str, self.signs))})"

    @classmethod
    def of(cls, found: Sequence[Estimate]) -> Spread | None:
        if not found:
            return None
        values, signs = [each.value for each in found], [each.sign for each in found]
        return cls(min(values), max(values), (signs.count(-1), signs.count(0), signs.count(1)))


@final
class Grid:
    """Represent a grid of settings; in each, seeds with data and networks of their own are resampled.

    A measure is "adaptive", a metric with an order of geodesics, such as "mix exact", or one of `WITHOUT_RADIUS`.
    thorough: take taus at the middle radius by thorough ascents, where those were made.
    """

    def __init__(self, study: DiagonalStudy, *, thorough: bool = True) -> None:
        self.thorough = thorough
        self.study, self.settings = study, study.plan.settings
        self.middle = study.plan.middle

    @property
    def plain(self) -> Grid:
        """Return the same by plain ascents throughout, to compare what thorough ones did not measure."""
        return Grid(self.study, thorough=False)

    def tau(self, setting: Setting, name: str, radius: float | None = None) -> Estimate | None:
        """Return the mean over seeds with its interval, at the middle radius if no other is given."""
        return _estimate(self.by_seed(setting, name, radius))

    def taus(self, name: str) -> list[Estimate]:
        """Return the means of all settings that are defined."""
        return [tau for each in self.settings if (tau := self.tau(each, name)) is not None]

    def by_seed(self, setting: Setting, name: str, radius: float | None = None) -> list[float | None]:
        """Return tau of every seed; what was climbed thoroughly at that radius is by those ascents."""
        cells = self.study.of(setting)
        if name in WITHOUT_RADIUS:
            return [cell.references[WITHOUT_RADIUS[name]] for cell in cells]
        place = self.middle if radius is None else radius
        if self.thorough and name in MIDDLE and place == self.middle:
            return [cell.middle[name].tau for cell in cells]
        return [cell.taus[name][cell.radii.index(place)] for cell in cells]

    def estimate(self, setting: Setting, names: Sequence[str], statistic: Callable[..., Floats]) -> Estimate:
        """Return a function of the means of some taus; they are resampled with the same seeds."""
        rows = np.array([self.by_seed(setting, name) for name in names], dtype=np.float64)
        rows = rows[:, ~np.isnan(rows).any(axis=0)]
        drawn = np.random.default_rng(0).integers(rows.shape[1], size=(RESAMPLES, rows.shape[1]))
        draws = statistic(*rows[:, drawn].mean(axis=-1))
        return Estimate.of(float(statistic(*rows.mean(axis=1))), draws)

    def counting(self, name: str, radius: float) -> tuple[Setting, ...]:
        """Return the settings in which a measure counts as evidence: at most a tenth of its rise is truncation."""
        return tuple(each for each in self.settings if self.study.truncated_part(each, name, radius) <= LARGE)

    def spread(self, name: str, radius: float | None = None) -> Spread | None:
        """Return tau over the settings in which it counts; None if that is nowhere."""
        radius = self.middle if radius is None else radius
        found = [self.tau(each, name, radius) for each in self.counting(name, radius)]
        return Spread.of([tau for tau in found if tau is not None])

    def family(self, setting: Setting, t: float) -> Estimate | None:
        """Return tau in the metric t along exact geodesics."""
        if self.middle not in self.study.plan.family_radii:
            return None
        place = self.study.plan.family_radii.index(self.middle)
        return _estimate([cell.family[family_name(t, "exact")][place] for cell in self.study.of(setting)])

    def ordered(self, setting: Setting, how: str) -> bool:
        """Tell whether taus lie in the order of the paper's Table 1: mix below inv below adaptive below 0.

        how: "closed" for the closed forms, "exact" for sharpness along exact geodesics.
        """
        names = ("mix " + how, "inv " + how, "adaptive")
        values = [0.0 if tau is None else tau.value for tau in (self.tau(setting, name) for name in names)]
        return values[0] < values[1] < values[2] < 0


def _estimate(values: Sequence[float | None]) -> Estimate | None:
    mean = Mean.of(values)
    return None if mean is None else Estimate(mean.value, mean.low, mean.high)


# ---- the paper's claims

METRIC_NAMES = ("inv", "mix")
HOW = {"exact": "exact geodesics", "closed": "closed form"}  # without truncation
MARGIN = 0.1
"""The largest difference between the two metrics in the paper's Table 1 (MNLI), which it calls small (Sec. 7)."""
SHARPER = "sharper is better"
STRONGER = "stronger than adaptive"
SIGN = "same sign"
CHOICE = "metrics agree"


@final
@dataclass(frozen=True)
class Claim:
    """Hold a statement of the paper, the number it is about, and that number's estimates by setting.

    verdicts: by setting, 1 for the claim, -1 against it, 0 inconclusive.
    """

    words: str
    about: str
    rule: str
    found: tuple[float, ...]
    verdicts: tuple[int, ...]


def claims(grid: Grid) -> list[Claim]:
    """Hold every claim to the interval of each setting: for it where all of the interval agrees, against where none."""
    made = []

    def add(words: str, about: str, rule: str, found: Sequence[Estimate], verdicts: Sequence[int]) -> None:
        made.append(Claim(words, about, rule, tuple(each.value for each in found), tuple(verdicts)))

    pairs = [(metric, how) for how in HOW for metric in METRIC_NAMES]
    for name in ("adaptive", *(f"{metric} {how}" for metric, how in pairs)):
        taus = grid.taus(name)
        add(SHARPER, f"tau, {said(name)}", "below 0", taus, [-tau.sign for tau in taus])
    for metric, how in pairs:
        name = f"{metric} {how}"
        gaps = [grid.estimate(each, [name, "adaptive"], lambda a, b: np.abs(a) - np.abs(b)) for each in grid.settings]
        add(STRONGER, f"|tau|, {said(name)} minus adaptive", "above 0", gaps, [gap.sign for gap in gaps])
    given = grid.taus("adaptive")
    for metric, how in pairs:
        taus = grid.taus(f"{metric} {how}")
        signs = [tau.sign * first.sign for tau, first in zip(taus, given, strict=True)]
        add(SIGN, f"tau, {said(f'{metric} {how}')}", "the sign of adaptive", taus, signs)
    for how, words in HOW.items():
        names = [f"{metric} {how}" for metric in METRIC_NAMES]
        gaps = [grid.estimate(setting, names, np.subtract) for setting in grid.settings]
        add(CHOICE, f"tau, inv minus mix, {words}", f"within ±{MARGIN:g}", gaps, [_small(gap) for gap in gaps])
    return made


def _small(gap: Estimate) -> int:
    if gap.low is None or gap.high is None:
        return 0
    return int(gap.low > -MARGIN and gap.high < MARGIN) - int(gap.low > MARGIN or gap.high < -MARGIN)


def said(name: str) -> str:
    """Return a measure in words."""
    metric, *rest = name.split()
    if metric not in METRIC_NAMES:
        return name
    order = {"first": "first order", "second": "second order", "gradient": "gradient norm", **HOW}
    return f"{metric}, {order.get(' '.join(rest), ' '.join(rest))}"
