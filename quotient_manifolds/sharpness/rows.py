"""Embeddings by the rows a batch uses: their gradients are sparse, and so is every point that is climbed to from 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from quotient_manifolds.geometry.sparse import sparse_rows
from quotient_manifolds.sharpness.blocks import Blocks


@final
class SparseEmbeddings(TorchFunctionMode):
    """Inside, looking up rows of a parameter gives it a gradient of these rows only, whatever the module asks for.

    The gradient is the same; the many rows of zeros are neither made nor read.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding and not torch.compiler.is_compiling():
            weight = kwargs["weight"] if "weight" in kwargs else args[1]
            plain = not kwargs.get("scale_grad_by_freq") and kwargs.get("max_norm") is None and len(args) <= 3
            if plain and weight.is_leaf:  # what else the gradient passes through may not know sparse ones
                kwargs = kwargs | {"sparse": True}
        return func(*args, **kwargs)


@final
class Rows:
    """The rows, of blocks with sparse gradients, in which the start or a gradient was ever not 0: all others stay 0.

    Packed blocks hold these rows only, ascending. Nothing is lost: rows are added as soon as a gradient has them.
    """

    def __init__(self, start: Blocks, gradient: Blocks) -> None:
        self.kept: dict[str, Tensor] = {}
        self._shapes = {key: block.shape for key, block in start.items()}
        for key, block in gradient.items():
            if block.is_sparse:
                used = start[key].flatten(1).any(dim=1).index_fill_(0, _parts(block)[0], True)
                if 2 * int(used.sum()) <= len(used):
                    self.kept[key] = used.nonzero()[:, 0]

    def pack(self, whole: Blocks) -> Blocks:
        """The start's rows."""
        return whole | {key: whole[key].index_select(0, rows) for key, rows in self.kept.items()}

    def sparse(self, packed: Blocks) -> Blocks:
        """All blocks in their shapes, the packed ones as sparse tensors."""
        return packed | {key: sparse_rows(rows, packed[key], self._shapes[key]) for key, rows in self.kept.items()}

    def whole(self, packed: Blocks) -> Blocks:
        """All blocks in their shapes, dense."""
        return {key: block.to_dense() if block.is_sparse else block for key, block in self.sparse(packed).items()}

    def pack_gradient(self, gradient: Blocks, holders: Iterable[Blocks]) -> Blocks:
        """The gradient, packed; if it has rows that were not kept, all `holders` of packed blocks get them too."""
        packed = dict(gradient)
        for key, block in gradient.items():
            if key in self.kept:
                rows, values = _parts(block)
                self._keep(key, rows, holders)
                packed[key] = _spread(values, rows, self.kept[key])
            elif block.is_sparse:
                packed[key] = block.to_dense()
        return packed

    def _keep(self, key: str, rows: Tensor, holders: Iterable[Blocks]) -> None:
        kept = self.kept[key]
        grown = kept if torch.equal(rows, kept) else torch.cat([kept, rows]).unique()
        if len(grown) == len(kept):
            return
        self.kept[key] = grown
        for holder in {id(holder): holder for holder in holders}.values():
            holder[key] = _spread(holder[key], kept, grown)


def _parts(block: Tensor) -> tuple[Tensor, Tensor]:
    """Rows, ascending, and their values; all rows of a dense block."""
    if not block.is_sparse:
        return torch.arange(len(block), device=block.device), block
    block = block.coalesce()
    return block.indices()[0], block.values()


def _spread(values: Tensor, rows: Tensor, among: Tensor) -> Tensor:
    """Values of `rows` as those of the rows `among`, which contain them; 0 for the others."""
    if len(rows) == len(among):
        return values
    places = torch.searchsorted(among, rows)
    return values.new_zeros(len(among), *values.shape[1:]).index_copy_(0, places, values)
