"""Translate parameters such that the function is unchanged, by constants times factors, which may be weights."""

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
"""Singular values, or eigenvalues of a Gram matrix, below this, relative to the largest, count as 0."""


@dataclass(frozen=True, eq=False)
class Part(Record):
    """Add left @ z @ right (rows, columns) to rows of a parameter; z is (a, b).

    left: (rows, a), right: (b, columns), float64 or a `Factor` of the parameters; None is the identity.
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
        """Yield the entries of parameters that left and right depend on."""
        for each in (self.left, self.right):
            yield from () if each is None or isinstance(each, Tensor) else each.read()

    def at(self, params: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Return the matrices left and right at these parameters."""
        return _numbers(self.left, params), _numbers(self.right, params)

    def change(self, params: Mapping[str, Tensor], z: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return left @ z and right at these parameters; their product is added."""
        if isinstance(self.left, Tensor):
            z = self.left.to(z.device) @ z
        elif self.left is not None:
            z = self.left.times(params, z)
        return z, _numbers(self.right, params)


@dataclass(frozen=True, eq=False)
class Translation(Symmetry):
    r"""Translate rows of parameters by left @ z @ right, part by part, with one z (a, b) for all. Elements are z.

    The action must not change the factors: then all elements commute, and act(w, z) = w + sum of z_j xi_j(w). With
    weights as factors the symmetry holds at all weights; with constant factors, at the weights they were computed at.
    In the table, K (o or i, k) has k directions as columns.

    | translated | parts |
    |---|---|
    | constants z (n, 1) of a wire, compensated behind its readers V | b: right = 1; the readers' biases: left = -V |
    | an adapter beside its base, W + s B A: z added to A | A: left = 1; W: left = -s B |
    | V behind a norm with gains g and biases b, and its bias c | V: right = 1 / g; c: right = -sum of b / g |
    | outputs of W (o, i) that nothing reads; inputs that are always 0 | W: left = K; W: right = K^T |

    kind: "unread" for outputs that nothing reads, "unreached" for inputs that are always 0, "mean" for changes of a
    mean that nothing depends on, "constant" for weights whose inputs have a known sum, "beside" for maps with the same
    input, "shift" for constants that one parameter adds and others subtract, "" if it is not known.

    Raises ValueError for parts with z of different shapes, and for parts that share entries.
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
        """Add left @ z @ right, z = element (a, b). Raises like `Symmetry.move`."""
        z = self.generator(element)
        changes = [part.change(draft, z) for part in self.parts]  # first, as a part may change the factors of another
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
        """Return the rank of the map from z to the changes of all parts, at most a b."""
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
    """Return left^T y right^T, in the order with the fewest products, as one side of a table is much longer."""
    left, right = (None if w is None else w.to(y.device).mT for w in (left, right))
    factors = [each for each in (left, y, right) if each is not None]
    return torch.linalg.multi_dot(factors) if len(factors) > 1 else y


def _rank(M: Tensor) -> int:
    return int(torch.linalg.matrix_rank(M, rtol=_RANK)) if M.numel() else 0
