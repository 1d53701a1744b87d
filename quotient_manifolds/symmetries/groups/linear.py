"""Act on a few parameters by the flows of linear vector fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf, log, prod

import torch
from torch import Tensor

from quotient_manifolds.symmetries.groups.rows import Draft, flattened, integers, numbers
from quotient_manifolds.symmetries.groups.symmetry import Symmetry
from quotient_manifolds.symmetries.groups.wire import Charge

_TERMS = 20
"""Terms of the Taylor series of a flow of norm 1: the relative remainder is 1 / 21! < 1e-19."""
_FAR = 1e4
"""Largest norm of a field whose flow is computed for unit time."""
_RANK = 1e-10
"""Singular values below this, relative to the largest, count as 0."""


@dataclass(frozen=True, eq=False)
class Linear(Symmetry):
    r"""Act by the flow of d theta / dt = sum_j z_j (M_j theta + c_j) for unit time, with coordinates z (k,).

    theta (n,) holds the entries of the parameters in `shapes`, name by name. Elements and generators are both
    coordinates z, and `exp` is the identity on them, as for `Torus`. If the (M_j, c_j) span a Lie algebra, two small
    elements compose to an element, but in general its coordinates are not the sum of theirs.

    shapes: (name, shape) of each parameter. index: int64 (3, nonzero), the numbers j, p, q of each entry M_j[p, q], or
    c_j[p] if q = n. values: (nonzero,), these entries. size: k.

    >>> turn = Linear((("w", (2,)),), torch.tensor([[0, 0], [0, 1], [1, 0]]), torch.tensor([-1.0, 1.0]), 1)
    >>> turn.act({"w": torch.tensor([3.0, 4.0])}, torch.tensor([torch.pi / 2]))["w"]
    tensor([-4.0000,  3.0000])

    Raises ValueError for indices out of range, and for names that occur twice.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    index: Tensor
    values: Tensor
    size: int

    def __post_init__(self) -> None:
        shapes = tuple((name, tuple(shape)) for name, shape in self.shapes)
        self._store(shapes=shapes, index=integers(self.index, "index"), values=numbers(self.values))
        if self.index.shape != (3, *self.values.shape) or self.values.ndim != 1:
            found = f"{tuple(self.index.shape)} and {tuple(self.values.shape)}"
            raise ValueError(f"index and values must have shapes (3, k) and (k,). Found {found}.")
        n = self.entries
        for what, numbered, most in zip(
            ("generators", "changed entries", "entries"), self.index, (self.size, n, n + 1), strict=True
        ):
            if numbered.numel() and not 0 <= int(numbered.min()) <= int(numbered.max()) < most:
                raise ValueError(f"{what} must be numbers from 0 to {most - 1}. Found others.")
        if len({*self.names}) < len(shapes):
            raise ValueError(f"names must be distinct. Found {list(self.names)}.")

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], fields: Tensor) -> Linear:
        """Return the symmetry with generators [M_j c_j], a dense tensor (k, n, n + 1)."""
        sparse = fields.detach().to_sparse_coo().coalesce()
        return cls(tuple(shapes.items()), sparse.indices(), sparse.values(), len(fields))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.shapes)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size,)

    @property
    def entries(self) -> int:
        """Return n, the number of entries of all parameters."""
        return sum(prod(shape) for _, shape in self.shapes)

    def move(self, draft: Draft, element: Tensor) -> None:
        """Flow for unit time along z = element (k,). Raises like `Symmetry.move`, and for a field of a norm above 1e4.

        Each step is a Taylor series, and so short that the norm of its field is at most 1.
        """
        z, theta = self.generator(element), self._theta(draft)
        _, p, q = self.index.to(theta.device)
        rates = self._rates(z.to(theta.device))
        steps = max(1, ceil(self._norm(rates.detach())))
        for _ in range(steps):
            term = torch.cat([theta, theta.new_ones(1)])
            for order in range(1, _TERMS + 1):
                change = torch.zeros_like(theta).index_add(0, p, rates * term[q]) / (steps * order)
                theta = theta + change
                term = torch.cat([change, theta.new_zeros(1)])
        for (name, shape), part in zip(
            self.shapes, theta.split([prod(shape) for _, shape in self.shapes]), strict=True
        ):
            draft[name] = part.view(shape).to(draft[name].device)

    def element(self, generator: torch.Generator, scale: float = 1.0) -> Tensor:
        """Draw Gaussian coordinates of a field whose norm is `scale`."""
        z = torch.randn(self.size, generator=generator, dtype=torch.float64)
        return scale * z / max(self._norm(self._rates(z)), 1e-300)

    def condition(self, element: Tensor) -> float:
        """Return the condition number of the linear part of the flow."""
        A = torch.matrix_exp(self._matrix(element.detach()))
        if not bool(A.isfinite().all()):
            return inf
        s = torch.linalg.svdvals(A)
        return float(s[0] / s[-1]) if len(s) else 1.0

    def stretching(self, X: Tensor) -> Tensor:
        M = self._matrix(X)
        return (M + M.mT) / 2

    def bounded(self, element: Tensor, condition: float) -> Tensor:
        most, size = log(condition), 2 * float(self.stretching(element.detach()).norm())
        return element if size <= most or self.condition(element) <= condition else element * (most / size)

    def _matrix(self, z: Tensor) -> Tensor:
        """Return sum_j z_j M_j (n, n)."""
        _, p, q = self.index.to(z.device)
        rates, linear = self._rates(z), q < self.entries
        M = rates.new_zeros(self.entries, self.entries)
        return M.index_put((p[linear], q[linear]), rates[linear], accumulate=True)

    def charge(self, params: Mapping[str, Tensor], cotangent: Mapping[str, Tensor]) -> Charge:
        """Compute <y, M_j theta + c_j>, (k,), and the size of its summands."""
        theta, y = self._theta(params), self._theta(cotangent)
        j, p, q = self.index.to(theta.device)
        terms = y[p] * self.values.to(theta.device) * torch.cat([theta, theta.new_ones(1)])[q]
        value = theta.new_zeros(self.size).index_add(0, j, terms)
        with torch.no_grad():
            size = theta.new_zeros(self.size).index_add(0, j, terms.abs())
        return Charge(value, size)

    def dimension(self, params: Mapping[str, Tensor]) -> int:
        """Return the rank of the fields at these parameters."""
        theta = self._theta(params).detach()
        j, p, q = self.index.to(theta.device)
        change = self.values.to(theta.device) * torch.cat([theta, theta.new_ones(1)])[q]
        D = theta.new_zeros(self.size, self.entries).index_put((j, p), change, accumulate=True)
        norms = D.norm(dim=1, keepdim=True)
        alive = norms[:, 0] > _RANK * norms.max().clamp(1e-300) if self.size else norms[:, 0] > 0
        return int(torch.linalg.matrix_rank((D / norms)[alive], rtol=_RANK)) if bool(alive.any()) else 0

    def _theta(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the entries of all parameters as one vector (n,), float64, on the device of the first parameter."""
        flat = [flattened(params, name, shape).double() for name, shape in self.shapes]
        return torch.cat([w.to(flat[0].device) for w in flat]) if flat else torch.zeros(0, dtype=torch.float64)

    def _rates(self, z: Tensor) -> Tensor:
        """Return the entries of sum_j z_j [M_j c_j]."""
        return self.values.to(z.device) * z[self.index[0].to(z.device)]

    def _norm(self, rates: Tensor) -> float:
        """Return an upper bound of the norm of a field. Raises ValueError if it exceeds 1e4."""
        _, p, q = self.index.to(rates.device)
        rows, columns = (rates.new_zeros(self.entries + 1).index_add(0, at, rates.abs()).amax() for at in (p, q))
        norm = float((rows * columns).sqrt())
        if not norm <= _FAR:
            raise ValueError(f"an element must lead along a field of norm at most {_FAR:g}. Found {norm:.3g}.")
        return norm
