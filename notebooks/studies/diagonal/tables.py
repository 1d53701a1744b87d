"""Taus of diagonal networks setting by setting, their range over the settings, and the claims of the paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import pandas as pd
from scipy import stats

from studies.common import Estimate, Floats, Record, Tables, signed
from studies.diagonal.networks import Setting
from studies.diagonal.study import LARGE, MIDDLE

RESAMPLES = 2000
WITHOUT_RADIUS = {
    "inv closed": "|beta (beta - nearest)|",
    "mix closed": "|beta - nearest|",
    "inv gradient": "inv gradient",
    "mix gradient": "mix gradient",
    "|beta|_1": "|beta|_1",
}
"""The paper's closed forms with the solution of least norm in the place of X'y, limits of small radii, and a norm."""

QUANTITIES = ("taus", "rises", "far", "truncation", "truncated", "agreement")  # a value for each radius of a cell

LABELS = {
    "adaptive": "adaptive",
    "inv first": "inv, first order",
    "inv second": "inv, second order",
    "inv exact": "inv, exact",
    "mix first": "mix, first order",
    "mix second": "mix, second order",
    "mix exact": "mix, exact",
    "mix endless": "mix, as if no geodesic ended",
}
ORDERS = tuple(LABELS)[:-1]
SHOWN = (
    *("adaptive", "inv exact", "mix exact", "inv closed", "mix closed", "inv gradient", "mix gradient"),
    "|beta|_1",
)
WHERE = ("Points", "Scales", "Rates")


@final
class Study:
    """Represent a record: what was measured in a grid of settings, in each of which seeds are resampled.

    A measure is "adaptive", a metric with an order of geodesics, such as "mix exact", or one of `WITHOUT_RADIUS`.
    thorough: take taus at the middle radius by thorough ascents, where those were made.
    """

    def __init__(self, record: Record, *, thorough: bool = True) -> None:
        self.record, self.plan, self.thorough = record, record["plan"], thorough
        self.settings = tuple(map(setting_of, self.plan["settings"]))
        self.profiled = self.settings[: self.plan["profiled"]]  # their cells have all radii of the profile
        self.radii = self.plan["radii"]
        self.middle: float = self.radii[len(self.radii) // 2]
        self._values: dict[tuple[str, str, float], Floats] = {}
        for cell in record["cells"]:
            place = self.settings.index(setting_of(cell["setting"])), cell["seed"]
            for key, value in self._entries(cell):
                rows = self._values.setdefault(key, np.full((len(self.settings), self.plan["seeds"]), np.nan))
                rows[place] = np.nan if value is None else value

    def _entries(self, cell: Record) -> Iterator[tuple[tuple[str, str, float], Any]]:
        radii: Record = {**dict.fromkeys(QUANTITIES, cell["radii"]), "family": self.plan["family_radii"]}
        for quantity, where in radii.items():
            for name, row in cell[quantity].items():
                yield from (((quantity, name, radius), value) for radius, value in zip(where, row, strict=True))
        yield from ((("references", name, 0.0), value) for name, value in cell["references"].items())
        for name, check in cell["middle"].items():
            yield ("middle", name, self.middle), check["tau"]
            yield from (((f"middle {end}", name, self.middle), check["found"][end]) for end in (0, 1))
        for name, checks in cell["checks"].items():
            yield from (
                (("checks", name, radius), each["tau"]) for radius, each in zip(self.radii, checks, strict=True)
            )

    @property
    def plain(self) -> Study:
        """Return the same by plain ascents throughout, to compare what thorough ones did not measure."""
        return Study(self.record, thorough=False)

    def values(self, quantity: str, name: str, radius: float) -> Floats:
        """Return a quantity ("taus", "far", ...), (settings, seeds); NaN where it is undefined or was not measured."""
        return self._values[quantity, name, radius]

    def column(self, quantity: str, name: str, radius: float, settings: Sequence[Setting] | None = None) -> Floats:
        """Return the defined values of a quantity in all cells of the settings given."""
        chosen = [self.settings.index(each) for each in settings or self.settings]
        found = self.values(quantity, name, radius)[chosen].ravel()
        return found[~np.isnan(found)]

    def by_seed(self, name: str, radius: float | None = None) -> Floats:
        """Return tau of every setting and seed, at the middle radius if no other is given."""
        if name in WITHOUT_RADIUS:
            return self.values("references", WITHOUT_RADIUS[name], 0.0)
        place = self.middle if radius is None else radius
        thorough = self.thorough and name in MIDDLE and place == self.middle
        return self.values("middle" if thorough else "taus", name, place)

    def tau(self, setting: Setting, name: str, radius: float | None = None) -> Estimate | None:
        """Return the mean over seeds with its interval, at the middle radius if no other is given."""
        return mean_of(self.by_seed(name, radius)[self.settings.index(setting)])

    def taus(self, name: str) -> list[Estimate]:
        """Return the means of all settings that are defined."""
        return [tau for each in self.settings if (tau := self.tau(each, name)) is not None]

    def estimate(self, setting: Setting, names: Sequence[str], statistic: Callable[..., Floats]) -> Estimate:
        """Return a function of the means of some taus; they are resampled with the same seeds."""
        rows = np.array([self.by_seed(name)[self.settings.index(setting)] for name in names])
        rows = rows[:, ~np.isnan(rows).any(axis=0)]
        drawn = np.random.default_rng(0).integers(rows.shape[1], size=(RESAMPLES, rows.shape[1]))
        draws = statistic(*rows[:, drawn].mean(axis=-1))
        return Estimate.of(float(statistic(*rows.mean(axis=1))), draws)

    def counting(self, name: str, radius: float) -> tuple[Setting, ...]:
        """Return the settings in which a measure counts as evidence: at most a tenth of its rise is truncation error.

        The median over seeds; the error of second order stands for the first.
        """
        metric, _, order = name.partition(" ")
        if order not in ("first", "second"):
            return self.settings
        errors = np.nanmedian(self.values("truncation", metric, radius), axis=1)
        return tuple(each for each, error in zip(self.settings, errors, strict=True) if error <= LARGE)

    def spread(self, name: str, radius: float | None = None) -> str:
        """Return the range of tau over the settings in which it counts, and the signs of the intervals."""
        radius = self.middle if radius is None else radius
        counting = self.counting(name, radius)
        found = [tau for each in counting if (tau := self.tau(each, name, radius)) is not None]
        if not found:
            return "truncation error in all settings"
        values, signs = [each.value for each in found], [each.sign for each in found]
        counts = " · ".join(str(signs.count(sign)) for sign in (-1, 0, 1))
        left_out = len(self.settings) - len(counting)
        more = f"<br>truncation error in {left_out} settings" if left_out else ""
        return f"{signed(min(values))} to {signed(max(values))} ({counts}){more}"

    def ordered(self, setting: Setting, how: str) -> bool:
        """Tell whether taus lie in the order of the paper's Table 1: mix below inv below adaptive below 0.

        how: "closed" for the closed forms, "exact" for sharpness along exact geodesics.
        """
        names = ("mix " + how, "inv " + how, "adaptive")
        values = [0.0 if tau is None else tau.value for tau in (self.tau(setting, name) for name in names)]
        return values[0] < values[1] < values[2] < 0


def setting_of(record: Record) -> Setting:
    """Return a setting as it is in a record."""
    return Setting(record["points"], tuple(record["scales"]), tuple(record["rates"]))


def mean_of(values: Floats) -> Estimate | None:
    """Return the mean over seeds with its bootstrap interval (95 %, percentile); None without values.

    Those that are undefined are left out. One value has itself as interval.
    """
    known = values[~np.isnan(values)]
    if not len(known):
        return None
    low = high = float(known.mean())
    if len(known) > 1 and float(np.ptp(known)) > 0:
        found = stats.bootstrap((known,), np.mean, method="percentile", rng=np.random.default_rng(0))
        low, high = map(float, found.confidence_interval)
    return Estimate(float(known.mean()), low, high)


# ---- the paper's claims

METRIC_NAMES = ("inv", "mix")
HOW = {"exact": "exact geodesics", "closed": "closed form"}  # without truncation
MARGIN = 0.1
"""The largest difference between the two metrics in the paper's Table 1 (MNLI), which it calls small (Sec. 7)."""


class Claim(NamedTuple):
    """Hold a statement of the paper, the number it is about, and that number's estimates by setting.

    verdicts: by setting, 1 for the claim, -1 against it, 0 inconclusive.
    """

    words: str
    about: str
    rule: str
    found: list[Estimate]
    verdicts: list[int]


def claims(study: Study) -> Iterator[Claim]:
    """Hold every claim to the interval of each setting: for it where all of the interval agrees, against where none."""
    names = [f"{metric} {how}" for how in HOW for metric in METRIC_NAMES]
    given = study.taus("adaptive")
    for name in ("adaptive", *names):
        taus = study.taus(name)
        yield Claim("sharper is better", f"tau, {said(name)}", "below 0", taus, [-tau.sign for tau in taus])
    for name in names:
        gaps = [study.estimate(each, [name, "adaptive"], lambda a, b: abs(a) - abs(b)) for each in study.settings]
        about, signs = f"|tau|, {said(name)} minus adaptive", [gap.sign for gap in gaps]
        yield Claim("stronger than adaptive", about, "above 0", gaps, signs)
    for name in names:
        taus = study.taus(name)
        signs = [tau.sign * first.sign for tau, first in zip(taus, given, strict=True)]
        yield Claim("same sign", f"tau, {said(name)}", "the sign of adaptive", taus, signs)
    for how, words in HOW.items():
        pair = [f"{metric} {how}" for metric in METRIC_NAMES]
        gaps = [study.estimate(setting, pair, np.subtract) for setting in study.settings]
        about, verdicts = f"tau, inv minus mix, {words}", [_small(gap) for gap in gaps]
        yield Claim("metrics agree", about, f"within ±{MARGIN:g}", gaps, verdicts)


def _small(gap: Estimate) -> int:
    if gap.low is None or gap.high is None:
        return 0
    return int(gap.low > -MARGIN and gap.high < MARGIN) - int(gap.low > MARGIN or gap.high < -MARGIN)


def said(name: str) -> str:
    """Return a measure in words."""
    metric, _, rest = name.partition(" ")
    if metric not in METRIC_NAMES:
        return name
    order = {"first": "first order", "second": "second order", "gradient": "gradient norm", **HOW}
    return f"{metric}, {order.get(rest, rest)}"


# ---- tables


def tables(record: Record) -> Tables:
    """Return tau by setting, by order of geodesics and radius, its convergence, and the claims."""
    study = Study(record)
    plain, closed = study.plain, "Order of Table 1 by closed forms"
    places = [dict(zip(WHERE, where(each), strict=True)) for each in study.settings]
    verdicts = {"For": 1, "Against": -1, "Open": 0}
    return {
        "settings": pd.DataFrame(
            {**place, **{said(name): study.tau(each, name) for name in SHOWN}}
            | {closed: "yes" if study.ordered(each, "closed") else "no"}
            for place, each in zip(places, study.settings, strict=True)
        ),
        "thorough": pd.DataFrame(_thorough(study, plain, name) for name in MIDDLE),
        "orders": pd.DataFrame(
            {"Sharpness": said(name)} | {f"Radius {radius:g}": plain.spread(name, radius) for radius in study.radii}
            for name in ORDERS
        ),
        "claims": pd.DataFrame(
            {"Claim": claim.words, "Number": claim.about, "Rule": claim.rule, "Range": _ends(claim.found)}
            | {name: claim.verdicts.count(verdict) for name, verdict in verdicts.items()}
            for claim in claims(study)
        ),
    }


def _thorough(study: Study, plain: Study, name: str) -> dict[str, str]:
    """Return what plain ascents found at the middle radius over what thorough ones found, and tau by both."""
    median, least = (study.column(f"middle {end}", name, study.middle) for end in (0, 1))
    found = {"Found, median": f"{np.median(median):.3f}", "Found, least": f"{least.min():.3f}"}
    taus = {"tau, plain": _ends(plain.taus(name)), "tau, thorough": study.spread(name)}
    change = float(np.nanmax(abs(plain.by_seed(name) - study.by_seed(name))))
    return {"Measure": said(name), **found, **taus, "Largest change of tau": f"{change:.2f}"}


def _ends(found: Sequence[Estimate]) -> str:
    values = [each.value for each in found]
    return f"{signed(min(values))} to {signed(max(values))}" if values else ""


def where(setting: Setting) -> list[str]:
    """Return the cells of a row that say which setting it is."""
    return [str(setting.points), *(f"{low:g} to {high:g}" for low, high in (setting.scales, setting.rates))]
