"""The labelled points of a data set, of which only those that are measured on get read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from quotient_manifolds.load.labels import Head, named_label


class Reader(ABC):
    """Rows -> the inputs of a model by keyword; and, once all are read, what was done to them."""

    truncated: int = 0  # texts that were cut
    length: int | None = None  # tokens they were cut at
    unknown: float = 0.0  # share of the tokens that the tokenizer does not know

    @abstractmethod
    def __call__(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return the inputs; ValueError naming file and place of what cannot be read."""

    def check(self) -> None:
        """Raise ValueError if all that was read is, as a whole, not what a model should be given."""
        return


@final
class Batches(list[Any]):
    """Batches, in order, and what was done to make them.

    examples: how many there are in all. truncated: how many texts were cut at max_length tokens (None where nothing is
    text). unknown: the share of their tokens that the tokenizer does not know.
    """

    def __init__(
        self,
        batches: Sequence[Any],
        *,
        examples: int,
        truncated: int = 0,
        max_length: int | None = None,
        unknown: float = 0.0,
    ) -> None:
        super().__init__(batches)
        self.examples = examples
        self.truncated = truncated
        self.max_length = max_length
        self.unknown = unknown

    @property
    def notes(self) -> list[str]:
        """Sentences that belong beside any number measured on these batches."""
        said = []
        if self.truncated:
            said.append(f"{self.truncated} of {self.examples} texts were cut at {self.max_length} tokens (max_length).")
        if self.unknown > NOTABLE:
            said.append(f"{self.unknown:.0%} of the tokens are unknown to the tokenizer.")
        return said


NOTABLE = 0.1  # share of unknown tokens that is worth a word


class Points(ABC):
    """What is in a data set: the class of each row, at once, and the inputs when they are wanted."""

    keyword: str  # of the main input

    @property
    @abstractmethod
    def labels(self) -> Sequence[int | str]:
        """The class of every row, or a word for it where only the model can say which it is."""

    def classes(self, rows: Sequence[int], head: Head) -> list[int]:
        """Return the class of each of the rows for a model with these classes."""
        return [
            label if isinstance(label := self.labels[row], int) else named_label(label, head, self.where(row))
            for row in rows
        ]

    @abstractmethod
    def file(self, row: int) -> Path:
        """The file that holds the row."""

    @abstractmethod
    def where(self, row: int) -> str:
        """How a reader finds the row: a file, and a line or row in it."""

    @abstractmethod
    def reader(self, model: nn.Module, homes: Sequence[Path]) -> Reader:
        """Reads rows for a model that was loaded from these directories, if from any."""
