"""Identify a unit of work: one measure of one checkpoint at one radius on one batch, and its hash."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from quotient_manifolds.messages import brief


@final
@dataclass(frozen=True)
class Unit:
    """Say what is to be measured, and identify it.

    key: hash of all that decides the value, as `unit_key` makes it. checkpoint, measure, geometry: names for readers.
    radius: None where the measure has none. settings: plain JSON. Raises ValueError for what JSON cannot keep.
    """

    key: str
    checkpoint: str
    measure: str
    geometry: str
    radius: float | None
    batch: int
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("key", "checkpoint", "measure", "geometry", "radius", "batch", "settings"):
            plain(getattr(self, name), name)


def unit_key(deciding: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hexadecimal, of the canonical JSON of everything that decides a value.

    The order of keys does not matter, nor whether a whole number is written 1 or 1.0. Raises ValueError for what is
    not plain JSON, infinite and undefined numbers included.
    """
    text = json.dumps(_alike(plain(deciding, "deciding")), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def plain(value: Any, name: str) -> Any:
    """Return `value` in plain JSON types, every number with its bits; `name` is what an error calls it.

    Mappings become dicts, tuples lists, subclasses of float (numpy's float64) floats. Raises ValueError for anything
    else: a number that is not finite, a key that is not text, a tensor.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, str) and _is_unicode(value):
        return str(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) and _is_unicode(key) for key in value):
        return {str(key): plain(each, f"{name}.{key}") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each, f"{name}[{index}]") for index, each in enumerate(value)]
    raise ValueError(
        f"{name} must be plain JSON (finite numbers, text, true, false, null, lists, objects with text keys) to be "
        f"kept. Found {type(value).__name__} {brief(value, 80)}"
    )


def to_json(value: Any, name: str) -> str:
    """Return the JSON text of `plain(value, name)`. Reading it gives the same floats, bit for bit."""
    return json.dumps(plain(value, name), ensure_ascii=False, allow_nan=False)


def _is_unicode(text: str) -> bool:
    """Return False for half a surrogate pair, which stands for an undecodable byte in the name of a file."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _alike(value: Any) -> Any:
    """Return whole numbers as integers: 1 and 1.0 are one radius, whichever way a file spells it."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _alike(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_alike(each) for each in value]
    return value
