"""Evaluate tangents of what is unseen, unreached and shifted."""

from __future__ import annotations

from typing import Any


def uses(several: list[Any]) -> list[list[Any]]:
    """Group what takes the same entries in the same way, and leave out what is used in another way, too."""
    found: dict[Any, list[Any]] = {}
    for each in several:
        if each.shared in ("", "alike"):
            found.setdefault(each.entries.key, []).append(each)
    return list(found.values())
