r"""Act by invertible matrices on the channels of a wire, and compute the charges of their generators.

A wire is n channels of activations t, with the parameters that write them (t = W x) and read them (y = R t). A matrix A
maps t to A t if W becomes A W and R becomes R A^-1. The function is unchanged if no other operation acts on t, or if A
commutes with all that do. A `Slot` places a parameter on the wire: its entries as rows, one per channel. For a reader
these are the columns of R. A slot may have its own units: with gains g between the wire and a reader, t -> g * t, the
reader in the wire's units is R diag(g). A slot is dual if its channels are contracted with the wire's, as keys are with
queries, k^T q.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from quotient_manifolds.symmetries.groups.gains import Constants, Gain
from quotient_manifolds.symmetries.groups.rows import Draft, Params, Record, Rows, integers, numbers

_AGREEMENT = 1e-10
"""Largest difference between uses of a tied entry, relative to the largest entry of the parameter."""


class Charge(NamedTuple):
    """Hold the charges of generators, and the sums of the absolute values of their summands, of the same shape.

    A charge vanishes if value / size is a rounding error. A size of 0 means that all summands are 0: nothing is tested.
    """

    value: Tensor
    size: Tensor


@dataclass(frozen=True, eq=False)
class Slot(Record):
    """Assign rows of entries of a parameter to channels of a wire.

    rows: the entries, one row per channel; the columns of a reader's matrix are given as rows.
    channels: int64 (rows,), the channel of each row, distinct. A slot may cover only some of the wire's channels.
    writes: whether the parameter writes the channels, or reads them.
    dual: whether A and A^-T are exchanged, because the channels are contracted with the wire's.
    constant, gains: the units u = constant * product of gains, (rows,). An activation t of the wire is u * t in the
        slot. So a writer's rows are u times its rows in the wire's units, and a reader's rows 1 / u times.
    use: slots with one number `use` are the sides of one matrix, whose actions compose: a recurrent weight that reads
        and writes the wire becomes A W A^-1. Different uses of an entry are tied, and must agree on its new value.
    """

    rows: Rows
    channels: Tensor
    writes: bool
    dual: bool = False
    constant: Tensor | None = None
    gains: tuple[Gain, ...] = ()
    use: int = 0

    def __post_init__(self) -> None:
        self._store(channels=integers(self.channels, "channels"), gains=tuple(self.gains))
        if self.constant is not None:
            self._store(constant=numbers(self.constant))
        per_row = [self.channels, *([] if self.constant is None else [self.constant]), *(g.at for g in self.gains)]
        if any(each.shape != (len(self.rows),) for each in per_row):
            shapes = ", ".join(str(tuple(each.shape)) for each in per_row)
            raise ValueError(
                f"channels and units must have one number per row, {len(self.rows)}. Found shapes {shapes}."
            )
        if len(self.channels.unique()) < len(self.channels):
            raise ValueError(f"channels of {self.name!r} must be distinct. Give each copy of a channel its own slot.")

    @property
    def name(self) -> str:
        """Return the name of the parameter."""
        return self.rows.name

    @property
    def places(self) -> Tensor:
        """Return the flat indices of the entries, int64 (rows, columns)."""
        return self.rows.places

    @property
    def covariant(self) -> bool:
        """Return whether A acts on the rows V in the wire's units, as A V; otherwise they become A^-T V."""
        return self.writes != self.dual

    def on(self, channels: Tensor) -> Slot:
        """Return the slot restricted to some channels, which are renumbered in this order."""
        place = torch.full((int(torch.cat([channels, self.channels]).max()) + 1,), -1)
        place[channels] = torch.arange(len(channels))
        at = torch.nonzero(place[self.channels] >= 0)[:, 0]
        constant = None if self.constant is None else self.constant[at]
        gains = tuple(replace(gain, at=gain.at[at]) for gain in self.gains)
        return replace(self, rows=self.rows.some(at), channels=place[self.channels[at]], constant=constant, gains=gains)

    @property
    def plain(self) -> bool:
        """Return whether all units are 1."""
        return self.constant is None and not self.gains

    def units(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the units u, float64 (rows,). Raises ValueError if a gain is 0 or not finite."""
        u = torch.ones(len(self.rows), dtype=torch.float64) if self.constant is None else self.constant
        u = u.to(params[self.name].device) if self.name in params else u
        for gain in self.gains:
            u = u * gain.read(params)
        if not bool(torch.isfinite(u).all()) or not bool(u.all()):
            raise ValueError(f"gains between the wire and {self.name!r} must be finite and not 0. Found others.")
        return u

    def moved(self, params: Mapping[str, Tensor], A: Tensor, sets: Tensor) -> Tensor:
        """Return S A S^-1 V, the rows V acted on by A, with S = diag(u) for writers and diag(u)^-1 for readers.

        A: blocks (k, m, m) on disjoint sets of channels (k, m). Other channels, and uncovered sets, are unchanged.
        """
        V, (covered, at) = self.rows.seen(params), self.among(sets)
        s = None if self.plain else self._from_wire(params)
        V, A, at = V if s is None else V / s, A[covered].to(V.device), at.to(V.device)
        if at.numel() == len(V) and torch.equal(at.flatten(), torch.arange(len(V), device=V.device)):
            V = (A @ V.reshape(*at.shape, -1)).flatten(0, 1)
        else:
            V = V.index_copy(0, at.flatten(), (A @ V[at]).flatten(0, 1))
        return V if s is None else s * V

    def among(self, sets: Tensor) -> tuple[Tensor, Tensor]:
        """Return which sets of channels (k, m) the slot covers, bool (k,), and the rows of these sets."""
        row = torch.full((int(max(self.channels.max(), sets.max())) + 1,), -1)
        at = row.index_copy(0, self.channels, torch.arange(len(self.channels)))[sets]
        covered = (at >= 0).all(1)
        return covered, at[covered]

    def in_wire(self, x: Mapping[str, Tensor], y: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return S^-1 V and S Y, the rows of x and of a cotangent y in the wire's units, both (rows, columns)."""
        s = self._from_wire(x)
        return self.rows.read(x) / s, s * self.rows.dual(y)

    def _from_wire(self, params: Mapping[str, Tensor]) -> Tensor:
        u = self.units(params)[:, None]
        return u if self.writes else 1 / u


@dataclass(frozen=True, eq=False)
class Wire(Record):
    r"""Act by invertible matrices A on n channels, through the slots of the parameters that write and read them.

    With the units u of a slot and U = diag(u), writers become U A U^-1 V, and readers (as rows) U^-1 A^-T U V. In dual
    slots A and A^-T are exchanged. Gains are fixed, so that act(act(w, A), B) = act(w, B A); another wire, in which a
    gain is a slot, may change it. A acts on effective biases, which include their `constants`.

    Raises ValueError for a channel that the wire does not have, for a gain that is an entry of a slot, and for slots of
    one use that share entries but whose actions do not commute.
    """

    slots: tuple[Slot, ...]
    channels: int
    constants: Constants = field(default_factory=Constants)

    def __post_init__(self) -> None:
        self._store(slots=tuple(self.slots))
        for slot in self.slots:
            if int(slot.channels.min()) < 0 or int(slot.channels.max()) >= self.channels:
                raise ValueError(f"channels must be 0 to {self.channels - 1}. Found others for {slot.name!r}.")
            for gain in slot.gains:
                if any(gain.entries.meets(other.rows) for other in self.slots):
                    raise ValueError(
                        f"gains must be no entries of a slot of the wire. Found {gain.entries.name!r} as both."
                    )
        for one, other in self.sides:
            if not _commute(self.slots[one], self.slots[other]):
                raise ValueError(
                    f"slots of one use must be the two sides of one matrix where they share entries. Found others for "
                    f"{self.slots[one].name!r}. Give tied uses different numbers `use`."
                )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that `act` changes, each once."""
        return tuple(dict.fromkeys((*(slot.name for slot in self.slots), *self.constants.names)))

    @cached_property
    def possible(self) -> Tensor:
        """Return which entries of A - 1 may differ from 0, bool (n, n); see `possible_on`."""
        return self.possible_on(torch.arange(self.channels)[None])[0]

    def possible_on(self, sets: Tensor) -> Tensor:
        """Return which entries of blocks of A - 1 on sets of channels (k, m) may differ from 0, bool (k, m, m).

        If A_ij is not 0, channel i receives a multiple of channel j. So all slots in which A acts that cover j must
        cover i, and all slots in which A^-T acts that cover i must cover j.
        """
        mask = torch.ones(*sets.shape, sets.shape[1], dtype=torch.bool)
        for slot in self.slots:
            if len(slot.channels) < self.channels:
                covered = self._covered(slot)[sets]
                there, here = covered[:, None], covered[:, :, None]
                mask &= ~(there & ~here) if slot.covariant else ~(here & ~there)
        return mask

    def on(self, channels: Tensor) -> Wire:
        """Return the wire restricted to some channels, in this order."""
        covering = (slot for slot in self.slots if bool(torch.isin(slot.channels, channels).any()))
        return Wire(tuple(slot.on(channels) for slot in covering), len(channels), self.constants)

    def act(self, params: Mapping[str, Tensor], A: Tensor) -> Params:
        """Return all parameters, acted on by A (n, n), in their own dtypes; gains are unchanged.

        The result is computed in float64 and cast once. It is differentiable by the parameters and by A.
        Raises ValueError if A has another shape, is singular, or mixes channels that a slot covers with others. Also if
        a parameter is missing or has another shape, a gain is 0, or uses of a tied entry disagree on its value.
        """
        draft = Draft(params)
        self.move(draft, A)
        return draft.finished()

    def move(self, draft: Draft, A: Tensor, sets: Tensor | None = None) -> None:
        """Act by A (n, n) on the parameters in a draft, in place. Raises like `act`.

        sets: disjoint sets of channels (k, m), if A is the identity outside of their blocks, which saves time. A may
        then be given as these blocks (k, m, m).
        """
        A, dual, sets = self._with_dual(A, sets)

        def write(draft: Draft, slots: list[Slot]) -> Tensor:
            for slot in slots:
                blocks = A if slot.covariant else dual
                if sets is None:
                    c = slot.channels.to(A.device)
                    draft.write(slot.rows, slot.moved(draft, blocks[c[:, None], c][None], slot.channels[None]))
                else:
                    draft.write(slot.rows, slot.moved(draft, blocks, sets))
            return draft[slots[0].name]

        self.constants.include(draft)
        for name, uses in self._uses().items():
            if len(uses) == 1:
                write(draft, uses[0])
            else:
                draft[name] = _agreed(uses, [write(Draft(draft), slots) for slots in uses])
        self.constants.include(draft, -1.0)

    def charge(self, x: Mapping[str, Tensor], y: Mapping[str, Tensor], sets: Tensor | None = None) -> Charge:
        r"""Compute C (n, n) with <C, X> = d/dt <y, act(x, exp(t X))> at t = 0 for every X that is `possible`.

        C = sum of (u y) (x / u)^T over writers - (u x) (y / u)^T over readers; a dual slot has minus the transpose.
        x: parameters. y: a cotangent, of the same shapes. sets: disjoint sets of channels (k, m); C is computed in
        their blocks only, and 0 elsewhere. A slot contributes only to the channels that it covers. A tied entry counts
        once, in equal parts by use.
        """
        none = torch.zeros(self.channels, self.channels, dtype=torch.float64)
        value = size = none if sets is None else none.new_zeros(*sets.shape, sets.shape[1])
        for slot, a, b in self._pairs(x, y):
            c: Tensor | None = slot.channels[None]
            a, b = a[None], b[None]
            if sets is not None:
                c, a, b = _in_sets(slot, sets, a[0], b[0])
            value = _add(value, c, b @ a.mT if slot.covariant else -(a @ b.mT))
            with torch.no_grad():
                a, b = a.abs(), b.abs()
                size = _add(size, c, b @ a.mT if slot.covariant else a @ b.mT)
        return Charge(value, size) if sets is None else Charge(*(_add(none, sets, each) for each in (value, size)))

    def overlap(self, x: Mapping[str, Tensor], y: Mapping[str, Tensor]) -> Tensor:
        r"""Compute M (n, n) with <M, A> = <y, act(x, A)> + constant for orthogonal A, as a sum over slots.

        M = sum of (u y) (x / u)^T over writers + (y / u) (u x)^T over readers. The skew parts of M and of the charge
        are equal. If all units are 1, the orthogonal A that brings x closest to y is U V^T, with the SVD M = U S V^T
        (Procrustes). The two sides of one matrix count separately.
        """
        total = torch.zeros(self.channels, self.channels, dtype=torch.float64)
        for slot, a, b in self._pairs(x, y):
            total = _add(total, slot.channels[None], (b @ a.mT)[None])
        return total

    def _pairs(self, x: Mapping[str, Tensor], y: Mapping[str, Tensor]) -> Iterator[tuple[Slot, Tensor, Tensor]]:
        """Yield each slot with its rows of x and of a cotangent y in the wire's units; uses of tied entries share y."""
        x, shares = self.constants.included(x), self.constants.pulled(x, y)
        for name, count in self._counts().items():
            if name in y and y[name].numel() == count.numel():
                shares[name] = y[name] / count.view(y[name].shape).to(y[name].device)
        for slot in self.slots:
            yield slot, *slot.in_wire(x, shares)

    def _covered(self, slot: Slot) -> Tensor:
        """Return which channels a slot covers, bool (n,)."""
        return torch.zeros(self.channels, dtype=torch.bool).index_fill_(0, slot.channels, True)

    def _uses(self) -> dict[str, list[list[Slot]]]:
        """Return the slots of each use, by parameter."""
        uses: dict[str, dict[int, list[Slot]]] = {}
        for slot in self.slots:
            uses.setdefault(slot.name, {}).setdefault(slot.use, []).append(slot)
        return {name: list(each.values()) for name, each in uses.items()}

    def _counts(self) -> dict[str, Tensor]:
        """Return the number of uses of each entry, at least 1, for parameters with several uses."""
        counts = {}
        for name, uses in self._uses().items():
            if len(uses) > 1:
                counts[name] = sum(_touched(slots).double() for slots in uses).clamp(min=1)  # type: ignore[union-attr]
        return counts

    @cached_property
    def sides(self) -> tuple[tuple[int, int], ...]:
        """Return the pairs of slot numbers with one use and shared entries: the two sides of one matrix."""
        pairs = combinations(range(len(self.slots)), 2)
        slots = self.slots
        return tuple((i, j) for i, j in pairs if slots[i].use == slots[j].use and slots[i].rows.meets(slots[j].rows))

    def _with_dual(self, A: Tensor, sets: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Check A; return A and A^-T in float64, as blocks with their sets if A is the identity outside of these."""
        n = self.channels
        alone = sets is not None and tuple(A.shape) == (*sets.shape, sets.shape[1])
        if (not alone and tuple(A.shape) != (n, n)) or A.is_complex():
            raise ValueError(f"A must be a real matrix of shape {(n, n)}. Found {tuple(A.shape)}, {A.dtype}.")
        whole = A = A.double()
        if sets is not None and not alone:
            at = sets[:, :, None], sets[:, None]
            rest = torch.eye(n, dtype=A.dtype, device=A.device).index_put(at, A.detach()[at])
            sets, A = (sets, A[at]) if torch.equal(rest, A.detach()) else (None, A)
        inverse, info = torch.linalg.inv_ex(A)
        norms = torch.linalg.matrix_norm(A, 1) * torch.linalg.matrix_norm(inverse, 1)
        condition = float(norms.detach().max())
        eps = torch.finfo(torch.float64).eps
        if bool(info.any()) or not condition < 1 / eps:
            raise ValueError(f"A must be invertible. Found a matrix of condition number {condition:.1e}.")
        if sets is not None:  # a gauge has only blocks that its wire admits
            return A, inverse.mT, sets
        A = whole
        crossing = A.detach().abs().where(~(self.possible | torch.eye(n, dtype=torch.bool)).to(A.device), 0.0)
        if float(crossing.max()) > n * eps * float(A.detach().abs().max()):
            i, j = divmod(int(crossing.argmax()), n)
            raise ValueError(
                f"A must not mix channels that a slot covers with others. Found A[{i}, {j}] = {A.detach()[i, j]:.2g}."
            )
        return A, inverse.mT, None


def _in_sets(slot: Slot, sets: Tensor, *rows: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the numbers of the sets that a slot covers, None for all, and its rows (rows, columns) by set."""
    covered, at = slot.among(sets)
    at = at.to(rows[0].device)
    if torch.equal(at.flatten(), torch.arange(len(rows[0]), device=at.device)):
        a, b = (each.reshape(*at.shape, -1) for each in rows)
    else:
        a, b = (each[at] for each in rows)
    return None if bool(covered.all()) else torch.nonzero(covered)[:, 0], a, b


def _add(total: Tensor, sets: Tensor | None, part: Tensor) -> Tensor:
    """Add blocks (k, m, m) to a matrix (n, n) at channels (k, m), or to blocks at their numbers (k,), None for all."""
    if sets is None:
        return total.to(part.device) + part
    c = sets.to(part.device)
    if c.ndim == 1:
        return total.to(part.device).index_add(0, c, part)
    return total.to(part.device).index_put((c[:, :, None], c[:, None]), part, accumulate=True)


def _touched(slots: list[Slot]) -> Tensor:
    """Return which entries of a parameter are in any of the slots, bool (entries,)."""
    return torch.stack([slot.rows.touched for slot in slots]).any(0)


def _commute(a: Slot, b: Slot) -> bool:
    """Return whether the actions on the rows of two slots commute.

    Both products are bilinear in the two matrices, so that a random pair of rank 1 decides for all.
    """
    generator = torch.Generator().manual_seed(0)
    w, *vectors = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in (prod(a.rows.shape), len(a.rows), len(a.rows), len(b.rows), len(b.rows))
    )

    def applied(w: Tensor, slot: Slot, u: Tensor, v: Tensor) -> Tensor:
        places = slot.places
        return w.index_copy(0, places.flatten(), torch.outer(u, v @ w[places]).flatten())

    one = applied(applied(w, a, *vectors[:2]), b, *vectors[2:])
    two = applied(applied(w, b, *vectors[2:]), a, *vectors[:2])
    return torch.allclose(one, two, rtol=0, atol=1e-9 * float(one.abs().max()))


def _agreed(uses: list[list[Slot]], values: list[Tensor]) -> Tensor:
    """Return the value that all uses of a parameter give to its entries. Raises ValueError if they disagree."""
    if len(values) == 1:
        return values[0]
    result, name = values[0], uses[0][0].name
    known = _touched(uses[0]).to(result.device).view(result.shape)
    for slots, value in zip(uses[1:], values[1:], strict=True):
        touched = _touched(slots).to(result.device).view(result.shape)
        change = float((value - result).detach().abs().where(known & touched, 0.0).max())
        if change > _AGREEMENT * float(value.detach().abs().max()):
            raise ValueError(f"uses of {name!r} must agree on tied entries. Found values {change:.1e} apart.")
        result, known = value.where(touched, result), known | touched
    return result
