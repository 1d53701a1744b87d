"""The scalar network f(x) = G H x: the smallest model with a continuous symmetry [paper, Fig. 1 and App. D]."""

from __future__ import annotations

from quotient_manifolds.experiments.toy.climb import climb
from quotient_manifolds.experiments.toy.closed import MEASURES, first_term, reached, sharpness
from quotient_manifolds.experiments.toy.landscape import GEOMETRIES, Grid, Landscape, grid, landscape
from quotient_manifolds.experiments.toy.network import Point, Scalar, batch, network, squared_error
from quotient_manifolds.experiments.toy.page import claim_table, spread_table, toy_page
from quotient_manifolds.experiments.toy.pictures import hyperbola, landscapes, orbit_picture, series_picture
from quotient_manifolds.experiments.toy.study import Toy, study_toy

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
