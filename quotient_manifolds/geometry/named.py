"""Geometries by name, from plain settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from quotient_manifolds.geometry.geometries import Adaptive, Euclidean, Geometry, Quotient
from quotient_manifolds.manifolds import METRICS

GEOMETRY_OPTIONS = ("norm", "eta", "geodesic", "eps", "biases")

_GEOMETRIES: dict[str, type[Geometry]] = {"euclidean": Euclidean, "adaptive": Adaptive}


def geometry_of(name: str | float, options: Mapping[str, Any]) -> Geometry:
    """Return the geometry called euclidean, adaptive, inv, mix or a number t, with the options of that geometry.

    Raises ValueError for other names, and for options that the geometry does not have.
    """
    kind: type[Geometry] = _GEOMETRIES.get(name, Quotient) if isinstance(name, str) else Quotient
    if isinstance(name, str) and kind is Quotient and name not in METRICS:
        known = ", ".join([*_GEOMETRIES, *METRICS])
        raise ValueError(f"geometry must be one of {known}, or a number t. Found {name!r}")
    own = {each.name for each in fields(kind) if each.name not in ("metric", "symmetries", "trust")}  # type: ignore[arg-type]
    if foreign := sorted(set(options) - own):
        raise ValueError(f"{foreign[0]} is no option of the geometry {name}; it has {', '.join(sorted(own))}")
    return kind(**({"metric": name} if kind is Quotient else {}), **options)
