"""Find symmetries without any graph: all affine fields that shapes allow, and what charges at generic points leave.

Knows nothing of walks, wires or groups, so that it is an oracle of what a finder misses. It misses units itself: a gain
between writer and reader makes the coefficients of a field rational in the weights.

    python -m tests.symmetries.graph_free --set kinds nets --every 7 --out table.csv
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries.charges.find import find
from quotient_manifolds.symmetries.charges.kernel import null_space
from quotient_manifolds.symmetries.charges.points import Points
from quotient_manifolds.symmetries.groups import Gauge, Symmetry
from quotient_manifolds.symmetries.trace.record import movable
from tests.nets.sets import SETS, chosen
from tests.symmetries.finders import kernel

LOSSES, MOST, ROWS, LARGEST = 10, 1600, 16, 3_400
FLOOR, BROKEN, SAME, FAR = 1e-6, 1e-8, 1e-8, 1e-6
Rest = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Unfoldings:
    """Rows of parameters that share a rest: entries (rows, rest), and which rows may be added to which (rows, rows)."""

    entries: Tensor
    mask: Tensor

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return into which row each unknown adds which."""
        into, of = torch.nonzero(self.mask, as_tuple=True)
        return into, of


def unfoldings(shapes: Sequence[torch.Size], most: int = MOST) -> Iterator[Unfoldings]:
    """Yield the unfoldings of each rest: some axes of a parameter are rows, the others the rest.

    Rows are added to rows of the same unfolding, if they are one axis or few, to and from single rows and at the same
    place of others of as many rows, and to all others where these are at most `most` pairs. Every entry is scaled.
    """
    found: dict[Rest, list[tuple[Tensor, bool]]] = {}
    start = 0
    for shape in shapes:
        sizes = [n for n in shape if n > 1] or [1]
        at = torch.arange(start, start := start + math.prod(sizes)).view(sizes)
        for count in range(at.ndim + 1):
            for axes in itertools.combinations(range(at.ndim), count):
                rest = tuple(n for axis, n in enumerate(sizes) if axis not in axes)
                rows = at.movedim(axes, tuple(range(count))).reshape(-1, math.prod(rest))
                found.setdefault(rest, []).append((rows, count <= 1))
    for rest, parts in found.items():
        number, place, size, narrow = (
            torch.cat([torch.full((len(rows),), k) if not torch.is_tensor(k) else k for (rows, _), k in each])
            for each in (
                zip(parts, range(len(parts)), strict=True),
                ((part, torch.arange(len(part[0]))) for part in parts),
                ((part, len(part[0])) for part in parts),
                ((part, int(part[1] or len(part[0]) <= ROWS)) for part in parts),
            )
        )
        same = number[:, None] == number
        near = (narrow[:, None] & narrow) > 0
        mask = same & near | same & (place[:, None] == place)
        if rest:
            mask |= (place[:, None] == place) & (size[:, None] == size) | ((size[:, None] == 1) | (size == 1)) & near
        if int(near.sum()) <= most:
            mask |= near
        yield Unfoldings(torch.cat([rows for rows, _ in parts]), mask)


class GraphFree:
    """Hold symmetries as tangents at the model's weights, columns (P, k).

    linear, affine: fields whose charges vanish at generic points, without and with constants.
    """

    def __init__(
        self, model: nn.Module, batch: Any, evaluate: Any = None, *, most: int = MOST, largest: int = LARGEST
    ) -> None:
        self.points, self.generator = Points(model, batch, evaluate), torch.Generator().manual_seed(1)
        parameters = self.points.recordings[0].parameters
        self.own = {name: w.detach().double() for name, w in parameters.items() if movable(w)}
        self.theta = self._row(self.own)
        self.classes = list(unfoldings([w.shape for w in self.own.values()], most))
        self.count = len(self.theta) + sum(len(each.pairs[0]) for each in self.classes)
        if self.count > largest:
            raise ValueError(f"a model must have at most {largest} unknowns. Found {self.count}; allow more")
        unknowns = self._solved()
        linear = unknowns @ null_space(unknowns[: len(self.theta)], SAME, 1.0)[0]
        self.linear, self.affine = (spanned(self.field(self.theta, u) / self.theta.norm()) for u in (linear, unknowns))

    def _row(self, weights: Any) -> Tensor:
        return torch.cat([weights[name].reshape(-1) for name in self.own])

    def _point(self) -> tuple[Tensor, Tensor]:
        at, drawn = self.points.samples(LOSSES, vectors=self.own)
        gradients = torch.stack([self._row(sample.gradients) for sample in drawn])
        return self._row(at.weights), gradients

    def charges(self, theta: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return the charges of all unknowns, constants first, and norms of their summands (losses, unknowns)."""
        totals, sizes = [g], [g.abs()]
        for each in self.classes:
            into, of = each.pairs
            G, W = g[:, each.entries], theta[each.entries]
            totals.append((G @ W.T)[:, into, of])
            sizes.append((G.square() @ W.T.square()).sqrt()[:, into, of])
        return torch.cat(totals, 1), torch.cat(sizes, 1)

    def field(self, theta: Tensor, u: Tensor) -> Tensor:
        """Return the changes of theta (P, k) by columns of unknowns."""
        change, at = u[: len(theta)].clone(), len(theta)
        for each in self.classes:
            into, of = each.pairs
            Z = u.new_zeros(len(each.entries), len(each.entries), u.shape[1])
            Z[into, of] = u[at : at + len(into)]
            at += len(into)
            moved = torch.einsum("pqk,qr->prk", Z, theta[each.entries])
            change.index_add_(0, each.entries.reshape(-1), moved.flatten(0, 1))
        return change

    def _solved(self) -> Tensor:
        """Return the null space of charges at more and more points, until more of them break nothing."""
        wanted = int(1.05 * self.count) + 40
        rows, squares = torch.zeros(0, self.count, dtype=torch.float64), torch.zeros(self.count, dtype=torch.float64)
        basis = scale = squares[:, None]
        while True:
            fresh = []
            while sum(map(len, fresh)) < wanted:
                total, size = self.charges(*self._point())
                norm = size.norm(dim=1, keepdim=True)
                keep = norm[:, 0] > 0
                fresh.append((total / norm)[keep])
                squares += (size / norm)[keep].square().sum(0)
            new = torch.cat(fresh)
            if len(rows) and float(((new / scale) @ basis).abs().amax() if basis.shape[1] else 0.0) < BROKEN:
                unknowns = basis / scale[:, None]
                return unknowns / unknowns.norm(dim=0)
            wanted = max(30, self.count // 3) if len(rows) else 30
            rows = torch.cat([rows, new])
            scale = (squares / len(rows)).sqrt()
            scale = scale.clamp(FLOOR * float(scale.max()))
            basis = null_space(rows / scale)[0]


# ---- comparison


def spanned(D: Tensor, least: float = SAME) -> Tensor:
    """Return orthonormal columns that span those of D."""
    U, s, _ = torch.linalg.svd(D, full_matrices=False)
    return U[:, s > least]


def independent(D: Tensor) -> Tensor:
    """Return orthonormal columns that span those of D, each taken at length 1."""
    sizes = D.norm(dim=0)
    D = D[:, sizes > SAME * sizes.max().clamp(1e-300)] if len(sizes) else D
    return spanned(D / D.norm(dim=0))


def tangents(symmetries: Sequence[Symmetry], params: dict[str, Tensor]) -> Tensor:
    """Return the tangents of all generators (P, k)."""
    made = [torch.zeros(sum(w.numel() for w in params.values()), 0, dtype=torch.float64)]
    for each in symmetries:
        E = torch.eye(math.prod(each.shape), dtype=torch.float64).view(-1, *each.shape)
        along = each.tangent(params, each.algebra.project(E) if isinstance(each, Gauge) else E)
        parts = [along.get(name, w.new_zeros(len(E), *w.shape)).reshape(len(E), -1) for name, w in params.items()]
        made.append(torch.cat(parts, 1).T)
    return torch.cat(made, 1)


def outside(of: Tensor, span: Tensor) -> Tensor:
    """Return orthonormal columns for what columns of one matrix span beyond those of another."""
    Q = independent(span)
    of = independent(of)
    rest = of - Q @ (Q.T @ of)
    return spanned(rest - Q @ (Q.T @ rest), FAR)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Hold what `find` finds, and what it or the oracle alone does, as orthonormal columns (P, k).

    linear, affine: what it misses of the oracle's, each without those before; more: what the oracle has not.
    """

    oracle: GraphFree
    found: Tensor
    linear: Tensor
    affine: Tensor
    more: Tensor


def compared(model: nn.Module, batch: Any, evaluate: Any = None, most: int = MOST) -> Comparison:
    """Compare `find` and the finder without a graph."""
    oracle = GraphFree(model, batch, evaluate, most=most)
    found = independent(tangents(find(model, batch, evaluate).symmetries, oracle.own))
    missing, span = [], found
    for part in (oracle.linear, oracle.affine):
        missing.append(outside(part, span))
        span = torch.cat([span, missing[-1]], 1)
    return Comparison(oracle, found, *missing, outside(found, oracle.affine))


# ---- the table


def moved(D: Tensor, params: dict[str, Tensor]) -> str:
    """Return which parameters orthonormal columns move, with the sums of squares of these parts."""
    parts = (part.square().sum() for part in D.split([w.numel() for w in params.values()]))
    return ", ".join(f"{name} {float(part):.2g}" for name, part in zip(params, parts, strict=True) if part > SAME)


def row_of(each: str, name: str, most: int) -> dict[str, Any]:
    """Return a row of the table; what is raised is a column, too."""
    row: dict[str, Any] = {"set": each, "name": name}
    try:
        example = SETS[each].make(name)
        began = time.perf_counter()
        made = compared(example.model, example.shown, example.evaluate, most)
        row["seconds"] = round(time.perf_counter() - began, 1)
        own = made.oracle.own
        row |= {"parameters": len(made.oracle.theta), "kernel": kernel(example), "unknowns": made.oracle.count}
        row |= {key: getattr(made.oracle, key).shape[1] for key in ("linear", "affine")}
        row |= {"graph_free": independent(made.oracle.affine).shape[1], "found": made.found.shape[1]}
        for key, share in zip(("linear", "affine", "more"), SHARES, strict=True):
            row |= {share: getattr(made, key).shape[1], f"{share}_moves": moved(getattr(made, key), own)}
    except Exception as error:  # of any model
        row["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return row


SHARES = ("less_linear", "less_affine", "more")
COLUMNS = (
    *("set", "name", "parameters", "kernel", "unknowns", "linear", "affine", "graph_free", "found", *SHARES),
    *("seconds", *(f"{share}_moves" for share in SHARES), "error"),
)


def main(args: Sequence[str] | None = None) -> None:
    """Write a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", nargs="+", default=["kinds"], choices=list(SETS))
    parser.add_argument("--only", nargs="+", default=[], help="expressions for names")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--most", type=int, default=MOST, help="pairs of rows of one rest that may all be mixed")
    parser.add_argument("--out", required=True)
    given = parser.parse_args(args)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with open(given.out, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for each, name in chosen(given.set, given.only, given.every, None):
            row = row_of(each, name, given.most)
            writer.writerow(row)
            file.flush()
            print(*(f"{key} {row[key]}" for key in COLUMNS if row.get(key, "") != ""), sep="; ", flush=True)


if __name__ == "__main__":
    main()
