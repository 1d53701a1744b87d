"""Choose the radii of a zoo by the increase in loss that pilots show: models outside the zoo, of other seeds.

A radius is that at which the median increase over the pilots, interpolated between measured radii (log-log), is one
asked for, rounded to two digits. The radius at which parts of a measure are compared is that at which geodesics of
second order have a median reach of `REACH`: there truncation shows and does not yet decide.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from torch import nn

from quotient_manifolds import cross_entropy, worst_case_sharpness
from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient
from quotient_manifolds.progress import Progress
from quotient_manifolds.sharpness import SharpnessWarning
from studies.common import Record, Tables, figure, read_record, table, write_record
from studies.mnist.zoo import pilot_models as vision
from studies.sentiment.sentences import fetched
from studies.sentiment.zoo import pilot_models as language

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


def run(out: Path, *, fast: bool, command: str, progress: Progress) -> dict[str, Record]:
    """Measure the pilots of both zoos and write OUT/ZOO/pilots.json."""
    models = {"mnist": (vision(100), 20), "sentiment": (language(fetched()), 10)}
    found = {}
    for zoo, (made, steps) in models.items():
        chosen, steps = (dict(list(made.items())[:1]), 2) if fast else (made, steps)
        rises = measure_pilots(chosen, steps=steps, progress=progress)
        record = {"zoo": zoo, "models": [*chosen], "rises": rises}
        found[zoo] = write_record(out / zoo / "pilots.json", record, command)
    return found


def load(folder: Path) -> dict[str, Record]:
    """Read the records in a folder."""
    return {zoo: read_record(folder / zoo / "pilots.json") for zoo in ("mnist", "sentiment")}


def measure_pilots(
    models: Mapping[str, Callable[[], tuple[nn.Module, Any]]], *, steps: int, progress: Progress
) -> list[Record]:
    """Measure the increase in loss (nats) in balls of every geometry, and the reach of geodesics, model by model.

    models: by recipe, in words, what returns a model and the batch it is measured on.
    """
    rises: dict[tuple[str, float], list[tuple[float, float | None]]] = {}
    for place, load_pilot in enumerate(models.values()):
        model, batch = load_pilot()
        for number, (name, (geometry, least)) in enumerate(GEOMETRIES.items()):
            progress("pilots", place * len(GEOMETRIES) + number, len(models) * len(GEOMETRIES))
            if isinstance(geometry, Quotient):  # whose symmetries are found and verified once
                verified: Any = geometry.verified(model, cross_entropy, [batch])
                geometry = replace(verified, verify="none")
            for radius in (least * 2**power for power in range(DOUBLINGS)):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", SharpnessWarning)  # the largest radii are there to be too large
                    found = worst_case_sharpness(
                        model, cross_entropy, [batch], geometry=geometry, radius=radius, steps=steps
                    )
                rises.setdefault((name, radius), []).append((found.mean, found.reach))
    return [
        {
            "geometry": name,
            "radius": radius,
            "rises": [rise for rise, _ in found],
            "reaches": [reach for _, reach in found if reach is not None],
        }
        for (name, radius), found in rises.items()
    ]


def radii(found: Record, geometry: str) -> tuple[float, ...]:
    """Return the radii at which the median increase in loss is one of `RISES`."""
    return tuple(_radius(found, geometry, "rises", rise) for rise in RISES)


def reaching(found: Record, geometry: str) -> float:
    """Return the radius at which the median reach is `REACH`."""
    return _radius(found, geometry, "reaches", REACH)


def _radius(found: Record, geometry: str, column: str, wanted: float) -> float:
    every = pd.DataFrame(found["rises"]).query("geometry == @geometry").set_index("radius")[column]
    medians = every[every.map(len) > 0].map(np.median).cummax()
    if not medians.iloc[0] <= wanted <= medians.iloc[-1]:
        raise ValueError(f"{geometry}: no measured radius is below or above a median of {wanted:g}: {dict(medians)}")
    return float(f"{np.exp(np.interp(np.log(wanted), np.log(medians), np.log(medians.index))):.2g}")


def tables(found: dict[str, Record]) -> Tables:
    """Return the median increase in loss of each zoo's pilots by geometry and radius."""
    return {
        zoo: table(
            ["Geometry", "Radius", "Median increase (nats)"],
            [[each["geometry"], f"{each['radius']:g}", figure(np.median(each["rises"]))] for each in record["rises"]],
        )
        for zoo, record in found.items()
    }
