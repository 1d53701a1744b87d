"""Describe uses of a weight by an operation: y = W x for tokens x, a table lookup, or a gain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.entries import Reading, numbers
from quotient_manifolds.symmetries.trace.program import Program


class Tokens(ABC):
    """Arrange what an operation reads or writes as a matrix: the tokens of one weight (rows) by channels."""

    place: int | None
    """The number of the argument that is read; None if no activation is read."""

    @abstractmethod
    def of(self, tensor: Tensor) -> Tensor:
        """Return the argument that is read, or the result, as (tokens, channels)."""


@dataclass(frozen=True)
class Product(Tokens):
    """Take the rows of a product with a weight on its right, or the columns if it is on the `left`.

    batch: the number of the product in a batch; None if all products of the batch have the same weight.
    """

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
    """Take the rows that are looked up in a table. No activation is read."""

    place = None

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(-1, tensor.shape[-1])


@dataclass(frozen=True)
class Pixels(Tokens):
    """Take the pixels of one group of a convolution of `axes` axes, including batch and channels."""

    group: int
    groups: int
    axes: int
    place = 0

    def of(self, tensor: Tensor) -> Tensor:
        tensor = tensor.flatten(0, tensor.ndim - self.axes).chunk(self.groups, 1)[self.group]
        return tensor.movedim(1, -1).reshape(-1, tensor.shape[1])


@dataclass(frozen=True, eq=False)
class Use:
    """Hold one use of a weight (outputs, inputs, *taps), where taps are the pixels of a convolution's kernel.

    theta: the entries of theta in the weight. spots: their places in the memory from which they are read. Both are
    views of a grid (see `entries.grid`) or numbers. out, into: the nodes of the channels that it writes and reads.
    operation: its number in the program.
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
        """Compute the place of each entry in the memory that it is read from, int64 (outputs, inputs, taps)."""
        return numbers(self.spots).reshape(self.shape)

    def values(self, reading: Reading) -> Tensor:
        """Return the values of the weight (outputs, inputs, taps)."""
        return reading.viewed(self.memory, self.theta, self.spots).reshape(self.shape)

    def fits(self, program: Program) -> bool:
        """Return whether its operation, in another program, writes and reads as many channels as the weight has."""
        operation, place = program.operations[self.operation], self.tokens.place
        sides = [(operation.outs[0], self.shape[0])]
        if place is not None:
            sides.append((operation.args[place].number, self.shape[1]))
        made = ((torch.empty(program.layouts[number].shape, device="meta"), size) for number, size in sides)
        try:
            return all(self.tokens.of(tensor).shape[1] == size for tensor, size in made)
        except IndexError:  # the batch has fewer products
            return False

    def rows(self, writes: bool) -> tuple[Tensor, Tensor] | None:
        """Return starts and steps: entry r of the row of channel c is starts[c] + steps[r], in the entries of theta.

        Rows are outputs if `writes`, else inputs; a row runs over the channels of the other side and their taps. None
        unless the entries are known to be such sums.
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
