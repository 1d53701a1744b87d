"""The scalar network f(x) = G H x: the smallest model with a continuous symmetry [paper, Fig. 1 and App. D]."""

from __future__ import annotations

from studies.toy.climb import climb
from studies.toy.closed import MEASURES, first_term, reached, sharpness
from studies.toy.landscape import GEOMETRIES, Grid, Landscape, grid, landscape
from studies.toy.network import Point, Scalar, batch, network, squared_error
from studies.toy.page import claim_table, spread_table, toy_page
from studies.toy.pictures import hyperbola, landscapes, orbit_picture, series_picture
from studies.toy.study import Toy, study_toy

__all__ = [
    "GEOMETRIES",
    "MEASURES",
    "Grid",
    "Landscape",
    "Point",
    "Scalar",
    "Toy",
    "batch",
    "claim_table",
    "climb",
    "first_term",
    "grid",
    "hyperbola",
    "landscape",
    "landscapes",
    "network",
    "orbit_picture",
    "reached",
    "series_picture",
    "sharpness",
    "spread_table",
    "squared_error",
    "study_toy",
    "toy_page",
]
