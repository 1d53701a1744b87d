"""Labels as they stand in the data, made those of the model's head."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import nn

from quotient_manifolds.load.names import brief

Labels = Mapping[str, int] | Sequence[int]
"""{name: class} for labels that are words (or numbers, by how they are written), or the new class of 0, 1, ...."""

LARGEST = 2**31  # classes of any head


@final
@dataclass(frozen=True)
class Head:
    """The classes of a model: how many (None: not known), and the class of each name that its configuration gives."""

    count: int | None = None
    names: Mapping[str, int] = field(default_factory=dict)

    @property
    def named(self) -> bool:
        """Whether the names say anything: LABEL_0, LABEL_1, ... stand where nobody gave any."""
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


def head_of(model: nn.Module) -> Head:
    """Return the classes that a Hugging Face classifier's configuration tells of, nothing for any other model."""
    unwrapped = getattr(model, "get_base_model", lambda: model)()  # of peft
    config: Any = getattr(unwrapped, "config", None)
    if not type(unwrapped).__name__.endswith("Classification") or not isinstance(
        getattr(config, "num_labels", None), int
    ):
        return Head()
    names = getattr(config, "id2label", None) or {}
    return Head(config.num_labels, {str(name): int(number) for number, name in names.items()})


def new_label(label: Any, labels: Labels | None, where: str) -> int:
    """The class that `label` stands for; ValueError naming the place where it stands if there is none."""
    if isinstance(labels, Mapping):
        if brief(label).startswith("a number of") or str(label) not in labels:
            raise ValueError(f"{where}: the label must be one of {', '.join(labels)}, found {brief(label)}.")
        return labels[str(label)]
    if not isinstance(label, int) or isinstance(label, bool):
        raise ValueError(f"{where}: the label must be an integer, found {brief(label)}.")
    if labels is None:
        if abs(label) >= LARGEST:
            raise ValueError(f"{where}: the label must be in 0 ... {LARGEST - 1}, found {brief(label)}.")
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
    """Raises ValueError unless the model has the class."""
    if label < 0 or (num_labels is not None and label >= num_labels):
        allowed = "0 or more" if num_labels is None else f"in 0 ... {num_labels - 1}, the classes of the model"
        raise ValueError(f"{where}: the label must be {allowed}, found {brief(label)}.")


def check_renaming(labels: Labels | None) -> None:
    """Raises ValueError unless `labels` is None or renames something to classes 0, 1, ...."""
    if labels is None:
        return
    new: list[Any] = list(labels.values() if isinstance(labels, Mapping) else labels)
    if not new or any(
        not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < LARGEST for label in new
    ):
        raise ValueError(
            f"labels must give the new class, 0 or more, of each old one, as a table or as a list; found "
            f"{brief(labels, 200)}."
        )
