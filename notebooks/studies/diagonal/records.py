"""What the study of diagonal networks found: tau cell by cell, and its mean over seeds with an interval."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
from pydantic import TypeAdapter, ValidationError
from scipy import stats

from quotient_manifolds.files import write_text
from studies.diagonal.networks import NETWORKS, Drawing, Setting

FAMILY_GEODESICS = ("second", "exact")
FORMAT = 2  # of diagonal.json; raise when a reader of the old form would misread the new one

Values = tuple[float | None, ...]
Columns = dict[str, Values]

MIDDLE = ("adaptive", "inv exact", "mix exact")
"""What is climbed thoroughly in every cell, for these rankings hang on how far an ascent comes."""

SETTINGS = tuple(
    Setting(points, scales, rates)
    for scales in ((0.1, 1.0), (0.01, 0.1))
    for rates in ((0.01, 0.1), (0.1, 0.3))
    for points in (50, 100, 150)
)


@final
@dataclass(frozen=True)
class Plan:
    """Say what is measured: settings at `radii`, the first `profiled` of them at all of `profile`, which holds `radii`.

    steps: of the ascent. thorough: seeds of every setting that are measured a second time, at `radii`, by an ascent of
    `thorough_steps` with `thorough_restarts`; those of `MIDDLE` are in all seeds, at the middle radius. family: the t
    of the metrics that all settings are measured in at `family_radii`; above those a metric with t < 0 may be
    infinitely sharp.
    """

    settings: tuple[Setting, ...] = SETTINGS
    seeds: int = 20
    networks: int = NETWORKS
    radii: tuple[float, ...] = (0.01, 0.1, 1.0)
    profile: tuple[float, ...] = tuple(float(f"{10 ** (k / 2):.3g}") for k in range(-12, 1))
    profiled: int = 3
    family: tuple[float, ...] = tuple(k / 4 for k in range(-2, 7))
    family_radii: tuple[float, ...] = (0.01, 0.1)
    steps: int = 20
    thorough: int = 5
    thorough_steps: int = 100
    thorough_restarts: int = 10

    def __post_init__(self) -> None:
        if not set(self.radii) <= set(self.profile):
            raise ValueError(f"The profile must hold the radii {self.radii}. Found {self.profile}")

    @property
    def middle(self) -> float:
        """Return the middle one of the radii."""
        return self.radii[len(self.radii) // 2]

    @classmethod
    def fast(cls) -> Plan:
        """Return a plan that takes seconds instead of an hour, to try the code."""
        return cls(
            settings=(Setting(50, (0.1, 1.0), (0.03, 0.1)), Setting(50, (0.3, 1.0), (0.03, 0.1))),
            seeds=3,
            networks=8,
            radii=(0.1,),
            profile=(1e-3, 0.1),
            profiled=1,
            family=(0.0, 0.5, 1.0),
            family_radii=(0.1,),
            steps=5,
            thorough=1,
            thorough_steps=20,
            thorough_restarts=1,
        )


@final
@dataclass(frozen=True)
class Check:
    """Hold the ascent against a thorough one, by network: tau by the thorough one, and ratios of the rises found.

    found: median and least of (ascent / thorough). bound: for mix exact, median and least of (thorough / upper bound).
    """

    tau: float | None
    found: tuple[float, float]
    bound: tuple[float, float] | None


@final
@dataclass(frozen=True)
class Cell:
    """Hold one setting with one seed: its own X, beta* and networks. Columns hold a value for every one of `radii`.

    smallest: the median over networks of min |beta_i|. taus: Kendall's tau-b between test loss and each measure;
    "mix endless" is the upper bound of mix exact. family: the same along the family of metrics, at the plan's
    `family_radii`. cornered: the same with the best single coordinate where that rises
    more than the ascent. rises: the median of the measure. references: tau-b of test loss with what has no radius.
    matches: tau-b between a measure and a reference. far: the median share of |z|^2 in coordinates with |b| > 1/2.
    truncation: by metric, the median of the truncation error over the rise; truncated: in how many of all networks that
    is above 0.1. agreement: tau-b between second-order and exact sharpness. checks: by measure, at the plan's radii.
    middle: those of `MIDDLE` by thorough ascents, at the middle radius.
    points: of one cell, test loss and the measures at one radius, network by network.
    """

    setting: Setting
    seed: int
    drawing: Drawing
    train_loss: tuple[float, float]  # least, largest
    test_loss: tuple[float, float, float]  # least, median, largest
    smallest: float
    radii: tuple[float, ...]
    taus: Columns
    family: Columns
    cornered: Columns
    rises: Columns
    references: dict[str, float | None]
    matches: Columns
    far: Columns
    truncation: Columns
    truncated: Columns
    agreement: Columns
    checks: dict[str, tuple[Check, ...]]
    middle: dict[str, Check]
    points: dict[str, tuple[float, ...]]
    seconds: float


def family_name(t: float, geodesic: str) -> str:
    """Return how the columns of the family are called: "0.5 exact"."""
    return f"{t:g} {geodesic}"


@final
@dataclass(frozen=True)
class Mean:
    """Hold a mean over seeds with its bootstrap interval (95 %, percentile, over seeds), and the signs."""

    value: float
    low: float
    high: float
    seeds: int
    negative: int
    positive: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Mean | None:
        """Return None without values; those that are not defined are left out. One value has itself as interval."""
        known = np.array([value for value in values if value is not None])
        if not len(known):
            return None
        low = high = float(known.mean())
        if len(known) > 1 and float(np.ptp(known)) > 0:
            found = stats.bootstrap((known,), np.mean, method="percentile", rng=np.random.default_rng(0))
            low, high = map(float, found.confidence_interval)
        return cls(float(known.mean()), low, high, len(known), int(np.sum(known < 0)), int(np.sum(known > 0)))


@final
@dataclass(frozen=True)
class DiagonalStudy:
    """Hold all cells; `save` and `load` are inverse to each other."""

    plan: Plan
    cells: tuple[Cell, ...]
    command: str
    version: str

    @cached_property
    def measures(self) -> tuple[str, ...]:
        return tuple(self.cells[0].taus)

    @property
    def profiled(self) -> tuple[Setting, ...]:
        """Return the settings whose cells have all radii of the profile."""
        return self.plan.settings[: self.plan.profiled]

    def of(self, setting: Setting) -> tuple[Cell, ...]:
        """Return the setting's cells, a seed each."""
        return tuple(cell for cell in self.cells if cell.setting == setting)

    def tau(self, setting: Setting, measure: str, radius: float) -> Mean | None:
        """Return tau over seeds; `measure` is one of `measures`."""
        return Mean.of(cell.taus[measure][cell.radii.index(radius)] for cell in self.of(setting))

    def of_family(self, setting: Setting, t: float, geodesic: str, radius: float) -> Mean | None:
        """Return tau over seeds in the metric t, along geodesics of an order, at one of the plan's `family_radii`."""
        name, place = family_name(t, geodesic), self.plan.family_radii.index(radius)
        return Mean.of(cell.family[name][place] for cell in self.of(setting))

    def column(self, name: str, key: str, radius: float, settings: Sequence[Setting] | None = None) -> list[float]:
        """Return one of the columns ("taus", "far", ...) of all cells that have the radius, of the settings given."""
        chosen = self.plan.settings if settings is None else settings
        found = [
            getattr(cell, name)[key][cell.radii.index(radius)]
            for cell in self.cells
            if radius in cell.radii and cell.setting in chosen
        ]
        return [value for value in found if value is not None]

    def truncated_part(self, setting: Setting, measure: str, radius: float) -> float:
        """Return the part of the rise that is truncation error, a median; that of second order stands for the first."""
        metric, _, order = measure.partition(" ")
        if order not in ("first", "second"):
            return 0.0
        return float(np.median(self.column("truncation", metric, radius, [setting])))

    def reference(self, setting: Setting, name: str) -> Mean | None:
        return Mean.of(cell.references[name] for cell in self.of(setting))

    def checked(self, setting: Setting, measure: str, radius: float) -> list[tuple[Cell, Check]]:
        """Return the cells that a thorough ascent measured again."""
        place = self.plan.radii.index(radius)
        return [(cell, cell.checks[measure][place]) for cell in self.of(setting) if cell.checks]

    def save(self, path: Path) -> None:
        """Write compact JSON, five significant digits, a line a cell."""
        head = {"format": FORMAT, "version": self.version, "command": self.command, "plan": asdict(self.plan)}
        cells = ",\n".join(to_json(asdict(cell)) for cell in self.cells)
        write_text(path, to_json(head)[:-1] + f', "cells": [\n{cells}\n]}}\n')

    @classmethod
    def load(cls, path: Path) -> DiagonalStudy:
        """Read what `save` wrote. Raises ValueError for anything else."""
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["format"] != FORMAT:
                raise ValueError(f"{path} must have format {FORMAT}. Found {record['format']!r}; run the study again")
            return TypeAdapter(cls).validate_python(record)
        except (json.JSONDecodeError, UnicodeDecodeError, ValidationError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} must hold a study of diagonal networks. Found none ({type(error).__name__}: {error}); take a "
                f"diagonal.json that the study wrote"
            ) from error


def to_json(record: Any) -> str:
    return json.dumps(_rounded(record), allow_nan=False)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, (list, tuple)) else value
