"""Hold what operations do with parameters, and to constants: linear maps, vectors, flows."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from quotient_manifolds.symmetries.wires.entries import Entries
from quotient_manifolds.symmetries.wires.linear_algebra import Array
from quotient_manifolds.symmetries.wires.nodes import moving

NONE = np.zeros((0, 0), np.int64)


@dataclass(eq=False)
class Linear:
    """Hold a linear map by a weight: the nodes it reads and those it writes, a row for each kind of token."""

    entries: Entries  # of shape (taps, out, in)
    ins: Array  # (kinds of tokens, in)
    outs: Array
    taps: Any = None  # how a convolution moves tokens, None for a plain matrix
    table: bool = False  # an embedding: its input is one of the rows
    at: int = 0  # which operation
    shared: str = ""  # the same entries are used elsewhere: "alike", "turned" (transposed), or in an "other" way

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.entries.shape)

    @cached_property
    def takes(self) -> Array:
        """Return the channels that it reads: of the first kind of token in which there is one."""
        return moving(self.ins)


@dataclass(eq=False)
class Vector:
    """Hold a vector that is added or multiplied: a row for each place that has numbers of its own."""

    entries: Entries
    ins: Array  # of a gain, (1, n); of a bias nothing
    outs: Array  # (rows, n)
    gain: bool
    unknowns: Array = field(default_factory=lambda: NONE)  # (1, n), log-scales of the numbers of a gain
    index: Array = field(default_factory=lambda: NONE)  # (n,), where these numbers are in the parameter
    like: Array = field(default_factory=lambda: NONE)  # of rows of a table that nobody asked for: those that were
    shared: str = ""  # "alike": the same entries are used elsewhere in the same way, "other": in another way


SUMS = ("sum", "offset", "token", "number", "pool", "mix")
"""Flows whose answers are sums of terms; what is arbitrary at each token stays so."""


@dataclass(eq=False)
class Flow:
    """Hold what an operation does to constants: kind, nodes that it writes, and, node by node, what they are made of.

    The terms of a sum are names and factors (nodes, k), padded by zeros; those of a function are names (nodes, k). They
    may be given as lists of pairs, and lists of nodes. plus: numbers that are added; NaN where they are not known.
    """

    kind: str  # one of SUMS, through, linear, gain, bias, norm, centre, seen, soft, dot, max
    outs: Any
    terms: Any = None
    about: Any = None
    plus: Any = None

    def __post_init__(self) -> None:
        self.outs = np.asarray(self.outs, np.int64).reshape(-1)
        if self.kind in SUMS:
            if not isinstance(self.terms, tuple):
                rows = self.terms
                names, factors = ([[pair[i] for pair in row] for row in rows] for i in (0, 1))
                self.terms = _padded(names, np.int64), _padded(factors, float)
            self.about = np.zeros(len(self.outs), np.int64) if self.about is None else np.asarray(self.about)
        elif self.kind == "through" and not isinstance(self.terms, np.ndarray):
            self.terms = _padded(self.terms, np.int64)

    @property
    def taken(self) -> Array:
        """Return the nodes that it takes."""
        if self.kind in ("seen", "soft"):
            return self.outs
        if self.kind == "dot":
            return np.concatenate(self.terms)
        terms = self.terms[0] if self.kind in SUMS else getattr(self.terms, "ins", self.terms)
        return np.asarray(terms, np.int64).reshape(-1)


def _padded(rows: list[list[Any]], kind: Any) -> Array:
    made = np.zeros((len(rows), max(map(len, rows), default=0)), kind)
    for place, row in enumerate(rows):
        made[place, : len(row)] = row
    return made


def by_entries(several: list[Any]) -> list[list[Any]]:
    """Group what takes the same entries in the same way, and leave out what is used in another way, too."""
    found: dict[Any, list[Any]] = {}
    for each in several:
        if each.shared in ("", "alike"):
            found.setdefault(each.entries.key, []).append(each)
    return list(found.values())
