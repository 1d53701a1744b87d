"""Measure constants of channels by those who read them: by the other factor of a pair, in whatever basis it stands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.pair import Factor, SymmetricPair
from quotient_manifolds.symmetries.strided_view import StridedView
from quotient_manifolds.symmetries.wires.entries import Entries
from quotient_manifolds.symmetries.wires.linear_algebra import Array
from quotient_manifolds.symmetries.wires.walk import Walk

Owner = tuple[str, str, int]
"""What a shift starts from: "bias" or "weight", the parameter, and the place of the number or the row."""
ROWS = 1 << 24  # more than a weight has


@dataclass(eq=False)
class Partners:
    """Find the channels of pairs that numbers and rows of parameters are, and the lengths that pairs give them."""

    walk: Walk
    pairs: tuple[SymmetricPair, ...]
    shifted: frozenset[str] = frozenset()  # biases from which shifts start: they measure nothing
    _mixed: dict[tuple[Any, ...], bool] = field(default_factory=dict)
    _rows: dict[tuple[str, int], Array] = field(default_factory=dict)
    _channels: dict[tuple[str, str, bool], Tensor] = field(default_factory=dict)

    def gram(self, params: Mapping[str, Tensor], owners: Sequence[Owner]) -> Array | None:
        """Return M (n, n), with t . M t the squared length of constants t as those who read them see it.

        Of channels of a pair (G, H) it is H^T H, which follows when (G A^-1, H A^T) moves; of all others the identity:
        None where all are others. What stands several times on one channel is several vectors.
        """
        name = owners[0][1]
        several = list(self._of(name, params))
        if not several:
            return None
        places, M = [self._place(owner) for owner in owners], np.eye(len(owners))
        for channels, R in several:
            channel = channels[places].long()
            inside = np.flatnonzero(channel >= 0)
            M[np.ix_(inside, inside)] = _between(R.mT @ R, channel[inside]).numpy()
        return M

    def measured(
        self, entries: Entries, params: Mapping[str, Tensor], by: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Return a weight (taps, out, in) with channels of pairs in a basis in which its lengths and angles are theirs.

        That is R W where its rows are columns of G, of a pair (G, H) with H^T H = R^T R, and W R^T where its columns
        are: what it is made of then does not change when the pair moves. by: the parameters that hold H, if others do.
        """
        W = entries.read(params)
        for channels, R in self._of(entries.name, by or params):
            rows, columns = _along(channels, entries)
            if rows is not None:
                W[:, rows >= 0] = _between(R, rows[rows >= 0]) @ W[:, rows >= 0]
            elif columns is not None:
                W[:, :, columns >= 0] = W[:, :, columns >= 0] @ _between(R, columns[columns >= 0]).mT
        return W

    def mix(self, entries: Entries, axis: int) -> bool:
        """Return whether pairs mix or scale what is along the rows (1) or columns (2) of a weight (taps, out, in)."""
        key = (*entries.key, axis)
        if key not in self._mixed:
            sides = (factor for pair in self.pairs for factor in (pair.G, pair.H))
            there = [each for each in sides if any(view.name == entries.name for view in each.views)]
            self._mixed[key] = any(self._stand(each, entries, axis) for each in there)
        return self._mixed[key]

    def _stand(self, factor: Factor, entries: Entries, axis: int) -> bool:
        """Return whether channels of a factor are rows (1) or columns (2) of a weight: by strides, where these tell."""
        views = [view for view in factor.views if view.name == entries.name]
        told = [k for k in (1, 2) if all(_has_lines(view, entries, k) for view in views)]
        if len(told) == 1 and views[0].shape[0] * views[0].shape[2] > 1:
            return told[0] == axis
        found = _along(_channels(factor, self.walk.shapes)[entries.name], entries)[axis - 1]
        return found is not None and bool((found >= 0).any())

    def _of(self, name: str, params: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the channel of each number of a parameter in a pair, -1 if it has none, and R with R^T R = H^T H."""
        for pair in self.pairs:
            for own, other in ((pair.G, pair.H), (pair.H, pair.G)):
                if any(view.name == name for view in own.views):
                    key = name, pair.name, own is pair.G
                    if key not in self._channels:
                        self._channels[key] = _channels(own, self.walk.shapes)[name]
                    views = tuple(view for view in other.views if view.rows > 1 or view.name not in self.shifted)
                    yield self._channels[key], _triangle(pair, Factor(views), params)

    def _place(self, owner: Owner) -> int:
        """Return the place of a number, or of the first number of a row."""
        kind, name, place = owner
        if kind == "bias":
            return place
        key = name, place // ROWS
        if key not in self._rows:
            indices = (each.entries.index()[0, :, 0] for each in self.walk.linears if each.entries.name == name)
            self._rows[key] = next(each.numpy() for each in indices if int(each[0]) == key[1])
        return int(self._rows[key][place % ROWS])


def _between(R: Tensor, channels: Tensor) -> Tensor:
    """Return entries of a matrix for these channels; those that stand there a second time are apart from the first."""
    copy = (channels[:, None] == channels).tril(-1).sum(1)
    return R[channels][:, channels].masked_fill(copy[:, None] != copy, 0.0)


def _has_lines(view: StridedView, entries: Entries, axis: int) -> bool:
    """Return whether strides show that the channels of a view are whole lines of a weight, which an axis numbers."""
    layout = entries.layout
    if not layout.is_meta:
        return False
    axes = list(zip(layout.shape, layout.stride(), strict=True))
    count, step = axes.pop(axis)
    line, rows = _steps(axes), _steps(view.axes[1])
    if not set(line) <= set(rows):
        return False
    start = np.array([view.offset - entries.first])
    for size, stride in (*view.axes[0], *view.axes[2], *(part for part in rows if part not in line)):
        start = (start[:, None] + stride * np.arange(size)).reshape(-1)
    return bool(((start >= 0) & (start < count * step) & (start % max(step, 1) == 0)).all())


def _steps(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return sizes and strides as few as say the same, the largest stride first."""
    found = list[tuple[int, int]]()
    for size, stride in sorted((part for part in parts if part[0] > 1), key=itemgetter(1), reverse=True):
        if found and found[-1][1] == size * stride:
            found[-1] = found[-1][0] * size, stride
        else:
            found.append((size, stride))
    return found


def _along(channels: Tensor, entries: Entries) -> tuple[Tensor | None, Tensor | None]:
    """Return the channel of each row (taps, out, in), if its numbers have one, or of each column; -1 if none."""
    layout = entries.layout
    channel = channels.as_strided(layout.shape, layout.stride(), entries.first) if layout.is_meta else channels[layout]
    rows, columns = channel[0, :, 0], channel[0, 0, :]
    if torch.equal(channel, rows[:, None].expand_as(channel)):
        return rows.long(), None
    return None, columns.long() if torch.equal(channel, columns.expand_as(channel)) else None


def _channels(factor: Factor, shapes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return for the numbers of each parameter, row by row, the channel of a factor that has them; -1 if none."""
    names = {view.name for view in factor.views}
    found = {name: torch.full((shapes[name].numel(),), -1, dtype=torch.int32) for name in names}
    heads, _, h = factor.views[0].shape
    channels = torch.arange(heads * h, dtype=torch.int32).view(heads, 1, h)
    factor.write(found, channels.expand(heads, factor.rows, h))
    return found


def _triangle(pair: SymmetricPair, factor: Factor, params: Mapping[str, Tensor]) -> Tensor:
    """Return R with R^T R = H^T H of all heads, block by block; where complex numbers act, lengths alone."""
    H = factor.read(params).double().cpu()
    if pair.acts == "GL(1, C)":
        return torch.block_diag(*(H.square().mean(dim=(1, 2)).sqrt()[:, None, None] * torch.eye(2)))
    R = torch.linalg.qr(torch.nn.functional.pad(H, (0, 0, 0, pair.h)), mode="r").R  # with as many rows as columns
    return torch.block_diag(*R)
