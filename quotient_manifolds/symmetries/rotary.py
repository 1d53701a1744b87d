"""Describe what rotary embeddings leave of GL(h) on queries and keys: what commutes with every rotation.

Scores are q' R(i - j) k with R block-diagonal in planes of distinct frequencies, so A acts plane by plane as a complex
number: GL(1, C) for each plane of each key head. Coordinates that do not rotate keep a GL of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from quotient_manifolds.symmetries.layout import Layout, Rotary, Unrecognised, attribute
from quotient_manifolds.symmetries.pair import Factor, ParameterView, Span, SymmetricPair

_PLANES = {"half": "(two planes)", "interleaved": "(planes two)"}


def rotated_pairs(
    layout: Layout, module: nn.Module, pair: SymmetricPair, stored: Mapping[str, Tensor]
) -> tuple[SymmetricPair, ...]:
    """Return the pairs that rotary embeddings leave of the query/key pair `pair`; itself if the module does not rotate.

    Coordinates that do not rotate are the last pair.
    """
    rotary = layout.rotary
    if rotary is None or any(_equals(attribute(module, path, None), value) for path, value in rotary.unless):
        return (pair,)
    rotated = _rotated(rotary, module, pair.h)
    planes = _slice(pair, f"{pair.name} rotary", 0, rotated, stored, _PLANES[_style(rotary, module)])
    rest = _slice(pair, pair.name, rotated, pair.h, stored, "h") if rotated < pair.h else None
    return (replace(planes, acts="GL(1, C)"), *([rest] if rest else []))


def _style(rotary: Rotary, module: nn.Module) -> str:
    if rotary.style in _PLANES:
        return rotary.style
    return "interleaved" if attribute(module, rotary.style) else "half"


def _rotated(rotary: Rotary, module: nn.Module, h: int) -> int:
    share = attribute(module, rotary.dims, h) if rotary.dims else h
    share = h if share is None else share
    rotated = int(share * h) if share <= 1 else share
    rotated += rotated % 2 if share <= 1 else 0  # frequencies count up from 0 by 2 below an odd share as well
    if not isinstance(rotated, int) or not 0 < rotated <= h or rotated % 2:
        raise Unrecognised(f"{rotary.dims!r} is {share!r}, expected an even number of rotating coordinates up to {h}")
    return rotated


def _slice(
    pair: SymmetricPair, name: str, start: int, stop: int, stored: Mapping[str, Tensor], opened: str
) -> SymmetricPair:
    """Return coordinates start <= i < stop of every head as a pair, (heads, n + m, stop - start) or by planes."""
    G, H = (
        Factor(
            tuple(
                _view(view, pair.h, start, stop, stored[view.name], opened)
                for view in factor.views
                if isinstance(view, ParameterView)
            )
        )
        for factor in (pair.G, pair.H)
    )
    return SymmetricPair(name, pair.kind, G, H)


def _view(view: ParameterView, h: int, start: int, stop: int, stored: Tensor, opened: str) -> ParameterView:
    left, right = (side.strip() for side in view.pattern.split("->"))
    flat = left.replace("(", "").replace(")", "").split()
    span = _append(view.span, Span(left, "h", h, start, stop))
    if opened == "h":
        return ParameterView.of(view.name, stored, f"{' '.join(flat)} -> {right}", dict(view.sizes), span)
    heads, rows, _ = re.findall(r"\([^)]*\)|\w+", right)
    planes = " ".join(opened if axis == "h" else axis for axis in flat)
    pattern = f"{planes} -> ({heads.strip('()')} planes) {rows} two"
    return ParameterView.of(
        view.name, stored, pattern, {**dict(view.sizes), "two": 2, "planes": (stop - start) // 2}, span
    )


def _append(chain: Span | None, last: Span) -> Span:
    return last if chain is None else replace(chain, then=_append(chain.then, last))


def _equals(value: object, other: object) -> bool:
    return value is None if other is None else value == other
