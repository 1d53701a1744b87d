"""Make geometries of names, of plain settings, and of the dicts that records keep of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from quotient_manifolds.geometry.geometries import Adaptive, Euclidean, Geometry, Quotient
from quotient_manifolds.manifolds import METRICS
from quotient_manifolds.symmetries import Symmetries

GEOMETRY_OPTIONS = ("norm", "eta", "geodesic", "eps", "symmetries", "verify")

_GEOMETRIES: dict[str, type[Geometry]] = {"euclidean": Euclidean, "adaptive": Adaptive}


def geometry_of(name: str | float, options: Mapping[str, Any]) -> Geometry:
    """Return the geometry called euclidean, adaptive, inv, mix or a number t, with the options of that geometry.

    Raises ValueError for other names, and for options that the geometry does not have.
    """
    kind: type[Geometry] = _GEOMETRIES.get(name, Quotient) if isinstance(name, str) else Quotient
    if isinstance(name, str) and kind is Quotient and name not in METRICS:
        known = ", ".join([*_GEOMETRIES, *METRICS])
        raise ValueError(f"geometry must be one of {known}, or a number t. Found {name!r}")
    own = {each.name for each in fields(kind) if each.name not in ("metric", "complete")}  # type: ignore[arg-type]
    if foreign := sorted(set(options) - own):
        raise ValueError(f"{foreign[0]} is no option of the geometry {name}; it has {', '.join(sorted(own))}")
    return kind(**({"metric": name} if kind is Quotient else {}), **options)


def as_geometry(geometry: Geometry | str | float) -> Geometry:
    """Return the geometry itself, or the one of this name with its default options.

    Raises ValueError for unknown names and TypeError for what is neither a geometry nor a name.

    >>> as_geometry("adaptive")
    Adaptive(eta=0.0, norm='l2')
    """
    if isinstance(geometry, Geometry):
        return geometry
    if isinstance(geometry, bool) or not isinstance(geometry, (str, int, float)):
        raise TypeError(
            f"geometry must be Euclidean(), Adaptive(), Quotient(...) or a name such as 'inv'. Found {geometry!r}"
        )
    return geometry_of(geometry, {})


def geometry_from_dict(record: Mapping[str, Any], symmetries: Symmetries | None = None) -> Geometry:
    """Return the geometry of which `record` is `to_dict()`.

    A record says of symmetries only which of the model's they were, or that they were given: those must be given again.
    Raises ValueError for a record of no known geometry, and for given symmetries that are missing.

    >>> geometry_from_dict({"kind": "adaptive", "eta": 0.01, "norm": "linf"})
    Adaptive(eta=0.01, norm='linf')
    """
    kinds: dict[str, type[Geometry]] = {**_GEOMETRIES, "quotient": Quotient}
    kind = kinds.get(str(record.get("kind")))
    if kind is None:
        raise ValueError(f"the kind of a geometry must be one of {', '.join(kinds)}. Found {record.get('kind')!r}")
    settings = {key: value for key, value in record.items() if key != "kind"}
    if unknown := sorted(set(settings) - {each.name for each in fields(kind)}):  # type: ignore[arg-type]
        raise ValueError(f"{unknown[0]} is no setting of the geometry {record['kind']}")
    if settings.get("symmetries") == "given":
        if symmetries is None:
            raise ValueError("this geometry was made with symmetries that were given to it: pass them as symmetries=")
        settings["symmetries"] = symmetries
    return kind(**settings)
