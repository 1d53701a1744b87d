"""Represent rotations of a residual stream that only norms and linear maps read: everything on it turns at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from quotient_manifolds.symmetries.freedom import Freedom, gaussian, read, write
from quotient_manifolds.symmetries.linear_scale import LinearScale
from quotient_manifolds.symmetries.norm_scale import NormScale
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.symmetries import Refused
from quotient_manifolds.symmetries.trace import Part, Trace
from quotient_manifolds.symmetries.turning import find_turning

DISTINCT = 1e-6  # of the largest eigenvalue: nearer ones have eigenvectors that rounding decides
MOST_PRODUCTS = 1e10  # for a second moment, as of 25 million numbers of width 384: less than a second
ROWS = 4096  # read at once


@dataclass(frozen=True, eq=False)
class Rotation(Freedom):
    """Describe a residual stream: R W for all W that write to it and W R^T for all that read it are the same function.

    Its norms have gains of 1 (their readers hold them) and commute with any orthogonal R, LayerNorms with those that
    fix the vector of ones. parts: numbers (rows, channels) of parameters, each of whose rows r becomes R r. tables:
    those of them that nothing else moves. scaled: those that nothing else moves but that rows may be rescaled. norms:
    whose gains are to be taken into their readers before.

    The one place is where the second moment of all rows of the tables, and of the directions of all rows of what may be
    rescaled, is diagonal, with ascending entries; for LayerNorms, in a fixed basis of what is orthogonal to the ones.
    In large models it is that of the tables alone, if that is enough.
    The sum of cubes of every coordinate of the tables is positive.
    """

    parts: tuple[Part, ...]
    tables: tuple[Part, ...]
    scaled: tuple[Part, ...]
    norms: tuple[NormScale | LinearScale, ...]
    width: int
    fixes_ones: bool
    kind: ClassVar[str] = "rotation"

    @property
    def name(self) -> str:
        """Return the name of the first table, and what it is about."""
        return f"{self.tables[0][0]} {self.kind}"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that a move touches, each once."""
        held = (name for norm in self.norms for name in norm.names)
        return tuple(dict.fromkeys((*(name for name, _ in self.parts), *held)))

    @property
    def families(self) -> dict[str, int]:
        """Return the dimension of the moves that leave the function alone, by its name."""
        free = self.width - self.fixes_ones
        return {"rotation of the residual stream": free * (free - 1) // 2}

    def fold(self, params: Params) -> None:
        """Turn to the eigenvectors of the second moment of the tables, in place."""
        for norm in self.norms:
            norm.fold_norm(params)
        B = self._basis().to(params[self.tables[0][0]].device)
        V = torch.linalg.eigh(self.second_moment(params)).eigenvectors
        cubes = sum((read(params, name, rows) @ B @ V).pow(3).sum(dim=0) for name, rows in self.tables)
        V = V * torch.where(torch.as_tensor(cubes) < 0, -1.0, 1.0).double()
        self._turn(params, self.parts, self._extended(V, B))

    def second_moment(self, params: Params) -> Tensor:
        """Return B^T M B, M the sum of r r^T over rows of tables and r r^T / |r|^2 over others, B what may turn."""
        return self.moment_of(params, self.tables, self.scaled)

    def moment_of(self, params: Params, tables: Iterable[Part], scaled: Iterable[Part]) -> Tensor:
        """Return what some of the tables and of the others give to the second moment."""
        B = self._basis().to(params[self.tables[0][0]].device)
        moment = torch.zeros(B.shape[1], B.shape[1], dtype=torch.float64, device=B.device)
        for (name, numbers), whole in (*((part, True) for part in tables), *((part, False) for part in scaled)):
            for rows in numbers.split(ROWS):  # of which no large copy is made at once
                A = read(params, name, rows) @ B if self.fixes_ones else read(params, name, rows)
                A = A if whole else torch.nn.functional.normalize(A, dim=1)
                moment += A.mT @ A
        return moment

    def move(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Turn all by a random rotation with angles of about `size`, in place; for `control`, the tables alone."""
        held = [norm.read_norm(params) for norm in self.norms]
        for norm in self.norms:
            norm.fold_norm(params)
        B = self._basis().to(params[self.tables[0][0]].device)
        n = B.shape[1]
        A = gaussian(B, generator, n, n) / max(n, 1) ** 0.5
        R = torch.linalg.matrix_exp(size * (A - A.mT) / 2**0.5)
        self._turn(params, self.tables if control else self.parts, self._extended(R, B))
        for norm, (gain, bias) in zip(self.norms, held, strict=True):
            if bool(gain.all()):
                norm.set_norm(params, gain, bias if norm.bias_is_free else norm.read_norm(params)[1] * gain)

    def _turn(self, params: Params, parts: Iterable[Part], turn: Tensor) -> None:
        for name, rows in parts:
            write(params, name, rows, read(params, name, rows) @ turn.to(params[name].device))

    def _extended(self, turn: Tensor, B: Tensor) -> Tensor:
        """Return the matrix that is `turn` in the basis B, and leaves alone what is orthogonal to it."""
        return B @ turn @ B.mT + (torch.eye(self.width, dtype=B.dtype, device=B.device) - B @ B.mT)

    def _basis(self) -> Tensor:
        """Return an orthonormal basis (width, n) of all vectors, or of those orthogonal to the ones: a reflection."""
        eye = torch.eye(self.width, dtype=torch.float64)
        if not self.fixes_ones:
            return eye
        w = torch.full((self.width,), self.width**-0.5, dtype=torch.float64)
        w[0] += 1.0
        return (eye - 2 * torch.outer(w, w) / (w @ w))[:, 1:]


def find_rotations(
    trace: Trace,
    norms: Iterable[NormScale | LinearScale],
    others: Iterable[Freedom],
    moved: Collection[str] | None = None,
) -> Iterator[Rotation | Refused]:
    """Yield the streams that may turn; those whose parameters do not tell one basis from another are refused.

    norms, others: what is folded before, which decides what is left to tell. moved: the parameters that the groups of
    symmetric pairs act on; all but tables if it is not known.
    """
    folding = {name: norm for norm in norms for name in norm.constant}
    constants = {name: 1.0 if name == norm.gain else norm.held_bias for name, norm in folding.items()}
    others = tuple(others)
    for turning in find_turning(trace, constants):
        met = tuple(dict.fromkeys(norm for name, norm in folding.items() if name in turning.met))  # in one order
        if not turning.tables:
            yield Refused(
                f"{turning.parts[0][0]} {Rotation.kind}", Rotation.kind, "no table tells one basis from another"
            )
            continue
        names = {name for name, _ in turning.tables}
        free = (part for part in turning.parts if moved is not None and part[0] not in {*names, *moved})
        scaled = tuple(part for part in free if len(part[1]) > 1)
        whole = Rotation(turning.parts, turning.tables, scaled, met, turning.width, turning.fixes_ones)
        large = sum(rows.numel() for _, rows in scaled) * turning.width > MOST_PRODUCTS
        tried = (replace(whole, scaled=()), whole) if large else (whole,)
        found = next((each for each in tried if _tells(each, trace, others)), None)
        yield found or Refused(
            whole.name, whole.kind, "its parameters do not tell one basis from another: eigenvalues agree"
        )


def _tells(rotation: Rotation, trace: Trace, folded: Sequence[Freedom]) -> bool:
    """Return whether the second moment, with the freedoms folded, has eigenvalues that are apart."""
    moment: Tensor | float = 0.0
    for freedoms, names in _connected(folded, (*rotation.tables, *rotation.scaled)):
        params = dict(trace.params)
        params |= {name: params[name].to(torch.float64, copy=True) for each in freedoms for name in each.names}
        for freedom in freedoms:
            freedom.fold(params)
        tables, scaled = ([part for part in parts if part[0] in names] for parts in (rotation.tables, rotation.scaled))
        moment = moment + rotation.moment_of(params, tables, scaled)
    values = torch.linalg.eigvalsh(moment)
    return bool((values.diff() > DISTINCT * values[-1]).all())


def _connected(freedoms: Sequence[Freedom], parts: Iterable[Part]) -> Iterator[tuple[list[Freedom], set[str]]]:
    """Yield the parameters of these parts, those together that freedoms connect, with these freedoms in their order."""
    left = dict.fromkeys(name for name, _ in parts)
    touching = [each for each in freedoms if not left.keys().isdisjoint(each.names)]
    while left:
        names, found = {next(iter(left))}, list[Freedom]()
        while more := [each for each in touching if each not in found and not names.isdisjoint(each.names)]:
            found += more
            names.update(*(each.names for each in more))
        yield [each for each in touching if each in found], names
        left = {name: None for name in left if name not in names}
