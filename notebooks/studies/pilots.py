"""Choose the radii of a zoo by the increase in loss that pilots show: models outside the zoo, of other seeds.

A radius is that at which the median increase over the pilots, interpolated between measured radii (log-log), is one
asked for, rounded to two digits. The radius at which parts of a measure are compared is that at which geodesics of
second order have a median reach of `REACH`: there truncation shows and does not yet decide.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from torch import nn

from quotient_manifolds import cross_entropy, worst_case_sharpness
from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient
from quotient_manifolds.messages import Progress
from quotient_manifolds.sharpness import PreparedModel, SharpnessWarning
from studies.common import Record, Tables
from studies.mnist import pilot_models as vision
from studies.sentiment import pilot_models as language

RISES: Final = (0.02, 0.2, 2.0)  # nats
REACH: Final = 0.4
GEOMETRIES: Final[dict[str, tuple[Geometry, float]]] = {
    "euclidean": (Euclidean(), 0.00625),
    "adaptive": (Adaptive(), 0.0625),
    "adaptive linf": (Adaptive(norm="linf"), 0.00025),
    "inv": (Quotient("inv"), 0.0125),
    "mix": (Quotient("mix"), 0.00625),
}
"""What is asked for radii, and the least of those that are measured; each is twice the one before."""
DOUBLINGS = 9


def run(out: Path, *, fast: bool, progress: Progress) -> Record:
    """Measure the pilots of both zoos."""
    models = {"mnist": (vision(100), 20), "sentiment": (language(32), 10)}
    found = {}
    for zoo, (made, steps) in models.items():
        chosen, steps = (dict(list(made.items())[:1]), 2) if fast else (made, steps)
        rises = [
            {"model": place, **rise}
            for place, pilot in enumerate(chosen.values())
            for rise in rises_of(*pilot(), steps=steps, progress=progress)
        ]
        found[zoo] = {"models": [*chosen], "rises": rises}
    return found


def rises_of(model: nn.Module, batch: Any, *, steps: int, progress: Progress) -> Iterator[Record]:
    """Yield the increase in loss (nats) in balls of every geometry, and the reach of geodesics, None without any."""
    for place, (name, (geometry, least)) in enumerate(GEOMETRIES.items()):
        progress("geometries of a pilot", place, len(GEOMETRIES))
        if isinstance(geometry, Quotient):  # whose symmetries are found and verified once
            verified: Any = PreparedModel.of(model, cross_entropy, [batch], geometry).verified().geometry
            geometry = replace(verified, verify="none")
        for radius in (least * 2**power for power in range(DOUBLINGS)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SharpnessWarning)  # the largest radii are there to be too large
                found = worst_case_sharpness(
                    model, cross_entropy, [batch], geometry=geometry, radius=radius, steps=steps
                )
            yield {"geometry": name, "radius": radius, "rise": found.mean, "reach": found.reach}


def medians(found: Record) -> pd.DataFrame:
    """Return the median rise and reach over the pilots of a zoo, by geometry and radius."""
    rises = pd.DataFrame(found["rises"]).astype({"reach": float})
    return rises.groupby(["geometry", "radius"], sort=False)[["rise", "reach"]].median()


def radii(found: Record, geometry: str) -> tuple[float, ...]:
    """Return the radii at which the median increase in loss is one of `RISES`."""
    return tuple(_radius(medians(found).loc[geometry, "rise"], rise) for rise in RISES)


def reaching(found: Record, geometry: str) -> float:
    """Return the radius at which the median reach is `REACH`."""
    return _radius(medians(found).loc[geometry, "reach"], REACH)


def _radius(column: pd.Series, wanted: float) -> float:
    increasing = column.cummax()
    if not increasing.iloc[0] <= wanted <= increasing.iloc[-1]:
        raise ValueError(f"A median of {wanted:g} must lie between those of measured radii. Found {dict(column)}")
    return float(f"{np.exp(np.interp(np.log(wanted), np.log(increasing), np.log(increasing.index))):.2g}")


def tables(found: Record) -> Tables:
    """Return the median increase in loss of each zoo's pilots by geometry and radius."""
    shown = {}
    for zoo in ("mnist", "sentiment"):
        rise = medians(found[zoo])["rise"].map("{:.4g}".format).reset_index()
        shown[zoo] = rise.set_axis(["Geometry", "Radius", "Median increase (nats)"], axis=1)
    return shown
