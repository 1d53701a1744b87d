"""Represent groups of matrices that mix channels: what writes to them is turned, and what reads them is turned back."""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.wires.blocks import Block, Copy, copies
from quotient_manifolds.symmetries.wires.entries import CHUNK, Entries
from quotient_manifolds.symmetries.wires.labels import Roles
from quotient_manifolds.symmetries.wires.linear_algebra import RELATIVE, Array
from quotient_manifolds.symmetries.wires.partners import Partners
from quotient_manifolds.symmetries.wires.reparameterization import Reparameterization, gaussian
from quotient_manifolds.symmetries.wires.scaling import Scaling
from quotient_manifolds.symmetries.wires.walk import Walk

SWEEPS, SETTLED, NEAR = 50, 1e-14, 1e-4
FOLDED = 1e-13  # of log-scales: gains are 1 up to rounding
RANK = 1e-10  # relative, of singular values of what readers make of writers
ROUNDING = 16 * torch.finfo(torch.float64).eps  # of these, relative to the sizes of both
DISTINCT = 1e-6  # of the largest eigenvalue: nearer ones have eigenvectors that rounding decides


@dataclass(frozen=True, eq=False)
class Part:
    """Hold entries of a parameter, rows (m, n) or (taps, out, in), and the copies of the block along its axes."""

    entries: Entries
    out: tuple[Copy, ...]
    into: tuple[Copy, ...] = ()
    alone: bool = False  # nothing else moves the other side: lengths and angles along it are the function's own
    paired: bool = False  # pairs alone move the other side: partners measure it

    @property
    def constant(self) -> bool:
        """Return whether this is a bias."""
        return len(self.entries.shape) == 2

    def read(self, params: Mapping[str, Tensor], dtype: torch.dtype = torch.float64) -> Tensor:
        """Return the numbers as (taps, out, in), where the parameter is."""
        W = self.entries.read(params, dtype, there=True)
        return W if W.ndim == 3 else W.mT[None]

    def write(self, params: Params, W: Tensor) -> None:
        """Write the numbers (taps, out, in), in place."""
        self.entries.write(params, W if len(self.entries.shape) == 3 else W[0].mT)

    def act(self, params: Params, A: Tensor, C: Tensor) -> None:
        """Turn what is written by A and turn back what is read by C, in place, in the precision of A."""
        W = self.read(params, A.dtype)
        for copy in self.out:
            places, element = copy.places.to(W.device), copy.element(A, C).to(W.device)
            W = W.index_copy(1, places, element @ W.index_select(1, places))
        for copy in self.into:
            places, element = copy.places.to(W.device), copy.element(C, A).to(W.device)
            W = W.index_copy(2, places, W.index_select(2, places) @ element)
        self.write(params, W)

    def project(self, params: Params, one: Tensor, mean: Tensor) -> None:
        """Leave what no I + 1 w^T changes, in place: no mean in what is written, of what is read the answer to 1."""
        W = self.read(params).cpu()
        for copy in self.out:
            rows = W.index_select(1, copy.places) / copy.weights[:, None]
            change = copy.weights[:, None] * one[copy.channels, None] * (mean[copy.channels] @ rows)[:, None]
            W = W.index_copy(1, copy.places, rows * copy.weights[:, None] - change)
        for copy in self.into:
            answer = (W.index_select(2, copy.places) * copy.weights) @ one[copy.channels]
            W = W.index_copy(2, copy.places, answer[..., None] * mean[copy.channels] / copy.weights)
        self.write(params, W)

    def vectors(self, params: Mapping[str, Tensor], read: Tensor | None = None) -> Iterator[tuple[Tensor, bool]]:
        """Yield what is written to the block, or reads it, as rows (m, n), of the copies with all channels in order.

        read: the numbers, if they are not those of the parameters, which are read a part at a time.
        """
        for copy, axis in (*((copy, 1) for copy in self.out), *((copy, 2) for copy in self.into)):
            weights, order = copy.weights if axis == 2 else 1 / copy.weights, copy.channels.argsort()
            dual = copy.dual if axis == 1 else not copy.dual
            for W in self._parts(params, axis) if read is None else (read,):
                rows = W.index_select(axis, copy.places[order].to(W.device)).movedim(axis, -1).reshape(-1, len(order))
                yield rows * weights[order].to(W.device), dual

    def _parts(self, params: Mapping[str, Tensor], axis: int) -> Iterator[Tensor]:
        """Yield the numbers (taps, out, in), all of them along an axis, a part at a time along the other one."""
        (entries,) = [self.entries] if not self.constant else self.entries.apply(lambda layout: layout.mT[None])
        width = entries.shape[axis]
        for _, part in entries.parts(3 - axis, max(2 * width, CHUNK // max(1, width))):
            yield part.read(params, there=True)


@dataclass(frozen=True, eq=False)
class Gauge(Reparameterization):
    """Describe a block of channels that mix: (A W, W' A^-1) for all W that write to them and all W' that read them.

    acts: "orthogonal" is SO(n), "centred" those that fix the vector of ones, SO(n - 1); "mean" is I + 1 w^T; "linear"
    is SL(n), "complex" U(1): scales are `Scaling`'s. Where scales make gains other than 1 these are brought to 1 before
    an element acts, and back after it.

    The one place: rotations go to the eigenvectors of the second moment of all rows whose other side nothing moves,
    with ascending eigenvalues and a positive sum of cubes; a mean goes where the readers' answer to the mean is
    orthogonal to their answers to the rest, and as long; SL(n) goes where the second moments of what is written and of
    what reads are diagonal and proportional.
    """

    kind: str
    acts: str
    n: int
    parts: tuple[Part, ...]
    scalings: tuple[Scaling, ...]
    weights: Tensor
    partners: Partners
    dimension: int  # but for what is unseen, unreached or shifted as well
    gains: tuple[Entries, ...] = ()  # that multiply these channels
    number: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that a move touches, each once."""
        held = (name for scaling in self.scalings for name in scaling.names)
        return tuple(dict.fromkeys((*(part.entries.name for part in self.parts), *held)))

    @property
    def families(self) -> dict[str, int]:
        """Return the dimension of the group by its kind."""
        return {self.kind: self.dimension}

    @property
    def group(self) -> str:
        """Return the name of the group."""
        if self.acts in ("complex", "mean"):
            return {"complex": "U(1)", "mean": "I + 1 w^T"}[self.acts]
        return f"{'SL' if self.acts == 'linear' else 'SO'}({self.n - (self.acts == 'centred')})"

    @property
    def multiplies(self) -> bool:
        """Return whether elements may be ill-conditioned: those of rotations are not."""
        return self.acts in ("linear", "mean")

    @property
    def group_dimension(self) -> int:
        """Return the dimension of the whole group."""
        return max(self.dimension, self.n**2 - 1) if self.acts == "linear" else self.dimension

    def is_singular(self, params: Mapping[str, Tensor]) -> bool:
        """Return whether channels are mixed whose gain is 0, which no weight that follows can make up for."""
        gains = (each.read(params) for each in self.gains)
        return any(bool(g.abs().min() <= RELATIVE * g.abs().max()) for g in gains)

    def act(self, params: Params, A: Tensor, C: Tensor, *, control: bool = False) -> None:
        """Act with A (n, n) of the group and its inverse C, in place; as a control on one parameter alone.

        Autograd follows A and C, and parameters but for gains, which no element of the group changes.
        """
        found = ((scaling, torch.from_numpy(scaling.by_gains(params)).to(A.dtype)) for scaling in self.scalings)
        folded = [(scaling, z) for scaling, z in found if bool((z.abs() > FOLDED).any())]
        for scaling, z in folded:
            scaling.apply(params, z)
        for part in self.parts[:1] if control else self.parts:
            part.act(params, A, C)
        for scaling, z in folded[::-1]:
            scaling.apply(params, -z)

    def transform(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Act with exp(size X), X a Gaussian element of the Lie algebra with entries of about n^-1/2, in place."""
        n = self.n
        X = gaussian(torch.empty(n, n), generator) / n**0.5
        if self.acts == "mean":
            X = torch.outer(1 / self.weights, X[0])
        elif self.acts == "complex":
            X = X[0, 0] * torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
        elif self.acts == "linear":
            X = X - torch.eye(n, dtype=torch.float64) * X.trace() / n
        else:
            B = self.basis()
            X = B @ (B.mT @ (X - X.mT) @ B) @ B.mT / 2**0.5
            X = X * self.weights / self.weights[:, None]
        self.act(params, torch.linalg.matrix_exp(size * X), torch.linalg.matrix_exp(-size * X), control=control)

    def canonicalize(self, params: Params) -> None:
        """Go to the one place in the orbit, in place; with scales at theirs.

        A mean follows what pairs measure, which follows it: where that leads nowhere, only the first sweep is made.
        """
        eye = torch.eye(self.n, dtype=torch.float64)
        change, first = 0.0, dict[str, Tensor]()
        for _ in range(SWEEPS if self.acts == "mean" else 1):
            found = self._to_place(params)
            if found is None:
                return
            change = float((found[0] - eye).abs().max())
            if change <= SETTLED:
                return
            self.act(params, *found)
            if self.acts == "mean":
                first = first or {name: params[name].clone() for name in self.names}
        if not change <= NEAR:
            params.update(first)

    def _to_place(self, params: Params) -> tuple[Tensor, Tensor] | None:
        if self.acts in ("orthogonal", "centred"):
            B, S = self.basis(), self.weights
            *_, moment = self._moments(params, S)
            values, V = torch.linalg.eigh(B.mT @ moment @ B)
            if not _distinct(values):
                return None  # eigenvectors are what rounding decides
            turned = B @ V
            cubes = sum((each @ turned.to(each.device)).pow(3).sum(0).cpu() for each in self._rows(params, S))
            V = B @ (V * torch.where(torch.as_tensor(cubes) < 0, -1.0, 1.0))
            R = B @ V.mT + torch.eye(self.n, dtype=V.dtype) - B @ B.mT
            A = R * S / S[:, None]
            return A, torch.linalg.inv(A)
        if self.acts == "mean":
            return self._mean(params)
        if self.acts == "linear":
            return self._balance(params)
        return None

    def _rows(self, params: Mapping[str, Tensor], S: Tensor) -> Iterator[Tensor]:
        """Yield rows (m, n) whose other side nothing moves, in coordinates in which the group turns."""
        for part in self.parts:
            for v, dual in part.vectors(params) if part.alone else ():
                yield v / S.to(v.device) if dual else v * S.to(v.device)

    def _moments(self, params: Mapping[str, Tensor], S: Tensor) -> Iterator[Tensor]:
        """Yield the sum of r r^T over more and more rows, twice as many as channels at least, up to all of them."""
        moment, more = torch.zeros(self.n, self.n, dtype=torch.float64), 0
        for each in self._rows(params, S):
            moment += (each.mT @ each).cpu()
            more += len(each)
            if more >= 2 * self.n:
                yield moment
                more = 0
        yield moment

    def determined(self, params: Mapping[str, Tensor]) -> bool:
        """Return whether the second moment has distinct eigenvalues: some of its summands suffice to show that."""
        if self.acts not in ("orthogonal", "centred"):
            return not self.multiplies
        B = self.basis()
        for moment in self._moments(params, self.weights):
            values = torch.linalg.eigvalsh(B.mT @ moment @ B)
            if _distinct(values):
                return True
        return False

    def _mean(self, params: Params) -> tuple[Tensor, Tensor] | None:
        """Return I + 1 w^T that makes the answers W' P and W' 1 of the readers orthogonal, and of one length."""
        one, n = 1 / self.weights, self.n
        fixed = {name: params[name].clone() for name in self.names}
        for part in self.parts:
            part.project(fixed, one, self.weights / n)
        read = []
        for part in self.parts:
            if part.into:
                numbers = self.partners.measured(part.entries, params, by=ChainMap(fixed, params))
                read += [v.cpu() for v, dual in part.vectors(params, numbers) if dual]
        if not read:
            return None
        W = torch.cat(read) / self.weights  # in coordinates in which 1 is the vector of ones
        along = W.sum(1)
        size, rounding = along.square().sum(), RELATIVE * W.norm()
        if not size > rounding**2:
            return None  # they answer nothing to a mean
        P = torch.eye(n, dtype=torch.float64) - torch.full((n, n), 1 / n, dtype=torch.float64)
        rest = W @ P
        v = P @ (W.mT @ along) / size
        rest = rest - torch.outer(along, v)
        left = rest.norm()
        length = left / n**0.5 if left > rounding else torch.ones(())
        v = v + (1 - length / size.sqrt()) / n
        inverse = torch.eye(n, dtype=torch.float64) - torch.outer(one, v * self.weights)
        return torch.linalg.inv(inverse), inverse

    def _balance(self, params: Params) -> tuple[Tensor, Tensor] | None:
        """Return A, C with A C = I that make A M A^T = C^T N C diagonal, for second moments M, N of the two sides.

        Of lower rank, where readers and writers do not meet in all channels, they fill the first channels alone. Biases
        tell a side of which no weight does.
        """
        n = self.n
        none = torch.zeros(0, n, dtype=torch.float64)
        sides: dict[tuple[bool, bool], list[Tensor]] = defaultdict(lambda: [none])
        meeting = {False: none, True: none}
        for part in self.parts:
            for v, dual in part.vectors(params):  # as they are: what a pair does not reach, a bias may
                v = v.cpu()
                meeting[dual] = _triangle(torch.cat([meeting[dual], v]))
                if not part.paired and (part.alone or part.constant):
                    sides[dual, part.constant].append(v)
            for v, dual in part.vectors(params, self.partners.measured(part.entries, params)) if part.paired else ():
                sides[dual, part.constant].append(v.cpu())
        W, R = (torch.cat(sides[dual, len(sides[dual, False]) == 1]) for dual in (False, True))
        if not len(W) or not len(R):
            return None
        written, read = _triangle(W), _triangle(R)
        U, values, V = torch.linalg.svd(read @ written.mT)
        kept = _present(values, read, written)
        every = torch.linalg.svdvals(meeting[True] @ meeting[False].mT)
        if int(kept.sum()) < max(1, int(_present(every, *meeting.values()).sum())):  # others meet in more channels
            return None
        values, U, V = values[kept], U[:, kept], V[kept]
        A, C = (U / values.sqrt()).mT @ read, written.mT @ V.mT / values.sqrt()
        sign = torch.where((W @ A.mT).pow(3).sum(0) < 0, -1.0, 1.0)
        size = torch.linalg.det(A).abs().pow(1 / n) if len(values) == n else torch.ones(())
        A, C = A * sign[:, None] / size, C * sign * size
        return torch.nn.functional.pad(A, (0, 0, 0, n - len(A))), torch.nn.functional.pad(C, (0, n - len(A)))

    def basis(self) -> Tensor:
        """Return an orthonormal basis (n, m) of all vectors, or of those orthogonal to the ones: a reflection."""
        eye = torch.eye(self.n, dtype=torch.float64)
        if self.acts != "centred":
            return eye
        w = torch.full((self.n,), self.n**-0.5, dtype=torch.float64)
        w[0] += 1.0
        return (eye - 2 * torch.outer(w, w) / (w @ w))[:, 1:]


def _distinct(values: Tensor) -> bool:
    return len(values) < 2 or bool((values.diff() > DISTINCT * values[-1]).all())


def _present(values: Tensor, read: Tensor, written: Tensor) -> Tensor:
    """Say of the singular values of a product, descending, which of them are more than rounding."""
    return values > max(RANK * float(values[0]), ROUNDING * float(read.norm() * written.norm()))


def _triangle(rows: Tensor) -> Tensor:
    """Return R (n, n) with the second moment R^T R of rows (m, n)."""
    return torch.linalg.qr(torch.nn.functional.pad(rows, (0, 0, 0, rows.shape[1])), mode="r").R


def gauges(
    walk: Walk,
    roles: Roles,
    blocks: Iterable[Block],
    scalings: Sequence[Scaling],
    partners: Partners,
    own: Mapping[Any, int],
) -> Iterator[Gauge]:
    """Yield blocks as records.

    roles: what channels are for. scalings: those that are folded before; the blocks' weights are those at the point
    where they are. partners: pairs, of whose channels directions tell nothing until these measure them. own: dimensions
    of some, by their roots.
    """
    left, every = list(blocks), np.arange(walk.count)
    while left:
        mixed = np.zeros(walk.count, bool)  # by any of them
        for classes in {id(each.classes): each.classes for each in left if each.kind != "mean"}.values():
            roots = [root for each in left if each.kind != "mean" and each.classes is classes for root in each.roots]
            mixed |= np.isin(classes.find(every)[0], roots)
        parts = {id(each): [*_weights(walk, each, mixed, partners), *_biases(walk, each)] for each in left}
        told = [each for each in left if each.kind == "mean" or any(part.alone for part in parts[id(each)])] or left
        for block in told:  # first those that others tell, which tell others then
            every_part, size = tuple(parts[id(block)]), own.get(block.roots, block.dimension)
            joined = any(part.into for part in every_part) or (len(every_part) > 1 and block.kind != "mean")
            if joined and size > 0:
                names = {part.entries.name for part in every_part}
                met = tuple(each for each in scalings if not names.isdisjoint(each.names))
                kind = roles.mixing(block)
                gains = tuple(each.entries for each in walk.vectors if each.gain and copies(block, each.outs[0]))
                yield Gauge(kind, block.kind, len(block.roots), every_part, met, block.weights, partners, size, gains)
        left = [each for each in left if each not in told]


def _weights(walk: Walk, block: Block, mixed: Array, partners: Partners) -> Iterator[Part]:
    done = set()
    for each in walk.linears:
        if each.entries.key in done or each.shared == "other":
            continue
        out, into = copies(block, each.outs[0]), copies(block, each.takes)
        if out or into:
            done.add(each.entries.key)
            other = () if out and into else each.takes if out else each.outs[0]
            alone = len(other) > 0 and not mixed[other].any()
            paired = partners.mix(each.entries, 2 if out else 1)
            yield Part(each.entries, out, into, alone and not paired, alone and paired)


def _biases(walk: Walk, block: Block) -> Iterator[Part]:
    done = set()
    for each in walk.vectors:
        if each.gain or each.entries.key in done or each.shared == "other":
            continue
        about = np.stack(block.classes.find(each.outs), 1)
        alike = bool((about == about[:1]).all())  # rows of the same channels are turned together
        if places := copies(block, each.outs[0] if alike else each.outs.reshape(-1)):
            done.add(each.entries.key)
            (line,) = [each.entries] if alike else each.entries.apply(lambda layout: layout.reshape(1, -1))
            yield Part(line, places)
