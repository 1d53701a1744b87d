"""Read which balls are asked for: geometries with their radii, as they are written on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quotient_manifolds.geometry import Geometry, Quotient, geometry_of
from quotient_manifolds.symmetries import Symmetries

_FLAT: dict[str | float, set[str]] = {"euclidean": {"norm"}, "adaptive": {"norm", "eta"}}
_CURVED = {"geodesic", "eps", "symmetries"}


def balls(words: Sequence[str], radii: Sequence[float], options: Mapping[str, Any]) -> list[tuple[Geometry, float]]:
    """Return each geometry with each of its radii, ascending.

    words: NAME or NAME:RADIUS,RADIUS; names without radii get `radii`. options: of geometries, None where not given;
    each goes to the geometries that have it. Raises ValueError for one that none of them has, and for a missing radius.
    """
    given = {key: value for key, value in options.items() if value is not None}
    wanted: dict[str | float, list[float]] = {}
    for word in words:
        name, own = _parsed(word)
        if not own and not radii:
            raise ValueError(f"The geometry {word} has no radius: give --radius, or --geometry {word}:0.1")
        wanted.setdefault(name, []).extend(own or radii)
    used = {key for name in wanted for key in _own(name, given)}
    if unused := sorted(set(given) - used):
        names = ", ".join(map(str, wanted))
        raise ValueError(f"--{unused[0]} {given[unused[0]]} means nothing for {names}; leave it out, or add a geometry")
    made = [(geometry_of(name, _own(name, given)), sorted(set(own))) for name, own in wanted.items()]
    return [(geometry, radius) for geometry, own in made for radius in own]


def with_symmetries(wanted: list[tuple[Geometry, float]], symmetries: Symmetries) -> list[tuple[Geometry, float]]:
    """Return the same balls, those of quotients in the quotient by these symmetries."""
    return [(replace(each, symmetries=symmetries) if isinstance(each, Quotient) else each, r) for each, r in wanted]


def _parsed(word: str) -> tuple[str | float, list[float]]:
    name, _, listed = word.partition(":")
    name = name.strip().removeprefix("t=")
    try:
        radii = [float(part) for part in listed.split(",")] if listed else []
    except ValueError:
        raise ValueError(f"Expected a geometry and its radii, as inv:0.1,0.2. Found {word!r}") from None
    if not radii and word.endswith(":"):
        raise ValueError(f"Expected radii after the colon, as inv:0.1,0.2. Found {word!r}")
    try:
        return float(name), radii
    except ValueError:
        return name, radii


def _own(name: str | float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that mean something for the geometry."""
    return {key: value for key, value in given.items() if key in _FLAT.get(name, _CURVED)}
