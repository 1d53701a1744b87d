"""Add directions, at the parameters where they were found, that leave the function unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from quotient_manifolds.symmetries.groups.rows import Draft, Params, Record, Rows, numbers, typical
from quotient_manifolds.symmetries.groups.symmetry import Symmetry
from quotient_manifolds.symmetries.groups.wire import Charge

_RANK = 1e-10
"""Below which singular values, or eigenvalues of a Gram matrix, are 0, relative to the largest."""


@dataclass(frozen=True, eq=False)
class Part(Record):
    """Add left @ z @ right (rows, columns) to rows of a parameter; z is (a, b).

    left: (rows, a), right: (b, columns), float64; None is the identity.
    """

    rows: Rows
    left: Tensor | None = None
    right: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if (value := getattr(self, name)) is not None:
                self._store(**{name: numbers(value)})
        wrong = self.left is not None and (self.left.ndim != 2 or len(self.left) != len(self.rows))
        if wrong or (self.right is not None and (self.right.ndim != 2 or self.right.shape[1] != self.rows.columns)):
            rows, columns = len(self.rows), self.rows.columns
            raise ValueError(f"left and right must have shapes ({rows}, a) and (b, {columns}). Found others.")

    @property
    def shape(self) -> tuple[int, int]:
        """Return (a, b)."""
        a = len(self.rows) if self.left is None else self.left.shape[1]
        return a, self.rows.columns if self.right is None else len(self.right)

    def change(self, z: Tensor) -> Tensor:
        """Return left @ z @ right."""
        z = z if self.left is None else self.left.to(z.device) @ z
        return z if self.right is None else z @ self.right.to(z.device)

    def pulled(self, y: Tensor, absolute: bool = False) -> Tensor:
        """Return left^T y right^T (a, b), or with absolute values of both factors."""
        left, right = (w if w is None or not absolute else w.abs() for w in (self.left, self.right))
        y = y if left is None else left.to(y.device).mT @ y
        return y if right is None else y @ right.to(y.device).mT

    def ranks(self) -> tuple[int, int]:
        """Return the ranks of left and right."""
        a, b = self.shape
        return a if self.left is None else _rank(self.left), b if self.right is None else _rank(self.right)


@dataclass(frozen=True, eq=False)
class Translation(Symmetry):
    r"""Add left @ z @ right to rows of parameters, part by part, with one unknown z (a, b). Elements are z.

    The directions hold at the weights they were computed at. With k directions as columns of K,

    | directions | parts |
    |---|---|
    | outputs of W (o, i) that nobody reads, K (o, k) | W: left = K |
    | inputs of W that are never reached, K (i, k) | W: right = K^T |
    | a shift z (n, 1) of a wire that its readers R take back | b: right = 1; the readers' biases: left = -R |
    | an adapter beside its base, W + s B A: z added to A | A: left = 1; W: left = -s B |

    ValueError for parts with z of different shapes, and parts that share entries.
    """

    parts: tuple[Part, ...]

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
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape

    @property
    def local(self) -> bool:
        return True

    def act(self, params: Mapping[str, Tensor], element: Tensor) -> Params:
        """Return the parameters with left @ z @ right added, z = element (a, b), cast once to their dtypes.

        ValueError for an element of another shape, a missing parameter, and one of another shape.
        """
        z, draft = self.generator(element), Draft(params)
        for part in self.parts:
            draft.add(part.rows, part.change(z))
        return draft.finished()

    def element(self, generator: torch.Generator, scale: float = 1.0) -> Tensor:
        """Draw z (a, b), Gaussian of standard deviation `scale`."""
        return scale * torch.randn(self.shape, generator=generator, dtype=torch.float64)

    def moved(self, params: Mapping[str, Tensor], generator: torch.Generator, scale: float = 1.0) -> Params:
        entries = torch.cat([part.rows.entries(params).reshape(-1).cpu() for part in self.parts])
        return self.act(params, self.element(generator, scale * typical(entries)))

    def charge(self, params: Mapping[str, Tensor], cotangent: Mapping[str, Tensor]) -> Charge:
        """Compute the sum of left^T y right^T over parts, (a, b), and the size of its summands."""
        value = size = torch.zeros(self.shape, dtype=torch.float64)
        for part in self.parts:
            y = part.rows.dual(cotangent)
            value = value.to(y.device) + part.pulled(y)
            with torch.no_grad():
                size = size.to(y.device) + part.pulled(y.abs(), absolute=True)
        return Charge(value, size)

    def dimension(self, params: Mapping[str, Tensor]) -> int:
        """Return the rank of z -> changes of all parts, at most a b."""
        (a, b), ranks = self.shape, [part.ranks() for part in self.parts]
        if len(ranks) == 1 or (a, b) in ranks:
            return max(one * other for one, other in ranks)
        gram = torch.zeros(a * b, a * b, dtype=torch.float64)
        for part in self.parts:
            left = torch.eye(a, dtype=torch.float64) if part.left is None else part.left
            right = torch.eye(b, dtype=torch.float64) if part.right is None else part.right
            each = torch.kron(left.mT @ left, right @ right.mT)
            gram += each / each.diagonal().amax().clamp(min=1e-300)
        eigenvalues = torch.linalg.eigvalsh(gram)
        return int((eigenvalues > _RANK * eigenvalues[-1]).sum())


def _rank(M: Tensor) -> int:
    return int(torch.linalg.matrix_rank(M, rtol=_RANK)) if M.numel() else 0
