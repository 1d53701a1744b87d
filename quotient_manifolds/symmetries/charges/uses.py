"""Uses of a weight by an operation: y = W x for tokens x, a table that is looked up, a gain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.entries import Reading, numbers
from quotient_manifolds.symmetries.trace.program import Program


class Tokens(ABC):
    """Take what an operation reads and writes apart into tokens of one weight (rows) by channels."""

    place: int | None
    """Which argument of the operation is read; None if it is no activation."""

    @abstractmethod
    def of(self, tensor: Tensor) -> Tensor:
        """Return (tokens, channels) of the argument that is read, or of the result."""


@dataclass(frozen=True)
class Product(Tokens):
    """Take the rows of a product with a weight on its right; with one on its `left`, the columns. Of one of a batch."""

    left: bool
    batch: int | None

    @property
    def place(self) -> int:  # type: ignore[override]
        return 1 if self.left else 0

    def of(self, tensor: Tensor) -> Tensor:
        tensor = tensor.mT if self.left else tensor
        tensor = tensor if self.batch is None else tensor[..., self.batch, :, :]
        return tensor.reshape(-1, tensor.shape[-1])


@dataclass(frozen=True)
class Lookup(Tokens):
    """Take the rows that are looked up in a table. Nothing is read."""

    place = None

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(-1, tensor.shape[-1])


@dataclass(frozen=True)
class Pixels(Tokens):
    """Take the pixels of one of the groups of a convolution over `axes` axes, batch and channels included."""

    group: int
    groups: int
    axes: int
    place = 0

    def of(self, tensor: Tensor) -> Tensor:
        tensor = tensor.flatten(0, tensor.ndim - self.axes).chunk(self.groups, 1)[self.group]
        return tensor.movedim(1, -1).reshape(-1, tensor.shape[1])


@dataclass(frozen=True, eq=False)
class Use:
    """Hold one use of a weight (outputs, inputs, *taps).

    theta: the entries of theta that it is; spots: where they are in the memory that they are read from; each a view of
    a grid (see `entries.grid`), or numbers. out, into: nodes of the channels that it writes and reads. operation: its
    number in the program.
    """

    operation: int
    tokens: Tokens
    memory: int
    theta: Tensor
    spots: Tensor
    out: Tensor
    into: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the numbers of outputs, inputs and taps."""
        outputs, inputs, *taps = self.theta.shape
        return outputs, inputs, torch.Size(taps).numel()

    @property
    def entries(self) -> Tensor:
        """Compute the entries of theta, int64 (outputs, inputs, taps)."""
        return numbers(self.theta).reshape(self.shape)

    @property
    def places(self) -> Tensor:
        """Compute where each entry is in the memory that it is read from, int64 (outputs, inputs, taps)."""
        return numbers(self.spots).reshape(self.shape)

    def values(self, reading: Reading) -> Tensor:
        """Return its numbers (outputs, inputs, taps)."""
        return reading.viewed(self.memory, self.theta, self.spots).reshape(self.shape)

    def fits(self, program: Program) -> bool:
        """Return whether its operation writes and reads, in a program, as many channels as it has."""
        operation, place = program.operations[self.operation], self.tokens.place
        sides = [(operation.outs[0], self.shape[0])]
        if place is not None:
            sides.append((operation.args[place].number, self.shape[1]))
        made = ((torch.empty(program.layouts[number].shape, device="meta"), size) for number, size in sides)
        try:
            return all(self.tokens.of(tensor).shape[1] == size for tensor, size in made)
        except IndexError:  # of a batch of products there are fewer
            return False

    def rows(self, writes: bool) -> tuple[Tensor, Tensor] | None:
        """Return starts and steps: entry r of the row of channel c is starts[c] + steps[r], in the entries of theta.

        Rows are outputs if it `writes`, else inputs; a row goes through the other side's channels, and their taps. None
        if the entries are not such sums, or not known to be.
        """
        if not self.theta.is_meta:
            return None
        view = self.theta if writes else self.theta.transpose(0, 1)
        if not view.numel():
            return torch.zeros(len(view), dtype=torch.long), torch.zeros(0, dtype=torch.long)
        row = numbers(view[0]).flatten()
        return torch.arange(len(view)) * view.stride(0) + row[0], row - row[0]


@dataclass(frozen=True, eq=False)
class Gain:
    """Hold numbers that multiply channels: node after = value^power * node before, for entries of one memory."""

    operation: int
    memory: int
    entries: Tensor
    places: Tensor
    power: int
    before: Tensor
    after: Tensor
