"""Parameters moved in some rows, and gradients that are sparse in theirs: embeddings."""

from __future__ import annotations

from typing import NamedTuple, final

import torch
from torch import Tensor


class _Written(NamedTuple):
    out: Tensor
    version: int
    rows: Tensor


@final
class RowWriter:
    """Writes w + scale z for a sparse z, of which some rows are given and the others are 0.

    A buffer that nobody has written to since is w in the others already; the tensor's own count of writes tells.
    """

    def __init__(self) -> None:
        self._last: dict[int, _Written] = {}

    def write(self, w: Tensor, scale: Tensor | None, z: Tensor, out: Tensor) -> None:
        rows, xi = z.indices()[0], z.values()
        last = self._last.pop(address(w), None)
        if last is None or last.out is not out or last.version != out._version:
            out.copy_(w)
        elif not torch.equal(last.rows, rows):
            out.index_copy_(0, last.rows, w.index_select(0, last.rows))
        here = w.index_select(0, rows)
        here = here.add_(xi) if scale is None else here.addcmul_(scale.index_select(0, rows), xi)
        out.index_copy_(0, rows, here)
        if not out.is_inference():  # those count nothing
            self._last[address(w)] = _Written(out, out._version, rows)


def scaled_rows(grad: Tensor, scale: Tensor | None) -> Tensor:
    """scale * grad of a gradient that is sparse in its first dimension."""
    grad = grad.coalesce()
    rows, values = grad.indices()[0], grad.values()
    if scale is not None:
        values = values * scale.index_select(0, rows)
    return sparse_rows(rows, values, grad.shape)


def sparse_rows(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """The sparse tensor with these rows, ascending; all others are 0."""
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True, check_invariants=False)


def address(tensor: Tensor) -> int:
    """Where a dense tensor's memory begins; the same for its views."""
    return tensor.untyped_storage().data_ptr()
