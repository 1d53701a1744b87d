"""The labelled points of a data set, of which only those that are measured on get read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor, nn

Read = Callable[[Sequence[int]], dict[str, Tensor]]
"""Rows -> the inputs of a model by keyword."""


class Points(ABC):
    """What is in a data set: the class of each row, at once, and the inputs when they are wanted."""

    keyword: str  # of the main input

    @property
    @abstractmethod
    def labels(self) -> Sequence[int]:
        """The class of every row."""

    @abstractmethod
    def file(self, row: int) -> Path:
        """The file that holds the row."""

    @abstractmethod
    def where(self, row: int) -> str:
        """How a reader finds the row: a file, and a line or row in it."""

    @abstractmethod
    def reader(self, model: nn.Module, home: Path | None) -> Read:
        """Reads rows for a model whose directory is `home`, if it has one."""
