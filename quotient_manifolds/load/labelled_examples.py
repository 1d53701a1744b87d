"""Read labelled examples of any format: the classes that labels name at once, the inputs when they are wanted."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from quotient_manifolds.messages import brief

Labels = Mapping[str, int] | Sequence[int]
"""{name: class} for labels that are words (or numbers, by how they are written), or the new class of 0, 1, ...."""

LARGEST = 2**31  # classes of any head
NOTABLE = 0.1  # share of unknown tokens that is worth a word


@final
class Batches(list[Any]):
    """List batches in order, and say what was done to make them.

    examples: how many there are in all. Of text, truncated: how many were cut at max_length tokens, and unknown: the
    share of their tokens that the tokenizer does not know.
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
        self.examples, self.truncated, self.max_length, self.unknown = examples, truncated, max_length, unknown

    @property
    def notes(self) -> list[str]:
        """Return sentences that belong beside any number measured on these batches."""
        said = []
        if self.truncated:
            said.append(f"{self.truncated} of {self.examples} texts were cut at {self.max_length} tokens (max_length).")
        if self.unknown > NOTABLE:
            said.append(f"{self.unknown:.0%} of the tokens are unknown to the tokenizer.")
        return said


class Examples(ABC):
    """Describe what is in a data set: the label of each row, known at once, and its input, read when it is wanted."""

    keyword: str  # of the main input
    path: Path
    labels: Sequence[int | str]  # of every row: its class, or a word where only the model can say which class it is

    def file(self, row: int) -> Path:
        """Return the file that holds the row."""
        return self.path

    @abstractmethod
    def where(self, row: int) -> str:
        """Return how a reader finds the row: a file, and a line or row in it."""

    @abstractmethod
    def inputs(
        self, batches: Sequence[Sequence[int]], model: nn.Module, homes: Sequence[Path]
    ) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
        """Return the inputs of each batch of rows, by keyword, and what `Batches` says of them.

        The model was loaded from the directories `homes`, if from any. Raises ValueError naming file and place of what
        cannot be read, and where all that was read is, as a whole, not what this model should be given.
        """

    def classes(self, rows: Sequence[int], head: Head) -> list[int]:
        """Return the class of each of the rows for a model with these classes."""
        return [
            label if isinstance(label := self.labels[row], int) else named_label(label, head, self.where(row))
            for row in rows
        ]


@final
@dataclass(frozen=True)
class Head:
    """Describe a model's classes: how many (None: not known), and the class of each name in its configuration."""

    count: int | None = None
    names: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Head:
        """Return the classes that a Hugging Face classifier's configuration tells of, nothing for any other model."""
        unwrapped = getattr(model, "get_base_model", lambda: model)()  # of peft
        config: Any = getattr(unwrapped, "config", None)
        count = getattr(config, "num_labels", None)
        if not type(unwrapped).__name__.endswith("Classification") or not isinstance(count, int):
            return cls()
        names = getattr(config, "id2label", None) or {}
        return cls(count, {str(name): int(number) for number, name in names.items()})

    @property
    def named(self) -> bool:
        """Return whether the names say anything: LABEL_0, LABEL_1, ... stand where nobody gave any."""
        return any(not re.fullmatch(r"LABEL_\d+", name) for name in self.names)

    def find(self, word: str) -> int | None:
        """Return the class of that name; capitals count only where two names differ in them alone."""
        if word in self.names:
            return self.names[word]
        alike = {number for name, number in self.names.items() if name.casefold() == word.strip().casefold()}
        return alike.pop() if len(alike) == 1 else None

    def listed(self) -> str:
        """Return the first names, for a sentence."""
        names = [brief(name, 30) for name in list(self.names)[:5]]
        return ", ".join(names) + (f" and {len(self.names) - 5} more" if len(self.names) > 5 else "")


def new_label(label: Any, labels: Labels | None, where: str) -> int:
    """Return the class that `label` stands for; ValueError naming the place where it stands if there is none."""
    if isinstance(labels, Mapping):
        if str(label) not in labels:
            raise ValueError(f"{where}: the label must be one of {', '.join(labels)}, found {brief(label)}.")
        return labels[str(label)]
    if not isinstance(label, int) or isinstance(label, bool):
        raise ValueError(f"{where}: the label must be an integer, found {brief(label)}.")
    if labels is None:
        return label
    if not 0 <= label < len(labels):
        raise ValueError(
            f"{where}: the label must be in 0 ... {len(labels) - 1}, as many as are renamed, found {brief(label)}."
        )
    return labels[label]


def named_label(word: str, head: Head, where: str) -> int:
    """Return the class of the model that a word in the data names; ValueError naming the place if there is none."""
    if (found := head.find(word)) is not None:
        return found
    if not head.named:
        raise ValueError(
            f"{where}: the label must be an integer, found {brief(word)}, and the model's classes have no names; give "
            "labels, the class of each word."
        )
    raise ValueError(
        f"{where}: the label {brief(word)} is not one of the model's ({head.listed()}); give labels, the class of each "
        "word."
    )


def check_label(label: int, num_labels: int | None, where: str) -> None:
    """Raise ValueError unless the model has the class."""
    count, whose = (LARGEST, "") if num_labels is None else (num_labels, ", the classes of the model")
    if not 0 <= label < count:
        raise ValueError(f"{where}: the label must be in 0 ... {count - 1}{whose}, found {brief(label)}.")


def check_renaming(labels: Labels | None) -> None:
    """Raise ValueError unless `labels` is None or renames something to classes 0, 1, ...."""
    if labels is None:
        return
    new: list[Any] = list(labels.values() if isinstance(labels, Mapping) else labels)
    if not new or not all(type(label) is int and 0 <= label < LARGEST for label in new):
        raise ValueError(
            f"labels must give the new class, 0 or more, of each old one, as a table or as a list; found "
            f"{brief(labels, 200)}."
        )
