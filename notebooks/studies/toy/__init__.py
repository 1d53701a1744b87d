"""The scalar network f(x) = G H x: the smallest model with a continuous symmetry [paper, Fig. 1 and App. D]."""

from __future__ import annotations

from studies.toy.climb import climb
from studies.toy.closed import MEASURES, first_term, reached, sharpness
from studies.toy.landscape import GEOMETRIES, grid, landscape
from studies.toy.network import Point, Scalar, batch, network, squared_error
from studies.toy.study import Toy, load, run, series_picture, tables

__all__ = [
    "GEOMETRIES",
    "MEASURES",
    "Point",
    "Scalar",
    "Toy",
    "batch",
    "climb",
    "first_term",
    "grid",
    "landscape",
    "load",
    "network",
    "reached",
    "run",
    "series_picture",
    "sharpness",
    "squared_error",
    "tables",
]
