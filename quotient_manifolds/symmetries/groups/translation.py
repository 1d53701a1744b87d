"""Add what leaves the function unchanged: numbers times others, or times weights, which are read where it acts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from quotient_manifolds.symmetries.groups.factors import Factor
from quotient_manifolds.symmetries.groups.rows import Draft, Record, Rows, numbers, typical
from quotient_manifolds.symmetries.groups.symmetry import Symmetry
from quotient_manifolds.symmetries.groups.wire import Charge

_RANK = 1e-10
"""Below which singular values, or eigenvalues of a Gram matrix, are 0, relative to the largest."""


@dataclass(frozen=True, eq=False)
class Part(Record):
    """Add left @ z @ right (rows, columns) to rows of a parameter; z is (a, b).

    left: (rows, a), right: (b, columns), float64, or such as are read at the parameters; None is the identity.
    """

    rows: Rows
    left: Tensor | Factor | None = None
    right: Tensor | Factor | None = None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if isinstance(value := getattr(self, name), Tensor):
                self._store(**{name: numbers(value)})
        left, right = ((0, 0) if w is None else tuple(w.shape) for w in (self.left, self.right))
        rows, columns = len(self.rows), self.rows.columns
        wrong = self.left is not None and (len(left) != 2 or left[0] != rows)
        if wrong or (self.right is not None and (len(right) != 2 or right[1] != columns)):
            raise ValueError(f"left and right must have shapes ({rows}, a) and (b, {columns}). Found others.")

    def ranks(self, params: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return the ranks of left and right at these parameters."""
        (a, b), (left, right) = self.shape, self.at(params)
        return a if left is None else _rank(left), b if right is None else _rank(right)

    @property
    def shape(self) -> tuple[int, int]:
        """Return (a, b)."""
        a = len(self.rows) if self.left is None else self.left.shape[1]
        return a, self.rows.columns if self.right is None else self.right.shape[0]

    def read(self) -> Iterator[Rows]:
        """Yield the entries that left and right are made of."""
        for each in (self.left, self.right):
            yield from () if each is None or isinstance(each, Tensor) else each.read()

    def at(self, params: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Return the numbers of left and right at these parameters."""
        return _numbers(self.left, params), _numbers(self.right, params)

    def change(self, params: Mapping[str, Tensor], z: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return left @ z and right at these parameters, whose product is added."""
        if isinstance(self.left, Tensor):
            z = self.left.to(z.device) @ z
        elif self.left is not None:
            z = self.left.times(params, z)
        return z, _numbers(self.right, params)


@dataclass(frozen=True, eq=False)
class Translation(Symmetry):
    r"""Add left @ z @ right to rows of parameters, part by part, with one unknown z (a, b). Elements are z.

    Factors must be such as the action does not change: then all elements commute, and act(w, z) is w plus the sum of
    z_j xi_j(w). With weights for factors it holds at all weights, with numbers at those that they are computed at.
    K (o or i, k) has k directions as columns.

    | moved | parts |
    |---|---|
    | constants z (n, 1) of a wire that its readers V take back | b: right = 1; the readers' biases: left = -V |
    | an adapter beside its base, W + s B A: z added to A | A: left = 1; W: left = -s B |
    | V behind a norm with gains g and biases b, and its bias | V: right = 1 / g; c: right = -sum of b / g |
    | outputs of W (o, i) that nobody reads, inputs that are never reached | W: left = K; W: right = K^T |

    kind: how it was read, "" if it is not known: "unread" of what nothing reads, "unreached" of inputs that are always
    0, "mean" of what is added to a mean that is free, "constant" of weights whose inputs have a known sum, "beside" of
    maps that read the same, "shift" of constants that one parameter adds and others take back.

    ValueError for parts with z of different shapes, and parts that share entries.
    """

    parts: tuple[Part, ...]
    kind: str = ""

    def __post_init__(self) -> None:
        self._store(parts=tuple(self.parts))
        if len(shapes := {part.shape for part in self.parts}) != 1:
            raise ValueError(f"parts must share one unknown z (a, b). Found shapes {sorted(shapes)}.")
        for one, other in combinations(self.parts, 2):
            if one.rows.meets(other.rows):
                raise ValueError(f"parts must not share entries. Found entries of {one.rows.name!r} in two.")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.rows.name for part in self.parts))

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.names, *(rows.name for part in self.parts for rows in part.read()))))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape

    def move(self, draft: Draft, element: Tensor) -> None:
        """Add left @ z @ right, z = element (a, b); raises as `Symmetry.move`."""
        z = self.generator(element)
        changes = [part.change(draft, z) for part in self.parts]  # before any part moves what another one reads
        for part, (change, right) in zip(self.parts, changes, strict=True):
            draft.add(part.rows, change, right)

    def element(self, generator: torch.Generator, scale: float = 1.0) -> Tensor:
        """Draw z (a, b), Gaussian of standard deviation `scale`."""
        return scale * torch.randn(self.shape, generator=generator, dtype=torch.float64)

    def drawn(self, params: Mapping[str, Tensor], generator: torch.Generator, scale: float = 1.0) -> Tensor:
        every = (part.rows for part in self.parts)
        stored = (rows.seen(params) if rows.plain else rows.entries(params) for rows in every)
        return self.element(generator, scale * typical(*stored))

    def charge(self, params: Mapping[str, Tensor], cotangent: Mapping[str, Tensor]) -> Charge:
        """Compute the sum of left^T y right^T over parts, (a, b), and the size of its summands."""
        value = size = torch.zeros(self.shape, dtype=torch.float64)
        for part in self.parts:
            y, (left, right) = part.rows.dual(cotangent), part.at(params)
            value = value.to(y.device) + _pulled(y, left, right)
            with torch.no_grad():
                left, right = (None if w is None else w.abs() for w in (left, right))
                size = size.to(y.device) + _pulled(y.abs(), left, right)
        return Charge(value, size)

    def dimension(self, params: Mapping[str, Tensor]) -> int:
        """Return the rank of z -> changes of all parts, at most a b."""
        (a, b), every = self.shape, [part.at(params) for part in self.parts]
        ranks = [part.ranks(params) for part in self.parts]
        if len(ranks) == 1 or (a, b) in ranks:
            return max(one * other for one, other in ranks)
        gram = torch.zeros(a * b, a * b, dtype=torch.float64)
        for left, right in every:
            left = torch.eye(a, dtype=torch.float64) if left is None else left
            right = torch.eye(b, dtype=torch.float64) if right is None else right
            each = torch.kron(left.mT @ left, right @ right.mT)
            gram += each / each.diagonal().amax().clamp(min=1e-300)
        eigenvalues = torch.linalg.eigvalsh(gram)
        return int((eigenvalues > _RANK * eigenvalues[-1]).sum())


def _numbers(factor: Tensor | Factor | None, params: Mapping[str, Tensor]) -> Tensor | None:
    return factor if factor is None or isinstance(factor, Tensor) else factor.at(params)


def _pulled(y: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Return left^T y right^T, in the order that takes the fewest products: of a table one side is much longer."""
    left, right = (None if w is None else w.to(y.device).mT for w in (left, right))
    factors = [each for each in (left, y, right) if each is not None]
    return torch.linalg.multi_dot(factors) if len(factors) > 1 else y


def _rank(M: Tensor) -> int:
    return int(torch.linalg.matrix_rank(M, rtol=_RANK)) if M.numel() else 0
