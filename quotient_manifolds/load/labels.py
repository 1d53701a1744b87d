"""Labels as they stand in the data, made those of the model's head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Labels = Mapping[str, int] | Sequence[int]
"""{name: class} for labels that are words (or numbers, by how they are written), or the new class of 0, 1, ...."""


def new_label(label: Any, labels: Labels | None, where: str) -> int:
    """The class that `label` stands for; ValueError naming the place where it stands if there is none."""
    if isinstance(labels, Mapping):
        if str(label) not in labels:
            raise ValueError(f"{where}: the label must be one of {', '.join(labels)}, found {label!r}.")
        return labels[str(label)]
    if not isinstance(label, int) or isinstance(label, bool):
        raise ValueError(f"{where}: the label must be an integer, found {label!r}.")
    if labels is None:
        return label
    if not 0 <= label < len(labels):
        raise ValueError(
            f"{where}: the label must be in 0 ... {len(labels) - 1}, as many as are renamed, found {label}."
        )
    return labels[label]


def check_label(label: int, num_labels: int | None, where: str) -> None:
    """Raises ValueError unless the model has the class."""
    if label < 0 or (num_labels is not None and label >= num_labels):
        allowed = "0 or more" if num_labels is None else f"in 0 ... {num_labels - 1}, the classes of the model"
        raise ValueError(f"{where}: the label must be {allowed}, found {label}.")


def check_renaming(labels: Labels | None) -> None:
    """Raises ValueError unless `labels` is None or renames something to classes 0, 1, ...."""
    if labels is None:
        return
    new: list[Any] = list(labels.values() if isinstance(labels, Mapping) else labels)
    if not new or any(not isinstance(label, int) or isinstance(label, bool) or label < 0 for label in new):
        raise ValueError(
            f"labels must give the new class, 0 or more, of each old one, as a table or as a list; found {labels!r}."
        )
